"""The process that keeps servers between the jobs that use them, so that jobs of one configuration share its start.

Run as a program by `pool`: `python -m scripts.lib.serving.keeper SOCKET SETTINGS LOCK`, where LOCK is the descriptor of a lock that keeps
others from starting a second one until it listens. It holds the GPUs, starts what a job asks for, ends what the next job does not want, and
serves one job at a time: a second one waits at the socket, as two would spoil each other's figures. A job is there as long as its
connection is, however it ends. After `linger` seconds without a job the keeper ends its servers and itself, and before that when a job
wants the GPUs for itself (`leaving`); when it is killed, the guardian of each server ends that.

A job sends one line, `{"wanted": [...], "one": false}`, and gets one back, `{"servers": [...]}` or `{"error": "..."}`. With `one` it gets
the one of them that runs already, else the first. Lines that follow: a `warning` when a server died and is started again, an `error` when
it is gone for good. `{"leave": GPUS}` is answered with `{"leaving": true}` by a keeper that holds one of these GPUs, and it ends.
"""

import contextlib
import functools
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_file, sha256_text
from scripts.lib.serving.asking import healthy
from scripts.lib.serving.claim import Claim, claimed_gpus
from scripts.lib.serving.launch import free_port, launch, url_of
from scripts.lib.serving.process import ServerProcess
from scripts.lib.serving.running import HEALTH_SECONDS
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.serving.supervisor import Supervisor
from scripts.lib.sharing.talking import gone, received, tell

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2
SHORTEST_LINGER = 1.0  # the job that starts a keeper has to reach it
# Of the memory of a GPU, over all servers on it at a time; the rest is for activations, CUDA graphs and what the job itself computes.
MEMORY_FRACTION = 0.8
NO_MEMORY = re.compile(r"(?:out of|not enough) memory", re.IGNORECASE)
FINISHED = "finished work is kept: start again when the cause is gone"
CROWDED = "two copies of the target may not fit: set runtime.server.side_by_side to false"


@dataclass(frozen=True)
class Wanted:
    """A server that a job wants. `key` names all that decides what it serves.

    `share` is its part of the memory for servers; None leaves that to SGLang, for a server that is alone. It listens on `port`, 0 for a
    free one, and is started again after a crash up to `restarts` times in a row. `remedy` is what may help when it does not start.
    """

    key: str
    target: str
    flags: Sequence[str]
    log: str
    share: float | None
    port: int = 0
    restarts: int = 0
    remedy: str = "change runtime.server"

    @classmethod
    def of(cls, manifest: Path, flags: Sequence[str], work: Path, share: float | None, drafter: str = "") -> "Wanted":
        """A server of the target behind `manifest`, and of the drafter with these digests; its log lies in `work`."""
        manifest = manifest.resolve()
        key = sha256_text(canonical([str(manifest), sha256_file(manifest), list(flags), drafter]))[:16]
        return cls(key, str(manifest.parent), flags, str((work / "servers" / f"{key}.log").resolve()), share)


@dataclass(frozen=True)
class Found:
    """A server that runs, by its `key`. `start_seconds` is what its start took, in this job or one before."""

    key: str
    url: str
    command: Sequence[str]
    start_seconds: float


class Kept:
    """A server that was wanted, and the job that hears of its crashes."""

    def __init__(self, wanted: Wanted, url: str, command: Sequence[str], start: Callable[[], ServerProcess], start_timeout: float) -> None:
        self.wanted, self.url, self.command = wanted, url, command
        self.job: socket.socket | None = None
        self.supervisor = Supervisor(url, start, start_timeout, wanted.restarts, self.warn)
        self.supervisor.begin()

    def warn(self, words: str) -> None:
        """Tell the job that the server died and is started again."""
        log.warning("%s", words)
        if self.job is not None:
            tell(self.job, {"warning": words})

    def up(self) -> bool:
        """Whether the server is there. Raises StageError, with what may help at a start, when it is gone for good."""
        try:
            return self.supervisor.up()
        except StageError as error:
            if self.supervisor.start_seconds is not None:
                raise StageError(f"{error}; {FINISHED}") from error
            crowded = NO_MEMORY.search(str(error)) and (self.wanted.share or 1) < 1
            raise StageError(f"{error}; {CROWDED if crowded else self.wanted.remedy}") from error

    def usable(self) -> bool:
        """Whether the server answers, or is being started."""
        with contextlib.suppress(StageError):
            return not self.supervisor.up() or healthy(self.url, HEALTH_SECONDS)
        return False

    def found(self) -> Found:
        """What the job is told."""
        assert self.supervisor.start_seconds is not None
        return Found(self.wanted.key, self.url, self.command, round(self.supervisor.start_seconds, 1))


class Keeper:
    """The servers that are up."""

    def __init__(self, settings: ServerSettings, claim: Claim) -> None:
        self.settings, self.claim = settings, claim
        self.kept: dict[str, Kept] = {}

    def serve(self, job: socket.socket) -> bool:
        """Do what one job asks, until it goes; whether to wait for the next one."""
        asked = received(job)
        if asked is None or gone(job):  # it waited here for its turn and was killed: nothing is ended or started for it
            return True
        if "leave" in asked:
            leaving = self.holds(asked["leave"])
            tell(job, {"leaving": leaving})
            return not leaving
        self.end_unusable()
        self.lend(job, self.chosen([Wanted(**entry) for entry in asked["wanted"]], asked["one"]))
        return True

    def holds(self, gpus: str | None) -> bool:
        """Whether the servers are on GPUs of which some are in the CUDA_VISIBLE_DEVICES `gpus`, which is all where it is not set."""
        own, asked = names(os.environ.get("CUDA_VISIBLE_DEVICES")), names(gpus)
        alike = all(map(str.isdigit, own)) == all(map(str.isdigit, asked))  # a number and a uuid may be the same GPU
        return not own or not asked or not alike or bool(own & asked)

    def lend(self, job: socket.socket, wanted: Sequence[Wanted]) -> None:
        """Give one job what it wants and stay with it until it goes or one of its servers is gone for good."""
        for key in set(self.kept) - {server.key for server in wanted}:
            self.end(key)
        try:
            for server in wanted:
                kept = self.kept.get(server.key) or self.start(server)
                kept.job = job
                while not kept.up():
                    if gone(job, POLL_SECONDS):
                        return
            tell(job, {"servers": [asdict(self.kept[server.key].found()) for server in wanted]})
            while not gone(job, POLL_SECONDS):
                for server in wanted:
                    self.kept[server.key].up()
        except StageError as error:
            tell(job, {"error": str(error)})

    def chosen(self, wanted: Sequence[Wanted], one: bool) -> Sequence[Wanted]:
        """The servers to have up: all that are `wanted`, or `one` of them."""
        if not one:
            return wanted
        return ([server for server in wanted if server.key in self.kept] or wanted)[:1]

    def start(self, wanted: Wanted) -> Kept:
        """A new server for `wanted`, being started."""
        port = wanted.port or free_port(self.settings.host)
        settings = replace(self.settings, memory_fraction=self.memory_fraction(wanted))
        how = launch(settings, Path(wanted.target), port, wanted.flags, self.claim.visible)
        start = functools.partial(ServerProcess, how, Path(wanted.log), self.claim.locks)
        url = url_of(self.settings.host, port)
        kept = self.kept[wanted.key] = Kept(wanted, url, how.command, start, self.settings.start_timeout)
        return kept

    def memory_fraction(self, wanted: Wanted) -> float | None:
        """`--mem-fraction-static` of a new server: SGLang means what is free at its start, so what others hold is left out."""
        if self.settings.on_cpu or wanted.share is None:
            return self.settings.memory_fraction
        whole = self.settings.memory_fraction or MEMORY_FRACTION
        held = whole * sum(kept.wanted.share or 1 for kept in self.kept.values())
        return round(whole * wanted.share / (1 - held), 3)

    def end_unusable(self) -> None:
        """End servers that are gone for good, or do not answer: one that just crashed takes seconds until its process ends."""
        for key in [key for key, kept in self.kept.items() if not kept.usable()]:
            self.end(key)

    def end(self, key: str) -> None:
        """End one server; its memory is free afterwards."""
        log.info("ending %s", self.kept[key].url)
        self.kept.pop(key).supervisor.close()


def names(gpus: str | None) -> set[str]:
    """The GPUs of a CUDA_VISIBLE_DEVICES."""
    return {name.strip() for name in (gpus or "").split(",")} - {""}


def listen(path: Path) -> socket.socket:
    """The socket at `path`; one that a killed keeper left is replaced."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def main(path: Path, settings: ServerSettings, lock: int) -> None:
    """Serve jobs one after the other until none came for `linger` seconds, or one wants the GPUs. StageError when they cannot be had."""
    with contextlib.ExitStack() as waiting, claimed_gpus(settings) as claim, contextlib.closing(listen(path)) as listening:
        os.close(lock)  # from now on a job finds this keeper and starts no other
        keeper = Keeper(settings, claim)
        listening.settimeout(max(settings.linger, SHORTEST_LINGER))
        try:
            while True:
                job, _ = listening.accept()
                if not keeper.serve(job):
                    waiting.enter_context(job)  # who wants the GPUs learns by the end of the connection that they are free
                    break
                job.close()
        except TimeoutError:
            log.info("no job for %.0f s", settings.linger)
        finally:
            for key in list(keeper.kept):
                keeper.end(key)
            path.unlink(missing_ok=True)  # last: until then who comes waits, and learns by the end of the connection that the GPUs are free


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(process)d: %(message)s", stream=sys.stderr)
    os.umask(0o077)
    try:
        main(Path(sys.argv[1]), ServerSettings(**json.loads(sys.argv[2])), int(sys.argv[3]))
    except StageError as error:
        sys.exit(f"ERROR {' '.join(str(error).split())}")
