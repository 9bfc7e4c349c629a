"""Keeps one started server running: starts it, waits for its health, starts it again after a crash."""

import logging
import threading
import time
from collections.abc import Callable

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import healthy
from scripts.lib.serving.process import ServerProcess

log = logging.getLogger(__name__)
STEADY_SECONDS = 300.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
HEALTH_POLL_SECONDS, HEALTH_SECONDS = 0.5, 5.0
EXIT_POLL_SECONDS = 0.5


class Supervisor:
    """One server behind one URL.

    `start` gives a new process. The thread that watches it is the only one to replace it; `failure` is set once, when it gives up.
    """

    def __init__(self, url: str, start: Callable[[], ServerProcess], start_timeout: float, restarts: int) -> None:
        self.url, self._start = url, start
        self._start_timeout, self._restarts = start_timeout, restarts
        self._ending = threading.Event()
        self._failure: StageError | None = None
        self._process: ServerProcess | None = None
        self._thread = threading.Thread(target=self._watch, name=f"supervisor of {url}", daemon=True)

    def open(self) -> None:
        """Start the server and wait for its health. Raises StageError with the log's last error when it dies or takes too long."""
        problem = self._launch()
        if problem:
            raise StageError(problem)
        self._thread.start()

    def close(self) -> None:
        """End the server, also in the middle of a start."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._process:
            self._process.end()

    def check(self) -> None:
        """Raise the StageError with which the watch ended, if it has."""
        if self._failure:
            raise self._failure

    def _launch(self) -> str | None:
        """Start a process and wait until it is healthy; what went wrong, None when all is well or the end has come."""
        begin = time.monotonic()
        process = self._process = self._start()
        while not self._ending.is_set():
            if (code := process.exit_code()) is not None:
                return f"{process.log}: the server died with code {code} before it was healthy; its log ends with: {process.last_error()}"
            if healthy(self.url, HEALTH_SECONDS):
                log.info("%s is healthy after %.0f s", self.url, time.monotonic() - begin)
                return None
            if time.monotonic() - begin > self._start_timeout:
                process.end()
                limit = f"runtime.server.start_timeout {self._start_timeout:.0f} s"
                return f"{process.log}: the server was not healthy within {limit}; its log ends with: {process.last_error()}"
            self._ending.wait(HEALTH_POLL_SECONDS)
        return None

    def _watch(self) -> None:
        """Keep the server up; what stops that, the client learns by `check`."""
        try:
            self._keep_up()
        except (StageError, OSError) as error:
            self._failure = StageError(f"{self.url}: its server cannot be restarted: {error}")

    def _keep_up(self) -> None:
        """Replace every process that dies, until the end. Raises StageError after too many crashes in a row."""
        crashes, problem = 0, self._death()
        while problem:
            crashes += 1
            if crashes > self._restarts:
                raise StageError(f"{problem} (crash {crashes} in a row, runtime.server.restarts allows {self._restarts})")
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (crashes - 1), LONGEST_PAUSE_SECONDS)
            log.warning("%s; restart %s of %s in %.0f s", problem, crashes, self._restarts, pause)
            if self._ending.wait(pause):
                return
            problem = self._launch()
            if problem is None:
                begin = time.monotonic()
                problem = self._death()
                crashes = 0 if time.monotonic() - begin > STEADY_SECONDS else crashes

    def _death(self) -> str | None:
        """Wait for the death of the healthy process and tell it; None when the end has come."""
        assert self._process is not None
        while not self._ending.is_set():
            if (code := self._process.exit_code(EXIT_POLL_SECONDS)) is not None:
                return f"{self._process.log}: the server died with code {code}; its log ends with: {self._process.last_error()}"
        return None
