"""How requests are sent: the untracked `runtime.requests`, which decides no byte of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOST_TIMES = 10  # a request that was in flight in so many crashes is likely their cause
UNCOUNTED = ("overload", "server_gone")  # the server's state, not the request's: goes on until `patience` ends
ONE_OVERLOAD = 1.0  # seconds
SLEEP_SECONDS = (0.5, 60.0)  # before the first repetition, and at most
GATHERED = 16  # with one part in 16 free, one in 32 idles: about what interruptions still cost


@dataclass(frozen=True)
class Policy:
    """`concurrency` is the number of requests in flight by partition, over all servers.

    `timeout` and `patience` are seconds: of one request, and without any answer from any server. A request is sent
    at most 1 + `retries` times. `window` is the number of rows among which the longest go first. A free place waits up to `gather`
    seconds for others, until a `GATHERED` part of all is free. `stop_at` is the largest share of turns that may end in each way before
    the stage stops.
    """

    concurrency: Mapping[str, int]
    timeout: float
    patience: float
    retries: int
    window: int
    gather: float
    stop_at: Mapping[str, float]

    @classmethod
    def of(cls, runtime: Mapping[str, Any]) -> "Policy":
        """From the config's `runtime`."""
        return cls(**runtime["requests"])

    def gives_up(self, reason: str, times: int) -> bool:
        """Whether a request that failed `times` times for `reason` is not sent again."""
        if reason in UNCOUNTED:
            return False
        if reason == "refused":
            return True
        return times > (LOST_TIMES if reason == "server_lost" else self.retries)

    def pause(self, times: int) -> float:
        """Seconds before the next try after `times` failures."""
        return min(SLEEP_SECONDS[0] * 2.0 ** (times - 1), SLEEP_SECONDS[1])


class Slots:
    """How many requests of one partition may be in flight: `most`, and fewer after an overload, as TCP does it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.allowed = float(most)
        self.shrunk_at = float("-inf")

    def admits(self, number: int) -> bool:
        """Whether slot `number` (from 0) may be used now."""
        return number < self.allowed

    @property
    def together(self) -> int:
        """How many are to be filled at a time."""
        return int(self.allowed) // GATHERED

    def shrink(self, now: float) -> None:
        """A quarter fewer, at least one; the requests that meet the same overload as the first, within a second, count once."""
        if now - self.shrunk_at >= ONE_OVERLOAD:
            self.allowed = max(1.0, int(self.allowed) * 0.75)
            self.shrunk_at = now

    def grow(self) -> bool:
        """One more per round of answers, up to `most`; whether another slot just opened."""
        if self.allowed >= self.most:
            return False
        before = int(self.allowed)
        self.allowed = min(self.most, self.allowed + 1 / self.allowed)
        return int(self.allowed) > before
