"""20 rounds of kill -9 against a real SGLang server on a CPU: `python -m benchmarks.faults [--seed 5] [--rows 240]`.

As tests/test_generate_faults.py does with a stub, whose restart takes no half minute: the client of stage generate, the server or both
die at random times, until all rounds are over and every run has ended. Each run must come out with all ids once, no error row,
and what was answered before each kill unchanged. The last line is JSON.
"""

import argparse
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.serving.asking import healthy
from scripts.lib.serving.server import server
from scripts.lib.serving.settings import ServerSettings
from tests.stage_inputs import publish_target
from tests.test_generate_faults import KilledRun, StubProcess, processes_with, random_kills

HEALTH_SECONDS = 5.0


@dataclass
class RealProcess(StubProcess):
    """SGLang in the place of the stub: its supervisor starts it again after every kill."""

    url_of_server: str
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.url_of_server

    def start(self) -> None:
        """Wait until it is back."""
        while not healthy(self.url, HEALTH_SECONDS):
            time.sleep(0.5)

    def kill(self) -> None:
        """kill -9 of all its processes."""
        for pid in processes_with(f"--port {self.port}"):
            os.kill(pid, signal.SIGKILL)

    def asked(self) -> list[list[int]]:
        """Unknown: a real server keeps no list."""
        return []


class RealRun(KilledRun):
    """A run whose answers only the server knows."""

    def check_asked(self, asked: int) -> None:
        """What was answered before a kill is looked for in the result, as a real server keeps no list of requests."""

    def check_answers(self) -> None:
        """Greedy answers of a random model cannot be foretold."""


@contextmanager
def real_server(folder: Path, target: Path) -> Iterator[RealProcess]:
    """A server that may die as often as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ServerSettings(python=os.environ.get("AERIE_SGLANG_PYTHON"), port=port, restarts=1000)
    with server(settings, target.parent, folder / "server.log") as running:
        yield RealProcess(running.urls[0], port)


def rounds(folder: Path, rows: int, seed: int) -> dict[str, Any]:
    """Kill and resume until no kill is left; what happened."""
    target = publish_target(folder / "target")
    kills, runs, start = random_kills(random.Random(seed)), 0, time.perf_counter()
    dead = {victim: sum(victim in victims for victims, _, _ in kills) for victim in ("client", "server")}
    with real_server(folder, target) as real:
        while kills:
            run, runs = RealRun(folder / f"run{runs}", rows, target, real), runs + 1
            while kills and not run.job.output.exists():
                run.kill(*kills.pop())
                print(f"{len(kills)} kills left, {len(run.before)} of {rows} answered in run {runs}", flush=True)
            run.end()
    return {
        "rounds": 20,
        "killed": dead,
        "runs": runs,
        "rows": runs * rows,
        "complete": True,
        "seconds": round(time.perf_counter() - start),
    }


def main() -> None:
    """Arguments, all rounds, one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--rows", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(rounds(Path(folder), options.rows, options.seed)))


if __name__ == "__main__":
    main()
