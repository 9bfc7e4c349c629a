"""The plots of the report as SVG text. Equal figures give equal bytes: no date, no random ids."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from scripts.lib.reporting.curves import Curve
from scripts.lib.reporting.plan import STEPS, DatasetRows
from scripts.lib.reporting.table import number

COLOURS = ("#1F6FB2", "#C2571A", "#2A8A57", "#8E4A9E", "#7A6A2F", "#B03A48", "#4F6D7A", "#555555")  # dark enough for white text
BARS_PER_LINE = 18
INK, GRID = "#333333", "#DDDDDD"
STYLE: Any = {
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def accept_length_plot(cells: Sequence[Mapping[str, Any]]) -> str:
    """Accept length by task and variant: a bar each, and a black mark where the variant would break even on the machine measured."""
    tasks, variants = (sorted({cell[name] for cell in cells}) for name in ("task", "variant"))
    columns = min(len(tasks), max(1, BARS_PER_LINE // (len(variants) + 1)))
    lines = -(-len(tasks) // columns)
    figures = [cell[name] for cell in cells for name in ("accept_length", "break_even_accept_length") if cell[name] is not None]
    width = max(7.0, 0.6 * columns * (len(variants) + 1))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(lines, columns, figsize=(width, 0.8 + 2.8 * lines), squeeze=False, sharey=True)
        for axes, task in zip(panels.flat, tasks, strict=False):
            task_bars(axes, variants, {cell["variant"]: cell for cell in cells if cell["task"] == task})
            axes.set_title(task)
        panels[0, 0].set_ylim(0, 1.12 * max([1.5, *figures]))
        for axes in panels[:, 0]:
            axes.set_ylabel("accept length")
        for axes in panels.flat[len(tasks) :]:
            axes.set_visible(False)
        handles: list[Artist] = [Patch(color=colour(index), label=variant) for index, variant in enumerate(variants)]
        handles += [
            Line2D([], [], color="black", linewidth=2.5, label="break-even"),
            Line2D([], [], color=INK, linewidth=1, label="no draft accepted"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4))
    return svg(figure, "accept_length")


def task_bars(axes: Axes, variants: Sequence[str], cells: Mapping[str, Mapping[str, Any]]) -> None:
    """One task: a bar for each variant that has an accept length. Its value stands at the foot, where no mark can lie on it."""
    for place, variant in enumerate(variants):
        tau = cells[variant]["accept_length"] if variant in cells else None
        if tau is None:
            axes.annotate("–", (place, 0), (0, 4), textcoords="offset points", ha="center")
            continue
        axes.bar(place, tau, 0.84, color=colour(place))
        axes.annotate(f"{tau:.2f}", (place, 0), (0, 5), textcoords="offset points", ha="center", color="white", fontsize=9)
        break_even = cells[variant]["break_even_accept_length"]
        if break_even is not None:
            axes.plot([place - 0.42, place + 0.42], [break_even] * 2, color="black", linewidth=2.5, solid_capstyle="butt")
    axes.axhline(1, color=INK, linewidth=1)
    axes.set(xlim=(-0.7, len(variants) - 0.3), xticks=[])
    grid(axes)


def training_plot(curves: Sequence[Curve]) -> str:
    """Loss, accuracy of each draft step and simulated accept length over the steps, a row of panels a drafter."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(len(curves), 3, figsize=(11, 3.2 * len(curves)), squeeze=False)
        for (loss, accuracy, accept), curve in zip(panels, curves, strict=True):
            loss.plot(*curve.series("loss"), color="#B5CDE0", linewidth=1, label="training")
            loss.plot(*curve.series("eval_loss"), color=COLOURS[0], marker="o", markersize=3, label="held out")
            for index, column in enumerate(curve.columns("eval_accuracy_")):
                accuracy.plot(*curve.series(column), color=colour(index), marker="o", markersize=3, label=f"draft {index + 1}")
            accept.plot(*curve.series("eval_accept_length_all"), color=COLOURS[0], marker="o", markersize=3, label="all rows")
            accept.plot(*curve.series("eval_accept_length"), color=COLOURS[1], marker="o", markersize=3, label="without repetition loops")
            loss.set(title=f"{curve.drafter}: loss")
            accuracy.set(title="held-out accuracy by draft step", ylim=(0, None))
            accept.set(title="simulated accept length, held out", ylim=(1, None))
            for axes in (loss, accuracy, accept):
                axes.set_xlabel("step")
                axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
                grid(axes)
                axes.legend(fontsize=8)
    return svg(figure, "training")


def rows_plot(datasets: Sequence[DatasetRows]) -> str:
    """Rows of every dataset after each stage, on a logarithmic scale: a bar a stage, a panel a dataset."""
    columns = min(3, len(datasets))
    lines = -(-len(datasets) // columns)
    most = max(row.rows["raw"] or 1 for row in datasets)
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(lines, columns, figsize=(3.7 * columns, 2.0 * lines), squeeze=False, sharex=True, sharey=True)
        for axes, row in zip(panels.flat, datasets, strict=False):
            for place, step in enumerate(STEPS):
                count = row.rows[step]
                axes.barh(place, count or 0, color=COLOURS[0] if count else "none", height=0.7)
                end = (max(count or 0, 0.8), place)
                axes.annotate(number(count), end, (4, 0), textcoords="offset points", va="center", fontsize=9)
            axes.set(title=row.name, xscale="log", xlim=(0.8, most * 30))
            axes.tick_params(left=False)
            axes.spines["left"].set_visible(False)
        panels[0, 0].set_yticks(range(len(STEPS)), STEPS)
        panels[0, 0].invert_yaxis()
        for axes in panels.flat:
            axes.set_xticks([])
            axes.minorticks_off()
            axes.spines["bottom"].set_visible(False)
        for axes in panels.flat[len(datasets) :]:
            axes.set_visible(False)
    return svg(figure, "rows")


def colour(index: int) -> str:
    """A colour for the series of that index."""
    return COLOURS[index % len(COLOURS)]


def grid(axes: Axes) -> None:
    """Light horizontal lines behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG text; `name` seeds its ids, so that several can stand in one page."""
    text = io.StringIO()
    with plt.rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return text.getvalue()
