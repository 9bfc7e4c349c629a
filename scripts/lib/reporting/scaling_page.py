"""What the scaling study says, as words, tables and a plot; nothing where a run has none."""

import html
from collections.abc import Mapping

import numpy as np

from scripts.lib.ground.files import canonical
from scripts.lib.reporting.scaling import Between, Growth
from scripts.lib.reporting.scaling_study import GOALS, Goal, Rates, Series, Study
from scripts.lib.reporting.svg import INK, Grid, Key, Panel, area, colour, drawing, legend, mark, marker
from scripts.lib.reporting.table import MISSING, Table, number, size

EXPLANATION = (
    "Drafters of one recipe, trained on nested parts of the same conversations and measured on the same held-out rows and prompts. "
    "The line lets accept length grow by about the same with every doubling of the data, and less near the ceiling of draft steps + 1. "
    "Intervals are 95 %; they hold for more of the same data, and say less the farther a goal lies from what was measured."
)
FAR = 8.0  # times the most data measured: farther is a guess


def scaling_section(study: Study | None) -> dict[str, str]:
    """The section of the HTML page by its name."""
    if study is None:
        return {}
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences(study))
    plot = f"<figure>{scaling_plot(study)}<figcaption>{html.escape(EXPLANATION)}</figcaption></figure>"
    return {"Scaling": f"<ul>{items}</ul>{plot}<h3>Goals</h3>{goals_table(study).html()}<h3>Drafters</h3>{points_table(study).html()}"}


def scaling_markdown(study: Study | None) -> str:
    """The same for `benchmark.md`."""
    if study is None:
        return ""
    items = "".join(f"- {sentence}\n" for sentence in sentences(study))
    parts = ["\n## Scaling\n", items, goals_table(study).markdown(), points_table(study).markdown(), f"{EXPLANATION}\n"]
    return "\n".join(parts)


def scaling_files(study: Study | None) -> dict[str, str]:
    """The plot, and the lines for the plan of a bigger run."""
    return {} if study is None else {"scaling.json": canonical(study.json()) + "\n", "scaling.svg": scaling_plot(study)}


def sentences(study: Study) -> list[str]:
    """The answer in words, one for each series."""
    return [one_sentence(series, study.rates) for series in study.series]


def one_sentence(series: Series, rates: Rates) -> str:
    """What the goals of a series take, or why nobody knows."""
    if series.growth is None:
        return f"{series.name}: no line ({series.refused})."
    most = series.growth.most_tokens
    parts = [goal_words(goal, most, rates.gpu) for goal in series.goals]
    doubled = (
        series.growth.expected(2 * most, series.growth.most_epochs).value - series.growth.expected(most, series.growth.most_epochs).value
    )
    return f"{series.name}: {'; '.join(parts)}. Twice the data would add {doubled:+.2f}."


def goal_words(goal: Goal, most: int, gpu: bool) -> str:
    """One goal of a series whose largest drafter saw `most` trained tokens."""
    if goal.tokens is None:
        return f"{goal.accept_length:g} is out of reach on this line"
    hours = "" if goal.hours is None else f", {number(goal.hours, 1 if goal.hours >= 1 else 2)} {hours_name(gpu)}"
    far = f", {goal.tokens.value / most:,.0f} times the data measured, so a guess" if goal.tokens.value > FAR * most else ""
    return (
        f"{goal.accept_length:g} needs about {rough(goal.samples)} samples ({rough(goal.tokens.value)} trained tokens, "
        f"{interval(goal.tokens)}){hours} and {size(goal.bytes)} of hidden states{far}"
    )


def hours_name(gpu: bool) -> str:
    """Whose hours they are."""
    return "GPU-hours" if gpu else "hours of this machine"


def interval(tokens: Between) -> str:
    """The interval of a number of tokens in words."""
    if tokens.high is None:
        return f"at least {rough(tokens.low)}, no upper bound" if tokens.low else "no bound"
    return f"{rough(tokens.low or 0)} to {rough(tokens.high)}"


def rough(value: float | None) -> str:
    """A number to two digits: nobody knows the others."""
    return number(None if value is None else float(f"{value:.2g}"))


def points_table(study: Study) -> Table:
    """Every drafter of every series."""
    lines = []
    for series in study.series:
        for point in series.points:
            fitted = series.growth.expected(point.tokens, point.epochs).value if series.growth else None
            figures = (number(point.tokens), number(point.epochs), number(point.accept_length, 3), number(fitted, 3))
            lines.append([series.name, point.drafter, *figures])
    header = ["series", "drafter", "trained tokens an epoch", "epochs", "accept length", "on the line"]
    return Table(header, lines, ("series", "drafter"))


def goals_table(study: Study) -> Table:
    """Every goal of every series that has a line."""
    hours = hours_name(study.rates.gpu)
    lines = []
    for series in study.series:
        for goal in series.goals:
            known = [] if goal.tokens is None else [rough(goal.tokens.value), interval(goal.tokens), rough(goal.samples)]
            known += [] if goal.tokens is None else [number(goal.hours, 2), size(goal.bytes)]
            lines.append([series.name, f"{goal.accept_length:g}", *(known or [MISSING] * 5)])
    header = ["series", "goal", "trained tokens", "95 %", "samples", hours, "hidden states"]
    return Table(header, lines, ("series", "95 %"))


def scaling_plot(study: Study) -> str:
    """Accept length over trained tokens: points, lines and their intervals, a panel for each number of drafts."""
    steps = sorted({series.draft_steps for series in study.series})
    grid = Grid(len(steps), min(len(steps), 3))
    tokens = [point.tokens for series in study.series for point in series.points]
    span = (min(tokens) / 1.5, 8 * max(tokens))
    keys = {task: index for index, task in enumerate(dict.fromkeys(series.task for series in study.series))}
    words, _ = legend([Key(task, colour(index), marker(index)) for task, index in keys.items()], grid.width)
    panels = []
    for place, count in enumerate(steps):
        panel = grid.panel(place, span, (1.0, count + 1.0), log_x=True)
        panels.append(panel.frame(f"chains of {count}", "trained tokens an epoch", "accept length"))
        panels += [panel.level(goal, INK, "2 5") for goal in GOALS if goal < count + 1]
        panels += [one_series(panel, series, keys[series.task]) for series in study.series if series.draft_steps == count]
    return drawing("accept length over trained tokens", grid.width, grid.whole_height, "".join([words, *panels]))


def one_series(panel: Panel, series: Series, look: int) -> str:
    """The line of a series and its points, in the colour and shape of that index."""
    parts = [line_and_band(panel, series.growth, colour(look))] if series.growth else []
    for point in series.points:
        tip = f"{point.drafter}: {point.accept_length:.3f} at {number(point.tokens)} tokens, {point.epochs} epochs"
        parts.append(mark(panel.at(point.tokens, point.accept_length), marker(look), colour(look), tip))
    return "".join(parts)


def line_and_band(panel: Panel, growth: Growth, fill: str) -> str:
    """A fitted line with its interval across the panel."""
    places = np.geomspace(panel.x.low, panel.x.high, 60).tolist()
    found = [growth.expected(tokens, growth.most_epochs) for tokens in places]
    low = [panel.at(x, one.low or 1.0) for x, one in zip(places, found, strict=True)]
    high = [panel.at(x, one.high or 1.0) for x, one in zip(places, found, strict=True)]
    line = panel.line([(x, one.value) for x, one in zip(places, found, strict=True)], fill, 1.8)
    return area([*low, *reversed(high)], fill, 0.10) + line


def expectation_table(growths: Mapping[str, Growth], tokens: float) -> Table:
    """What drafters trained on `tokens` trained tokens should reach by the lines of an earlier run, and what the goals would take."""
    lines = []
    for name, growth in growths.items():
        expected = growth.expected(tokens, growth.most_epochs)
        needed = [growth.needed(goal, growth.most_epochs) for goal in GOALS]
        reach = f"{number(expected.low, 2)} to {number(expected.high, 2)}"
        lines.append(
            [name, number(growth.most_epochs), number(expected.value, 2), reach, *(rough(one.value if one else None) for one in needed)]
        )
    header = ["series", "epochs", "accept length", "95 %", *(f"trained tokens for {goal:g}" for goal in GOALS)]
    return Table(header, lines, ("series", "95 %"))
