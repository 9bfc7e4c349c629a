"""The plots of a run's data and training as SVG text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.reporting.curves import Curve
from scripts.lib.reporting.plan import STEPS, DatasetRows
from scripts.lib.reporting.plots import WIDTH
from scripts.lib.reporting.svg import SOFT, Grid, Key, Panel, box, colour, drawing, legend, mark, text
from scripts.lib.reporting.table import number

MARKED = 60  # points up to which each gets a mark


@dataclass(frozen=True)
class Line:
    """A column of a curve: what it is, its colour, and its points."""

    words: str
    stroke: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Field:
    """What a panel of training curves shows; its y axis begins at `floor`."""

    title: str
    floor: float
    lines: Sequence[Line]


def training_plot(curves: Sequence[Curve]) -> str:
    """Loss, accuracy of each draft step and simulated accept length over the steps, a row of panels for each drafter."""
    grid = Grid(3 * len(curves), 3, height=190, top=0)
    parts = []
    for row, curve in enumerate(curves):
        last = max(line["step"] for line in curve.rows)
        parts += [curve_panel(grid, 3 * row + place, last, field) for place, field in enumerate(fields(curve))]
    return drawing("Training curves", WIDTH, grid.whole_height, "".join(parts))


def fields(curve: Curve) -> list[Field]:
    """The three panels of a drafter."""

    def column(name: str, words: str, stroke: str) -> Line:
        return Line(words, stroke, list(zip(*curve.series(name), strict=True)))

    loss = [column("loss", "training", "#A9C4DB"), column("eval_loss", "held out", colour(0))]
    accuracies = [column(name, f"draft {place + 1}", colour(place)) for place, name in enumerate(curve.columns("eval_accuracy_"))]
    lengths = [
        column("eval_accept_length_all", "all rows", colour(0)),
        column("eval_accept_length", "without repetition loops", colour(1)),
    ]
    return [
        Field(f"{curve.drafter}: loss", 0.0, loss),
        Field("held-out accuracy by draft step", 0.0, accuracies),
        Field("simulated accept length, held out", 1.0, lengths),
    ]


def curve_panel(grid: Grid, index: int, last: float, field: Field) -> str:
    """One panel of lines up to step `last`, its legend inside."""
    values = [value for line in field.lines for _, value in line.points]
    panel = grid.panel(index, (0.0, max(last, 1.0)), (field.floor, max([field.floor + 0.1, *values]) * 1.08))
    parts = [panel.frame(field.title, "step")]
    for line in field.lines:
        if len(line.points) > 1:
            parts.append(panel.line(line.points, line.stroke, 1.4))
        if len(line.points) <= MARKED:
            parts += [mark(panel.at(*at), "circle", line.stroke, f"{line.words}, step {at[0]:.0f}: {at[1]:.3f}") for at in line.points]
    return "".join(parts) + inside_legend(panel, [Key(line.words, line.stroke) for line in field.lines if line.points])


def inside_legend(panel: Panel, keys: Sequence[Key]) -> str:
    """Entries below each other in the lower left corner."""
    parts = []
    for place, key in enumerate(reversed(keys)):
        words, _ = legend([key], 400)
        parts.append(f'<g transform="translate({panel.x.start + 6:.0f} {panel.y.start - 26 - 17 * place:.0f})">{words}</g>')
    return "".join(parts)


def rows_plot(datasets: Sequence[DatasetRows]) -> str:
    """Rows of every dataset after each stage, on a logarithmic scale: a bar a stage, a panel a dataset."""
    grid = Grid(len(datasets), 3, height=16 * len(STEPS), top=0, gap=34, margin=84)
    most = max(row.rows["raw"] or 1 for row in datasets)
    parts = []
    for index, row in enumerate(datasets):
        left, right, top, _ = grid.place(index)
        parts.append(text((left, top - 8), row.name, size=12.5, font_weight="600"))
        for place, step in enumerate(STEPS):
            count, middle = row.rows[step], top + 16 * place + 7
            width = (right - left - 70) * math.log10(max(count or 1, 1)) / max(math.log10(most), 1)
            parts.append(text((left - 8, middle + 4), step, "end", 11, fill=SOFT))
            parts.append(box((left, middle - 6), width, 12, colour(0), f"{row.name}, {step}: {number(count)}") if count else "")
            parts.append(text((left + (width if count else 0) + 5, middle + 4), number(count), size=11))
    return drawing("Rows of each dataset after each stage", WIDTH, grid.whole_height - 30, "".join(parts))
