"""Who is told what becomes of each request."""

from typing import Protocol


class Observer(Protocol):
    """Hears of every request; `key` is `id/turn`."""

    def on_start(self, key: str, group: int = 0) -> None:
        """A request goes out; `group` is the class of its expected length."""

    def on_done(self, key: str, tokens: int, finish_reason: str, seconds: float) -> None:
        """The turn is over after `seconds` in flight. `finish_reason` is stop, length, or the reason why it failed."""

    def on_retry(self, key: str, reason: str) -> None:
        """The request failed for `reason` and goes out again later."""
