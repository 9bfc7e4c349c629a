"""The process that keeps servers between the jobs that use them, so that jobs of one configuration share its start.

Run as a program by `pool`: `python -m scripts.lib.serving.keeper SOCKET SETTINGS`. It holds the GPUs, starts what a job asks for, ends
what the next job does not want, and serves one job at a time: a second one waits at the socket, as two would spoil each other's figures.
A job is there as long as its connection is, however it ends. After `linger` seconds without a job the keeper ends its servers and itself;
when it is killed, the guardian of each server ends that.

A job sends one line, `{"wanted": [...], "one": false}`, and gets one back, `{"servers": [...]}` or `{"error": "..."}`; a second line with
an error follows when a server dies under it. With `one` it gets the one of them that runs already, else the first.
"""

import contextlib
import json
import logging
import os
import re
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import healthy
from scripts.lib.serving.claim import Claim, claimed_gpus
from scripts.lib.serving.launch import free_port, launch, url_of
from scripts.lib.serving.process import ServerProcess
from scripts.lib.serving.settings import ServerSettings

log = logging.getLogger(__name__)
HEALTH_SECONDS, POLL_SECONDS = 5.0, 0.2
# Of the memory of a GPU, over all servers on it at a time; the rest is for activations, CUDA graphs and what the job itself computes.
MEMORY_FRACTION = 0.8
NO_MEMORY = re.compile(r"(?:out of|not enough) memory", re.IGNORECASE)
CROWDED = "two copies of the target may not fit: set runtime.server.side_by_side to false"
STARTED_OTHERWISE = "change algorithm, attention_backend or flags of the variant, or runtime.server, or leave the variant out"


@dataclass(frozen=True)
class Wanted:
    """A server that a job wants: `key` names all that decides what it serves, `share` is its part of the memory for servers."""

    key: str
    target: str
    flags: Sequence[str]
    log: str
    share: float


@dataclass(frozen=True)
class Found:
    """A server that runs, by its `key`. `start_seconds` is what its start took, in this job or one before."""

    key: str
    url: str
    command: Sequence[str]
    start_seconds: float


class Kept:
    """A server and what became of its start."""

    def __init__(self, wanted: Wanted, url: str, command: Sequence[str], process: ServerProcess) -> None:
        self.wanted, self.url, self.command, self.process = wanted, url, command, process
        self.begin = time.monotonic()
        self.start_seconds: float | None = None

    def death(self) -> str | None:
        """What ended the server; None while it runs."""
        code = self.process.exit_code()
        if code is None:
            return None
        words = self.process.last_error()
        if self.start_seconds is not None:
            return f"{self.process.log}: the server died with code {code} during the job; its log ends with: {words}"
        crowded = NO_MEMORY.search(words) and self.wanted.share < 1
        remedy = CROWDED if crowded else STARTED_OTHERWISE
        return f"{self.process.log}: the server died with code {code} before it was healthy; its log ends with: {words}; {remedy}"

    def found(self) -> Found:
        """What the job is told."""
        assert self.start_seconds is not None
        return Found(self.wanted.key, self.url, self.command, round(self.start_seconds, 1))


class Keeper:
    """The servers that are up."""

    def __init__(self, settings: ServerSettings, claim: Claim) -> None:
        self.settings, self.claim = settings, claim
        self.kept: dict[str, Kept] = {}

    def serve(self, job: socket.socket) -> None:
        """Give one job what it wants and stay with it until it goes or one of its servers dies."""
        line = read_line(job)
        if not line:
            return
        asked = json.loads(line)
        wanted = self.chosen([Wanted(**entry) for entry in asked["wanted"]], asked["one"])
        for key in set(self.kept) - {server.key for server in wanted}:
            self.end(key)
        for server in wanted:
            problem = self.up(server, job)
            if gone(job):
                return
            if problem:
                tell(job, {"error": problem})
                return
        tell(job, {"servers": [asdict(self.kept[server.key].found()) for server in wanted]})
        while not gone(job, POLL_SECONDS):
            for server in wanted:
                if problem := self.kept[server.key].death():
                    self.end(server.key)
                    tell(job, {"error": problem})
                    return

    def chosen(self, wanted: Sequence[Wanted], one: bool) -> Sequence[Wanted]:
        """The servers to have up: all that are `wanted`, or `one` of them."""
        if not one:
            return wanted
        running = [server for server in wanted if server.key in self.kept and not self.kept[server.key].death()]
        return (running or wanted)[:1]

    def up(self, wanted: Wanted, job: socket.socket) -> str | None:
        """Have `wanted` running and healthy; what went wrong instead, None also when the job has gone meanwhile."""
        if wanted.key in self.kept and self.kept[wanted.key].death():
            self.end(wanted.key)
        kept = self.kept.get(wanted.key) or self.start(wanted)
        while kept.start_seconds is None and not gone(job, POLL_SECONDS):
            problem = kept.death()
            seconds = time.monotonic() - kept.begin
            if not problem and seconds > self.settings.start_timeout:
                limit = f"runtime.server.start_timeout {self.settings.start_timeout:.0f} s"
                problem = f"{kept.process.log}: the server was not healthy within {limit}; its log ends with: {kept.process.last_error()}"
            if problem:
                self.end(wanted.key)
                return problem
            if healthy(kept.url, HEALTH_SECONDS):
                kept.start_seconds = time.monotonic() - kept.begin
                log.info("%s is healthy after %.0f s", kept.url, kept.start_seconds)
        return None

    def start(self, wanted: Wanted) -> Kept:
        """A new process for `wanted`."""
        port = free_port(self.settings.host)
        settings = replace(self.settings, memory_fraction=self.memory_fraction(wanted))
        start = launch(settings, Path(wanted.target), port, wanted.flags, self.claim.visible)
        process = ServerProcess(start, Path(wanted.log), self.claim.locks)
        kept = self.kept[wanted.key] = Kept(wanted, url_of(self.settings.host, port), start.command, process)
        return kept

    def memory_fraction(self, wanted: Wanted) -> float | None:
        """`--mem-fraction-static` of a new server: SGLang means what is free at its start, so what others hold is left out."""
        if self.settings.on_cpu:
            return self.settings.memory_fraction
        whole = self.settings.memory_fraction or MEMORY_FRACTION
        held = whole * sum(kept.wanted.share for kept in self.kept.values())
        return round(whole * wanted.share / (1 - held), 3)

    def end(self, key: str) -> None:
        """End one server; its memory is free afterwards."""
        log.info("ending %s", self.kept[key].url)
        self.kept.pop(key).process.end()


def read_line(job: socket.socket) -> str:
    """One line that the job sends; empty when it has gone."""
    data = b""
    while not data.endswith(b"\n"):
        part = job.recv(65536)
        if not part:
            return ""
        data += part
    return data.decode()


def gone(job: socket.socket, seconds: float = 0.0) -> bool:
    """Whether the job's connection ends within `seconds`; it sends nothing after its first line."""
    ready, _, _ = select.select([job], [], [], seconds)
    try:
        return bool(ready) and not job.recv(1)
    except OSError:
        return True


def tell(job: socket.socket, reply: object) -> None:
    """Send one line; a job that has gone hears nothing."""
    with contextlib.suppress(OSError):
        job.sendall(json.dumps(reply).encode() + b"\n")


def listen(path: Path) -> socket.socket:
    """The socket at `path`; one that a killed keeper left is replaced."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def main(path: Path, settings: ServerSettings) -> None:
    """Serve jobs one after the other until none came for `linger` seconds. StageError when the GPUs cannot be had."""
    with claimed_gpus(settings) as claim, contextlib.closing(listen(path)) as listening:
        keeper = Keeper(settings, claim)
        listening.settimeout(settings.linger)
        try:
            while True:
                job, _ = listening.accept()
                with job:
                    keeper.serve(job)
        except TimeoutError:
            log.info("no job for %.0f s", settings.linger)
        finally:
            path.unlink(missing_ok=True)  # first, so that no job comes to servers that are about to end
            listening.close()
            for key in list(keeper.kept):
                keeper.end(key)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(process)d: %(message)s", stream=sys.stderr)
    os.umask(0o077)
    try:
        main(Path(sys.argv[1]), ServerSettings(**json.loads(sys.argv[2])))
    except StageError as error:
        sys.exit(f"ERROR {' '.join(str(error).split())}")
