"""`with shared(...) as running`: a server for one job alone that outlives it for a while, for the next job that wants the same.

`with pooled(...) as lease` is the same for a choice of several servers.
"""

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_file, sha256_text
from scripts.lib.ground.provenance import ROOT
from scripts.lib.serving import keeper
from scripts.lib.serving.claim import WAIT_SECONDS
from scripts.lib.serving.keeper import FINISHED, Found, Wanted
from scripts.lib.serving.running import Running, Started
from scripts.lib.serving.server import attached, checked_version
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.sharing.leaving import make_room
from scripts.lib.sharing.meeting import lock_folder
from scripts.lib.sharing.talking import connection_to, received, tell

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
LONGEST_PATH = 107  # bytes of a Unix socket's address (sun_path in unix(7), without the zero at its end)
KEEPER_SECONDS = WAIT_SECONDS + 60.0  # it waits for GPUs that others still hold
TRIES = 5  # a keeper may be ending just when a job comes to it


@dataclass
class Lease:
    """The servers of one job, in the order in which it wanted them; one of them where it wanted one."""

    servers: tuple[Found, ...]
    connection: socket.socket
    log: Path
    failure: StageError | None = None

    def check(self, seconds: float = 0.0) -> None:
        """Log restarts. Raises StageError with the last words of a server that is gone for good, if that is seen within `seconds`."""
        while self.failure is None and select.select([self.connection], [], [], seconds)[0]:
            said = received(self.connection) or {"error": f"{self.log}: the keeper of the servers was killed; {FINISHED}"}
            if "error" in said:
                self.failure = StageError(said["error"])
            else:
                log.warning("%s", said["warning"])
        if self.failure is not None:
            raise self.failure


@contextlib.contextmanager
def shared(settings: ServerSettings, manifest: Path, flags: Sequence[str], work: Path) -> Iterator[Running]:
    """The servers of `settings.urls`, or one of the target behind `manifest` that jobs which want the same share one after the other.

    Its log lies in `work`, and it comes back behind the same URL after a crash. It outlives this process by `settings.linger` seconds.
    Raises StageError when a server does not become healthy or serves something else, with the last error of the log.
    """
    if settings.urls:
        yield attached(settings, manifest.parent)
        return
    wanted = replace(Wanted.of(manifest, flags, work, share=None), port=settings.port, restarts=settings.restarts)
    with pooled(settings, [wanted]) as lease:
        url = lease.servers[0].url
        yield Started((url,), checked_version(url, manifest.parent), lease.check)


@contextlib.contextmanager
def pooled(settings: ServerSettings, wanted: Sequence[Wanted], one: bool = False) -> Iterator[Lease]:
    """Servers as `wanted`, started in this order or found running, for this process alone until the block ends.

    With `one`, only one of them: that which runs already, else the first.
    Other jobs of this machine that ask for servers with the same `settings` wait meanwhile. Raises StageError when one does not start.
    """
    own = replace(settings, python=str(settings.interpreter()), urls=(), modules=())
    path = socket_path(own)
    log.info("waiting for a server: its log is %s, that of its keeper %s", " or ".join(server.log for server in wanted), log_path(path))
    for _ in range(TRIES):
        with contextlib.closing(connected(path, own)) as connection:
            tell(connection, {"wanted": [asdict(server) for server in wanted], "one": one})
            while "warning" in (reply := received(connection) or {}):
                log.warning("%s", reply["warning"])  # of a server that comes back just now
            if not reply:
                continue
            if "error" in reply:
                raise StageError(reply["error"])
            found = tuple(Found(**server) for server in reply["servers"])
            log.info("%s", "; ".join(f"{server.url} took {server.start_seconds:.0f} s to start" for server in found))
            yield Lease(found, connection, log_path(path))
            return
    raise StageError(f"{path}: the keeper of the servers ended {TRIES} times before it answered; its log is {log_path(path)}")


def socket_path(settings: ServerSettings) -> Path:
    """Where the keeper for `settings` listens: one for each set of GPUs, copy of the project, and version of the keeper."""
    parts = [asdict(settings), os.environ.get("CUDA_VISIBLE_DEVICES"), str(ROOT), sha256_file(Path(keeper.__file__))]
    return lock_folder() / f"keeper-{'cpu' if settings.on_cpu else 'gpu'}-{sha256_text(canonical(parts))[:16]}.sock"


def log_path(path: Path) -> Path:
    """The log of the keeper that listens at `path`."""
    return path.with_suffix(".log")


def connected(path: Path, settings: ServerSettings) -> socket.socket:
    """A connection to the keeper at `path`, which is started if there is none. Raises StageError when that fails."""
    if (size := len(os.fsencode(path))) > LONGEST_PATH:
        raise StageError(f"{path}: {size} bytes, the path of a socket has at most {LONGEST_PATH}; set TMPDIR to a shorter path")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.with_suffix(".start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two jobs that find no keeper, one starts it
        return connection_to(path) or started(path, settings, lock.fileno())


def started(path: Path, settings: ServerSettings, lock: int) -> socket.socket:
    """A connection to a new keeper, which outlives this process and holds the descriptor `lock` until it listens."""
    make_room(settings.device)
    with log_path(path).open("w") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__, str(path), json.dumps(asdict(settings)), str(lock)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            pass_fds=(lock,),
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
