"""`with pooled(...) as lease`: servers for one job alone, that outlive it for a while, for the next job that wants the same."""

import contextlib
import fcntl
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_file, sha256_text
from scripts.lib.ground.provenance import ROOT
from scripts.lib.serving import keeper
from scripts.lib.serving.claim import WAIT_SECONDS, lock_folder
from scripts.lib.serving.keeper import Found, Wanted, tell
from scripts.lib.serving.settings import ServerSettings

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
KEEPER_SECONDS = WAIT_SECONDS + 60.0  # it waits for GPUs that others still hold
TRIES = 5  # a keeper may be ending just when a job comes to it


@dataclass
class Lease:
    """The servers of one job, in the order in which it wanted them; one of them where it wanted one."""

    servers: tuple[Found, ...]
    connection: socket.socket

    def check(self, seconds: float = 0.0) -> None:
        """Raises StageError with the last words of a server that died, if the keeper sees that within `seconds`."""
        ready, _, _ = select.select([self.connection], [], [], seconds)
        if ready:
            reply = received(self.connection)
            raise StageError(reply["error"] if reply else "the keeper of the servers was killed; start again, finished work is kept")


@contextlib.contextmanager
def pooled(settings: ServerSettings, wanted: Sequence[Wanted], one: bool = False) -> Iterator[Lease]:
    """Servers as `wanted`, started in this order or found running, for this process alone until the block ends.

    With `one`, only one of them: that which runs already, else the first.
    Other jobs of this machine that ask for servers with the same `settings` wait meanwhile. Raises StageError when one does not start.
    """
    own = replace(settings, python=str(settings.interpreter()), urls=(), modules=())
    path = socket_path(own)
    for _ in range(TRIES):
        with contextlib.closing(connected(path, own)) as connection:
            tell(connection, {"wanted": [asdict(server) for server in wanted], "one": one})
            reply = received(connection)
            if reply is None:
                continue
            if "error" in reply:
                raise StageError(reply["error"])
            yield Lease(tuple(Found(**server) for server in reply["servers"]), connection)
            return
    raise StageError(f"{path}: the keeper of the servers ended {TRIES} times before it answered; its log is {log_path(path)}")


def socket_path(settings: ServerSettings) -> Path:
    """Where the keeper for `settings` listens: one for each set of GPUs, copy of the project, and version of its code."""
    parts = [asdict(settings), os.environ.get("CUDA_VISIBLE_DEVICES"), str(ROOT), sha256_file(Path(keeper.__file__))]
    return lock_folder() / f"keeper-{sha256_text(canonical(parts))[:16]}.sock"


def log_path(path: Path) -> Path:
    """The log of the keeper that listens at `path`."""
    return path.with_suffix(".log")


def connected(path: Path, settings: ServerSettings) -> socket.socket:
    """A connection to the keeper at `path`, which is started if there is none. Raises StageError when that fails."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_suffix(".start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two jobs that find no keeper, one starts it
        return connection_to(path) or started(path, settings)


def started(path: Path, settings: ServerSettings) -> socket.socket:
    """A connection to a new keeper, which outlives this process."""
    with log_path(path).open("w") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__, str(path), json.dumps(asdict(settings))],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )
    deadline = time.monotonic() + KEEPER_SECONDS
    while (connection := connection_to(path)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            words = (log_path(path).read_text().strip().splitlines() or ["nothing was written"])[-1]
            raise StageError(words.removeprefix("ERROR "))
        time.sleep(POLL_SECONDS)
    return connection


def connection_to(path: Path) -> socket.socket | None:
    """A connection to whoever listens at `path`; None when nobody does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def received(connection: socket.socket) -> Mapping[str, Any] | None:
    """The keeper's next line, None when it ended without one."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            byte = connection.recv(1)  # no more than the line: the next one is for the next call
        except OSError:
            return None
        if not byte:
            return None
        line += byte
    reply: Mapping[str, Any] = json.loads(line)
    return reply
