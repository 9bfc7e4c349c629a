"""Progress of long work: a line in the log every few seconds and `progress.json` in the work folder."""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
NAME = "progress.json"
SECONDS_BETWEEN_LINES = 5.0
MOST_POINTS = 120


@dataclass
class History:
    """Figures over time, for a curve: one list a name. When it grows long every second point goes, so it always spans the whole run."""

    columns: dict[str, list[float | None]] = field(default_factory=dict)
    every: int = 1
    seen: int = 0

    def add(self, point: Mapping[str, float | None]) -> None:
        """Keep `point`, or leave it out if it is one of those between."""
        self.seen += 1
        if (self.seen - 1) % self.every:
            return
        for name, value in point.items():
            self.columns.setdefault(name, []).append(None if value is None else round(value, 2))
        if len(next(iter(self.columns.values()))) > MOST_POINTS:
            self.columns = {name: values[::2] for name, values in self.columns.items()}
            self.every *= 2


class Progress:
    """Counts `unit`s done out of `total`; what a resumed job finds finished is `done` and not part of the rate."""

    def __init__(self, folder: Path, total: float, unit: str, done: float = 0) -> None:
        self.path = folder / NAME
        self.total, self.unit = total, unit
        self.done = self.resumed_at = done
        self.tokens = 0
        self.start = time.monotonic()
        self.last_line = 0.0
        self.history = History()
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
        eta = (self.total - self.done) / rate if rate else None
        speed = self.tokens / self.seconds if self.tokens else None
        tokens = f", {speed:,.0f} tokens/s" if speed else ""
        text = f"{self.done:,.0f} of {self.total:,.0f} {self.unit}, {rate:,.1f} {self.unit}/s{tokens}, ETA {clock(eta)}"
        log.info("%s%s", text, f", {note}" if note else "")
        self.history.add({"seconds": self.seconds, "rate": rate, "tokens_per_second": speed})
        figures = {"done": self.done, "total": self.total, "unit": self.unit, "rate": rate, "tokens": self.tokens, "eta_seconds": eta}
        figures |= {"tokens_per_second": speed, "seconds": self.seconds, "history": self.history.columns, "note": note}
        write_progress(self.path, figures)


def write_progress(path: Path, figures: Mapping[str, Any]) -> None:
    """Write `figures`, with what this process is and when it wrote, whole or not at all. It is no result: the disk is not waited for."""
    temporary = path.with_name(f".{path.name}.part")
    who = {"output": output(sys.argv), "pid": os.getpid(), "updated_at": time.time()}
    temporary.write_text(json.dumps({**figures, **who}))
    os.replace(temporary, path)


def output(arguments: Sequence[str]) -> str | None:
    """The manifest that a stage's command line says it writes, None where it is no stage's."""
    flags = [place for place, text in enumerate(arguments[:-1]) if text == "--output"]
    return arguments[flags[0] + 1] if flags else None


def clock(seconds: float | None) -> str:
    """`seconds` as h:mm:ss, or "unknown" when it is None."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
