"""What a client sees of its servers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import healthy

HEALTH_SECONDS = 30.0


class Running(Protocol):
    """One or several servers of the target, for as long as the block runs.

    `urls` stay the same. `version` is SGLang's; empty means that a server is not SGLang and may speak the OpenAI interface alone.
    While a server is down its connections are refused: a client calls `check` and tries again.
    """

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the servers answer, without a slash at the end."""
        ...

    @property
    def version(self) -> str:
        """SGLang's version."""
        ...

    def check(self) -> None:
        """Return while the servers run or may come back. Raises StageError when one is gone for good."""
        ...


@dataclass(frozen=True)
class Started:
    """A server that aerie started; `check` is its supervisor's."""

    urls: tuple[str, ...]
    version: str
    check: Callable[[], None]


@dataclass
class Attached:
    """Servers that somebody else runs and so may restart: gone for good is one that was unhealthy for `patience` seconds."""

    urls: tuple[str, ...]
    version: str
    patience: float
    away_since: float | None = None

    def check(self) -> None:
        """Ask every server for its health. Raises StageError that names one that was away for too long."""
        away = [url for url in self.urls if not healthy(url, HEALTH_SECONDS)]
        if not away:
            self.away_since = None
            return
        self.away_since = self.away_since or time.monotonic()
        if time.monotonic() - self.away_since > self.patience:
            raise StageError(f"{away[0]}: not healthy for {self.patience:.0f} s; start that server or drop it from runtime.server.urls")
