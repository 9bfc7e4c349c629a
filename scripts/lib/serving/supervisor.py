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

    `start` gives a new process. A thread starts it and is the only one to replace it; `failure` is set once, when it gives up.
    A server that was never healthy is not started again. `warn` hears of every restart.
    """

    def __init__(
        self,
        url: str,
        start: Callable[[], ServerProcess],
        start_timeout: float,
        restarts: int,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.url, self._start, self._warn = url, start, warn
        self._start_timeout, self._restarts = start_timeout, restarts
        self.start_seconds: float | None = None
        self._settled, self._ending = threading.Event(), threading.Event()  # settled: the server is up, or is gone for good
        self._failure: StageError | None = None
        self._process: ServerProcess | None = None
        self._thread = threading.Thread(target=self._watch, name=f"supervisor of {url}", daemon=True)

    def begin(self) -> None:
        """Start the server."""
        self._thread.start()

    def up(self, seconds: float | None = 0.0) -> bool:
        """Whether the server is there, waited for up to `seconds`, None for as long as it takes.

        Raises StageError with the log's last error when it cannot be.
        """
        settled = self._settled.wait(seconds)
        self.check()
        return settled

    def open(self) -> None:
        """Start the server and wait for its health. Raises StageError with the log's last error when it dies or takes too long."""
        self.begin()
        self.up(None)

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
        if healthy(self.url, HEALTH_SECONDS):
            return f"{self.url}: another server answers there; wait for its end (runtime.server.linger) or set runtime.server.port to 0"
        begin = time.monotonic()
        process = self._process = self._start()
        while not self._ending.is_set():
            if (code := process.exit_code()) is not None:
                return f"{process.log}: the server died with code {code} before it was healthy; its log ends with: {process.last_error()}"
            if healthy(self.url, HEALTH_SECONDS):
                seconds = time.monotonic() - begin
                log.info("%s is healthy after %.0f s", self.url, seconds)
                self.start_seconds = self.start_seconds or seconds
                return None
            if time.monotonic() - begin > self._start_timeout:
                process.end()
                limit = f"runtime.server.start_timeout {self._start_timeout:.0f} s"
                return f"{process.log}: the server was not healthy within {limit}; its log ends with: {process.last_error()}"
            self._ending.wait(HEALTH_POLL_SECONDS)
        return None

    def _watch(self) -> None:
        """Start the server and keep it up; what stops that, the client learns by `check`."""
        try:
            if problem := self._launch():
                raise StageError(problem)
            self._settled.set()
            self._keep_up()
        except StageError as error:
            self._failure = error
        except OSError as error:
            self._failure = StageError(f"{self.url}: its server cannot be started: {error}")
        self._settled.set()

    def _keep_up(self) -> None:
        """Replace every process that dies, until the end. Raises StageError after too many crashes in a row."""
        crashes, problem = 0, self._death()
        while problem:
            self._settled.clear()
            crashes += 1
            if crashes > self._restarts:
                limit = f" (crash {crashes} in a row, runtime.server.restarts allows {self._restarts})" if self._restarts else ""
                raise StageError(f"{problem}{limit}")
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (crashes - 1), LONGEST_PAUSE_SECONDS)
            self._warn(f"{problem}; restart {crashes} of {self._restarts} in {pause:.0f} s")
            if self._ending.wait(pause):
                return
            problem = self._launch()
            if problem is None:
                self._settled.set()
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
