"""A live table in the terminal, one line a job. Where stderr is no terminal nothing is shown: the log has its lines."""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from scripts.lib.ground.progress import clock

Line = tuple[str, Mapping[str, Any]]  # label and figures of one job, as in its progress.json
NOTHING = "–"


class Screen:
    """Shows a table at the foot of the terminal; log lines scroll by above it."""

    def __init__(self) -> None:
        self.view: Live | None = None

    @property
    def live(self) -> bool:
        """Whether there is a terminal to show anything."""
        return self.view is not None

    def start(self) -> None:
        """Take the terminal's last lines, if stderr is one."""
        if sys.stderr.isatty():
            self.view = Live(console=Console(stderr=True), redirect_stdout=False, refresh_per_second=2)
            self.view.start()
            redirected(sys.__stderr__, sys.stderr)

    def show(self, lines: Iterable[Line]) -> None:
        """Show these lines instead of the last ones."""
        if self.view:
            self.view.update(table(list(lines)))

    def stop(self) -> None:
        """Leave the last table standing and give the terminal back."""
        if self.view:
            redirected(sys.stderr, sys.__stderr__)
            self.view.stop()
            self.view = None


def redirected(old: Any, new: Any) -> None:
    """Let log handlers that write to the stream `old` write to `new`: above the table instead of through it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def table(lines: Sequence[Line]) -> Table:
    """One line a job."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("job", "done", "", "tok/s", "per s", "running", "mean", "lately", "ends in", "state"):
        shown.add_column(name, justify="left" if name in ("job", "ends in", "state") else "right", no_wrap=True)
    for label, figures in lines:
        shown.add_row(label, *cells(figures))
    return shown


def cells(figures: Mapping[str, Any]) -> list[str]:
    """The figures of one job as text, in the order of the columns."""
    share = figures["done"] / figures["total"] if figures["total"] else 1.0
    mean, recent = figures.get("mean_tokens"), figures.get("mean_tokens_recent")
    change = f"{recent:,.0f} {recent / mean - 1:+.0%}" if mean and recent else NOTHING
    return [
        f"{figures['done']:,.0f} / {figures['total']:,.0f} {figures['unit']}",
        f"{share:.1%}",
        number(figures.get("tokens_per_second")),
        number(figures["rate"], 1),
        number(figures.get("running")),
        number(mean),
        change,
        ends_in(figures),
        str(figures.get("condition", "running")),
    ]


def number(value: float | None, digits: int = 0) -> str:
    """`value` with thousands marked, a dash for None."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def ends_in(figures: Mapping[str, Any]) -> str:
    """The ETA: an interval where there is one."""
    low, high = figures.get("eta_low_seconds"), figures.get("eta_high_seconds")
    if low is None or high is None:
        return clock(figures["eta_seconds"])
    return f"{clock(low)} to {clock(high)}"
