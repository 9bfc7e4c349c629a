"""What the cells of a run say, worked out once for every page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.lib.reporting.cells import Cell, with_baselines
from scripts.lib.reporting.cost_model import Split
from scripts.lib.reporting.families import families, splits
from scripts.lib.reporting.outlook import MEASURED
from scripts.lib.reporting.plots import (
    accept_length_plot,
    cycle_plot,
    position_plot,
    speedup_plot,
    steps_plot,
    throughput_plot,
)
from scripts.lib.reporting.verdict import Check, Leader, Verdict, checks, leaders, verdicts
from scripts.lib.reporting.wording import with_words

CAPTIONS = {
    "speedup": "Speed-up against accept length. Above the dashed line a variant pays. The pale ray of a variant shows where it would lie "
    "with other accept lengths; a bar marks where it crosses the line, its break-even accept length. Thin lines are 95 % intervals.",
    "accept_length": "Accept length by task and variant, at the lowest concurrency. Where a bar ends above its black mark, the drafter "
    "pays on this machine.",
    "positions": "Of the drafts at each position whose predecessors were all accepted, the share that was accepted too, with its 95 % "
    "interval; at the lowest concurrency. A curve that falls late is worth more draft steps.",
    "cycle": "What one cycle of drafting and checking costs, in decoding steps of the target alone, and the tokens that it writes. A "
    "diamond beyond the end of its bar is a gain. Where the cells cannot tell the parts, a plain step is set off from the rest.",
    "steps": "Speed-up over all tasks by number of draft steps: measured, expected by the cost model between measured lengths, or "
    "bounded below the shortest one.",
    "throughput": "Tokens a second of all requests together, both axes logarithmic. Where a drafter's line crosses the dashed one of "
    "the target alone, it stops paying.",
}


@dataclass(frozen=True)
class Benchmarks:
    """Rows of the table (cells with their notes, and the target alone), verdicts, and plots by name."""

    cells: Sequence[Cell]
    rows: Sequence[Cell]
    leaders: Sequence[Leader]
    verdicts: Sequence[Verdict]
    checks: Sequence[Check]
    plots: dict[str, str]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> "Benchmarks":
        """Everything about `cells`, of which there is at least one."""
        found = families(cells)
        parts = splits(found)
        rows = with_words(with_baselines(cells), parts)
        judged = verdicts(found)
        return cls(cells, rows, leaders(rows), judged, checks(found), plots(rows, cells, judged, parts))


def plots(
    rows: Sequence[Cell], cells: Sequence[Cell], judged: Sequence[Verdict], parts: Mapping[tuple[str, str, int], Split]
) -> dict[str, str]:
    """The plots for which there is something to show."""
    found = {"speedup": speedup_plot(cells), "accept_length": accept_length_plot(cells), "positions": position_plot(cells)}
    if any(cell["drafter"] and cell["break_even_accept_length"] for cell in cells):
        found["cycle"] = cycle_plot(cells, parts)
    if any(setting.basis != MEASURED for verdict in judged for setting in verdict.settings):
        found["steps"] = steps_plot(judged)
    if len({row["concurrency"] for row in rows if row["tok_s"]}) > 1:
        found["throughput"] = throughput_plot(rows)
    return found
