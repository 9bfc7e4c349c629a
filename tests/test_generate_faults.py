"""kill -9 of the client, of the server, of both, at random times: every row comes out once, and no answer is asked for again."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.generation.segments import parsed
from scripts.lib.ground.stage import Job
from scripts.lib.serving.settings import ServerSettings
from tests.sglang_parts import RealServer
from tests.stage_inputs import REQUESTS, RUNTIME, finish, generate_job, prepared_row, publish_prepared, publish_target, start, user
from tests.stub_server import from_prompt

pytest_plugins = ["tests.sglang_parts"]
ROUNDS = 20
VICTIMS = (("client",), ("server",), ("client", "server"))
Answered = dict[tuple[str, int], tuple[list[int], list[int]]]  # by id and turn: the ids that were asked and those that came back


def fault_job(folder: Path, rows: int, target: Path, server: dict[str, Any], **options: Any) -> Job:
    """A job over `rows` rows whose servers `server` describes."""
    prepared = publish_prepared(folder / "prepared", [prepared_row(f"r{number:03d}", user(f"{number} " * 9)) for number in range(rows)])
    job = generate_job(folder, prepared, target, engine="sglang", **options)
    requests = REQUESTS | {"concurrency": {"short": 8, "long": 1}, "patience": 60.0, "timeout": 60.0, "window": 50}
    return Job(job.stage, job.output, job.inputs, job.settings, RUNTIME | {"server": server, "requests": requests}, job.work)


def answered(job: Job) -> Answered:
    """What the journal in the work folder of `job` holds at this moment."""
    lines: list[bytes] = []
    for path in job.work.glob("generate/*/partial/answers-*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # a stage that publishes just now removes its journal
            lines += path.read_bytes().splitlines(keepends=True)
    records = [record for record in map(parsed, lines) if record]
    return {(record["id"], record["turn"]): (record["prompt_ids"], record["output_ids"]) for record in records}


def wait_for(ready: Callable[[], bool], process: ForkServerProcess | None = None) -> None:
    """Return when `ready`, or when `process` has ended."""
    while not ready() and (process is None or process.is_alive()):
        time.sleep(0.005)


def wait_for_answers(job: Job, answers: int, process: ForkServerProcess) -> None:
    """Return when the journal of `job` holds so many `answers`, or when `process` has ended."""
    wait_for(lambda: len(answered(job)) >= answers, process)


def kill_client(process: ForkServerProcess) -> None:
    """kill -9 of the whole process group of the stage."""
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def check_complete(job: Job, rows: int, before: Answered) -> None:
    """Every row is there once, no row is an error, and what was answered `before` a kill is in it unchanged."""
    table = pl.concat([pl.read_parquet(path) for path in sorted(job.output.glob("responses-*.parquet"))])
    assert table["id"].to_list() == [f"r{number:03d}" for number in range(rows)]
    assert pl.read_parquet(job.output / "failed.parquet").height == 0
    published = {(row["id"], row["turn"]): (row["prompt_ids"], row["output_ids"]) for row in table.iter_rows(named=True)}
    assert before.items() <= published.items()


class StubProcess:
    """The stub as a process that can be killed and started again at the same address."""

    def __init__(self, target: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "tests.stub_server", str(self.port), str(target), str(log)]
        self.log = log
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health").status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def asked(self) -> list[list[int]]:
        """The prompts of all requests so far, without a line that is being written."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def random_kills(chance: random.Random) -> list[tuple[tuple[str, ...], int, float]]:
    """20 rounds: who is killed, after how many more answers, and seconds until the next start."""
    return [(VICTIMS[number % len(VICTIMS)], chance.randrange(1, 30), chance.uniform(0, 0.1)) for number in range(ROUNDS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@pytest.fixture
def stub(target: Path, tmp_path: Path) -> Iterator[StubProcess]:
    stub = StubProcess(target.parent, tmp_path / "asked.jsonl")
    yield stub
    stub.kill()


class KilledRun:
    """One run of the stage that is killed, again and again, until it ends."""

    def __init__(self, folder: Path, rows: int, target: Path, stub: StubProcess) -> None:
        folder.mkdir()
        self.folder, self.rows, self.stub = folder, rows, stub
        self.job = fault_job(folder, rows, target, {"urls": [stub.url], "start_timeout": 60.0})
        self.before: Answered = {}
        self.process = start(self.job, folder / "log")

    def kill(self, victims: Sequence[str], answers: int, seconds: float) -> None:
        """Kill `victims` after `answers` more, wait, and start them again; what is answered must not be asked again."""
        wait_for_answers(self.job, len(self.before) + answers, self.process)
        if "client" in victims:
            kill_client(self.process)
        if "server" in victims:
            self.stub.kill()
        time.sleep(seconds)
        self.before = answered(self.job)
        asked = len(self.stub.asked())
        if "server" in victims:
            self.stub.start()
        if "client" in victims and not self.job.output.exists():
            self.process = start(self.job, self.folder / "log")
            self.check_asked(asked)

    def check_asked(self, asked: int) -> None:
        """Of what is asked after the first `asked` requests, nothing was answered before."""
        wait_for(lambda: len(self.stub.asked()) > asked, self.process)
        again = {tuple(prompt) for prompt in self.stub.asked()[asked:]}
        assert not again & {tuple(prompt) for prompt, _ in self.before.values()}

    def end(self) -> None:
        """Let it end and look at what it published."""
        self.process.join()
        assert self.process.exitcode == 0, (self.folder / "log").read_text()
        check_complete(self.job, self.rows, self.before)
        self.check_answers()

    def check_answers(self) -> None:
        """Every published answer is what the stub says to its prompt."""
        table = pl.read_parquet(self.job.output / "responses-00000.parquet")
        assert all(row["output_ids"] == from_prompt({"input_ids": row["prompt_ids"]}) for row in table.iter_rows(named=True))


def test_kills_at_random_times_leave_no_hole_and_repeat_nothing(target: Path, tmp_path: Path, stub: StubProcess) -> None:
    """20 rounds: resumed runs of other tools lost rows, doubled rows, and kept errors as answers (DeepSpec issue 35, curator pull 200)."""
    kills = random_kills(random.Random(5))
    while kills:
        run = KilledRun(tmp_path / f"run{len(kills)}", 240, target, stub)
        while kills and not run.job.output.exists():
            run.kill(*kills.pop())
        run.end()


@pytest.mark.sglang
def test_a_killed_client_goes_on_with_a_real_server(sglang_server: RealServer, tmp_path: Path) -> None:
    chance, rows = random.Random(6), 120
    target = publish_target(tmp_path / "target")
    server = {"urls": [sglang_server.url], "start_timeout": 60.0}
    # On a busy machine this process may sleep until a client has ended: then the next one is killed.
    tries = (killed_thrice(fault_job(tmp_path / str(number), rows, target, server), chance) for number in range(5))
    job, before = next((job, before) for job, before in tries if not job.output.exists())
    code, log = finish(job, tmp_path / "log")
    assert code == 0 and "resume at" in log, log
    check_complete(job, rows, before)
    table = pl.read_parquet(job.output / "responses-00000.parquet")
    assert table["output_ids"].list.len().is_between(1, 12).all() and not table["retokenised"].any()


def killed_thrice(job: Job, chance: random.Random) -> tuple[Job, Answered]:
    """`job`, of which three clients were killed behind some answers of their own, and all answers that they left."""
    before: Answered = {}
    for _ in range(3):
        process = start(job, job.output.parent / "killed.log")
        wait_for_answers(job, len(before) + chance.randrange(1, 12), process)
        time.sleep(chance.uniform(0, 0.1))
        kill_client(process)
        before |= answered(job)
    return job, before


@pytest.mark.sglang
def test_a_real_server_that_is_killed_twice_comes_back_and_serves_the_next_dataset_too(
    sglang_settings: ServerSettings, tmp_path: Path
) -> None:
    target = publish_target(tmp_path / "target")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = {"python": sglang_settings.python, "port": port, "start_timeout": sglang_settings.start_timeout, "linger": 60.0}
    job = fault_job(tmp_path, 60, target, server, max_tokens={"short": 40, "long": 40})
    process = start(job, tmp_path / "log")
    before: Answered = {}
    for _ in range(2):
        goal = len(before) + 10
        wait_for_answers(job, goal, process)
        for pid in processes_with(f"--port {port}"):
            os.kill(pid, signal.SIGKILL)
        before = answered(job)
    process.join()
    log = (tmp_path / "log").read_text()
    assert process.exitcode == 0, log
    assert log.count("does not answer") >= 2 and log.count("answers again") >= 2 and "restart 2 of 5" in log
    check_complete(job, 60, before)
    other = fault_job(tmp_path / "other", 5, target, server, max_tokens={"short": 40, "long": 40})
    code, log = finish(other, tmp_path / "other.log")
    assert code == 0 and not (other.work / "servers").exists(), f"nothing was started for it: {log}"
    check_complete(other, 5, {})
    for pid in processes_with(f'"port": {port}'):  # the keeper
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_with(f"--port {port}"))


def processes_with(words: str) -> list[int]:
    """Processes of servers, or of who keeps them, whose command line holds `words`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and ("launch" in line or "keeper" in line):
            found.append(int(path.parent.name))
    return found
