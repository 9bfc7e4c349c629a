"""Progress of long work: a line in the log every few seconds and `progress.json` in the work folder."""

import logging
import time
from pathlib import Path

from scripts.lib.ground.files import write_json

log = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts `unit`s done out of `total`; what a resumed job finds finished is `done` and not part of the rate."""

    def __init__(self, folder: Path, total: float, unit: str, done: float = 0) -> None:
        self.path = folder / "progress.json"
        self.total, self.unit = total, unit
        self.done = self.resumed_at = done
        self.tokens = 0
        self.start = time.monotonic()
        self.last_line = 0.0
        if done:
            log.info("resume at %s of %s %s", f"{done:,.0f}", f"{total:,.0f}", unit)

    def add(self, units: float, tokens: int = 0, note: str = "") -> None:
        """Count finished `units` and the `tokens` they hold; print when the last line is old or all is done."""
        self.done += units
        self.tokens += tokens
        now = time.monotonic()
        if now - self.last_line >= SECONDS_BETWEEN_LINES or self.done >= self.total:
            self.last_line = now
            self._print(note)

    @property
    def seconds(self) -> float:
        """Seconds since the start of this attempt."""
        return max(time.monotonic() - self.start, 1e-9)

    def _print(self, note: str) -> None:
        rate = (self.done - self.resumed_at) / self.seconds
        eta = (self.total - self.done) / rate if rate else float("inf")
        tokens = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        text = f"{self.done:,.0f} of {self.total:,.0f} {self.unit}, {rate:,.1f} {self.unit}/s{tokens}, ETA {clock(eta)}"
        log.info("%s%s", text, f", {note}" if note else "")
        write_json(
            self.path,
            {"done": self.done, "total": self.total, "unit": self.unit, "rate": rate, "tokens": self.tokens, "eta_seconds": eta},
        )


def clock(seconds: float) -> str:
    """`seconds` as h:mm:ss, or "unknown" when it is infinite."""
    if seconds == float("inf"):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
