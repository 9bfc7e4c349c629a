"""The observer of stage generate: log lines or a live line in the terminal, and `progress.json`, with the end as an interval."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.lib.ground.progress import NAME, History, clock, write_progress
from scripts.lib.watching.estimate import Estimate
from scripts.lib.watching.observed import Observed, Plan
from scripts.lib.watching.screen import Screen

log = logging.getLogger(__name__)
SECONDS_BETWEEN_FILES = 1.0
SECONDS_BETWEEN_LINES = 5.0
SPARE = 50  # an estimate takes at most one part in so many of the time
RECENT = 256  # answers of the mean that shows a trend


class Watcher:
    """Hears of every request, as `generation.observing.Observer` asks for; resumes from the `progress.json` that is in `folder`.

    `label` names the line on the screen. Use it as a context manager, so that the screen is given back.
    """

    def __init__(self, folder: Path, label: str, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.label, self.clock = folder / NAME, label, clock
        self.observed = Observed(plan, earlier(self.path), clock)
        self.history = History()
        self.screen = Screen()
        self.recent_mean = 0.0
        self.found: Estimate | None = None
        self.found_at = self.found_took = self.written_at = self.line_at = float("-inf")
        if plan.done:
            log.info("resume at %s of %s turns", f"{plan.done:,}", f"{plan.total:,}")

    def __enter__(self) -> "Watcher":
        self.screen.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.screen.stop()

    @property
    def tokens(self) -> int:
        """Tokens of the answers of this attempt."""
        return self.observed.tokens

    @property
    def seconds(self) -> float:
        """Seconds of this attempt."""
        return self.observed.seconds

    def on_start(self, key: str, group: int = 0) -> None:
        """A request goes out; `group` is its class in the plan."""
        self.observed.on_start(key, group)

    def on_done(self, key: str, tokens: int, finish_reason: str, seconds: float) -> None:
        """A turn is over."""
        self.observed.on_done(key, tokens, finish_reason, seconds)
        answers = min(self.observed.done - self.observed.plan.done, RECENT)
        self.recent_mean += (tokens - self.recent_mean) / answers
        self._show()

    def on_retry(self, key: str, reason: str) -> None:
        """A request goes again later."""
        self.observed.on_retry(key, reason)
        self._show()

    def figures(self) -> dict[str, Any]:
        """What is shown and written, `state` for a resumed run left out; seconds from now on, None where unknown."""
        observed, found = self.observed, self.found
        block = observed.rates.recent(64)
        finished = observed.done - observed.plan.done
        naive = observed.naive()
        return {
            "done": observed.done,
            "total": observed.plan.total,
            "unit": "turns",
            "seconds": observed.seconds,
            "rate": block.answers / block.seconds if block.seconds else finished / observed.seconds,
            "tokens": observed.tokens,
            "tokens_per_second": block.speed,
            "running": len(observed.flying),
            "mean_tokens": observed.mean_tokens(),
            "mean_tokens_recent": self.recent_mean if finished else None,
            "mean_tokens_to_come": found.mean_to_come if found else None,
            "tokens_left": found.tokens_left if found else None,
            "eta_seconds": found.middle if found else None,
            "eta_low_seconds": found.low if found else None,
            "eta_high_seconds": found.high if found else None,
            "eta_naive_seconds": naive if naive != float("inf") else None,
            "finish_reasons": dict(sorted(observed.reasons.items())),
            "retries": dict(sorted(observed.retries.items())),
        }

    def _show(self) -> None:
        """Write the file once a second and a line every few seconds, and both at the end."""
        now = self.clock()
        ended = self.observed.done >= self.observed.plan.total
        if now - self.written_at < SECONDS_BETWEEN_FILES and not ended:
            return
        self.written_at = now
        if now - self.found_at >= SPARE * self.found_took or ended:
            start = time.perf_counter()
            self.found, self.found_at = self.observed.estimate(), now
            self.found_took = time.perf_counter() - start
        figures = self.figures()
        self.history.add({name: figures[name] for name in ("seconds", "rate", "tokens_per_second", "mean_tokens_recent")})
        write_progress(self.path, figures | {"history": self.history.columns, "state": self.observed.state()})
        if self.screen.live:
            self.screen.show([(self.label, figures)])
        elif now - self.line_at >= SECONDS_BETWEEN_LINES or ended:
            self.line_at = now
            log.info("%s", line(figures))


def earlier(path: Path) -> Mapping[str, Any] | None:
    """The state that an earlier attempt left at `path`."""
    if not path.exists():
        return None
    state: Mapping[str, Any] | None = json.loads(path.read_text()).get("state")
    return state


def line(figures: Mapping[str, Any]) -> str:
    """The figures as a line of a log."""
    text = (
        f"{figures['done']:,} of {figures['total']:,} turns, {figures['rate']:,.1f} turns/s, {figures['tokens_per_second']:,.0f} tokens/s"
    )
    text += f", {figures['running']} running"
    if figures["mean_tokens"] is not None:
        text += f", mean {figures['mean_tokens']:,.0f} tokens, lately {figures['mean_tokens_recent']:,.0f}"
    eta = (figures["eta_low_seconds"], figures["eta_high_seconds"])
    if eta == (None, None):
        return f"{text}, ETA unknown"
    return f"{text}, ETA {clock(eta[0])} to {clock(eta[1])} (at the rate so far {clock(figures['eta_naive_seconds'])})"
