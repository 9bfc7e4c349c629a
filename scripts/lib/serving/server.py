"""`with server(...) as running`: servers of the target that are there as long as the block runs."""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import healthy
from scripts.lib.serving.claim import claimed_gpus
from scripts.lib.serving.health import check_target, served, warn_if_untried
from scripts.lib.serving.launch import free_port, launch, url_of
from scripts.lib.serving.process import ServerProcess
from scripts.lib.serving.running import HEALTH_SECONDS, Attached, Running, Started
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.serving.supervisor import Supervisor
from scripts.lib.sharing.leaving import make_room

log = logging.getLogger(__name__)
ATTACH_POLL_SECONDS = 2.0


@contextlib.contextmanager
def server(settings: ServerSettings, target: Path, log_file: Path, extra: Sequence[str] = ()) -> Iterator[Running]:
    """Start a server of the target in HF layout in `target`, or attach to those of `settings.urls`.

    A started server writes `log_file`, takes `extra` as its last flags, and comes back behind the same URL after a crash. At the end of
    the block, and of this process by whatever signal, it is gone with all of its processes; what was attached to stays.
    Raises StageError when a server does not become healthy or serves something else, with the last error of the log.
    """
    if settings.urls:
        yield attached(settings, target)
        return
    make_room(settings.device)
    with claimed_gpus(settings) as claim:
        port = settings.port or free_port(settings.host)
        url = url_of(settings.host, port)
        start = functools.partial(ServerProcess, launch(settings, target, port, extra, claim.visible), log_file, claim.locks)
        supervisor = Supervisor(url, start, settings.start_timeout, settings.restarts)
        try:
            supervisor.open()
            yield Started((url,), checked_version(url, target), supervisor.check)
        finally:
            supervisor.close()


def attached(settings: ServerSettings, target: Path) -> Attached:
    """The servers of `settings.urls`, once all are healthy. Raises StageError for one that is not, or does not serve `target`."""
    urls = tuple(url.rstrip("/") for url in settings.urls)
    for url in urls:
        wait_healthy(url, settings.start_timeout)
    versions = {checked_version(url, target) for url in urls}
    if len(versions) > 1:
        log.warning("the servers of runtime.server.urls differ in version: %s", ", ".join(sorted(versions)))
    return Attached(urls, "" if "" in versions else ", ".join(sorted(versions)), settings.start_timeout)


def wait_healthy(url: str, seconds: float) -> None:
    """Return when the server at `url` is healthy. Raises StageError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not healthy(url, HEALTH_SECONDS):
        if time.monotonic() > deadline:
            raise StageError(f"{url}: not healthy within {seconds:.0f} s; start that server or correct runtime.server.urls")
        log.info("%s is not healthy yet, waiting up to %.0f s", url, seconds)
        time.sleep(ATTACH_POLL_SECONDS)


def checked_version(url: str, target: Path) -> str:
    """SGLang's version at `url`, once it is clear that it serves `target`."""
    found = served(url)
    warn_if_untried(url, found.version)
    check_target(url, found, target)
    return found.version
