"""The plots of the benchmark as SVG text."""

from collections.abc import Mapping, Sequence

from scripts.lib.reporting.acceptance import by_position
from scripts.lib.reporting.cells import Cell, is_baseline
from scripts.lib.reporting.cost_model import Split
from scripts.lib.reporting.estimate import geometric_mean
from scripts.lib.reporting.outlook import BOUNDED, EXPECTED, MEASURED
from scripts.lib.reporting.svg import DASHES, INK, SOFT, Grid, Key, Panel, box, colour, drawing, legend, mark, marker, text
from scripts.lib.reporting.verdict import Verdict

WIDTH = 1120.0
PARTS = ("#8FA3B5", "#C2571A", "#E0B48F")  # check, drafts, overhead
BAR = 17
BASES = {MEASURED: (colour(0), "square"), EXPECTED: (colour(1), "diamond"), BOUNDED: (SOFT, "bar")}


def names(rows: Sequence[Cell], key: str) -> list[str]:
    """The values of a column, in order."""
    return sorted({row[key] for row in rows})


def variant_keys(rows: Sequence[Cell]) -> list[Key]:
    """A legend's entries for the variants."""
    return [Key(name, colour(index)) for index, name in enumerate(names(rows, "variant"))]


def described(cell: Cell) -> str:
    """A cell in one line, for a tooltip."""
    name = f"{cell['task']}, {cell['variant']}, concurrency {cell['concurrency']}"
    tau = "" if cell["accept_length"] is None else f", accept length {cell['accept_length']:.2f}"
    return f"{name}: {cell['speedup']:.2f} times{tau}" if cell["speedup"] else f"{name}{tau}"


def speedup_plot(cells: Sequence[Cell]) -> str:
    """Speed-up against accept length, a panel for each concurrency; a ray for each variant meets the line at 1 where it breaks even."""
    known = [cell for cell in cells if cell["speedup"] and cell["accept_length"]]
    tasks, sizes = names(cells, "task"), sorted({cell["concurrency"] for cell in cells})
    keys = [
        *variant_keys(cells),
        *(Key(task, SOFT, marker(index)) for index, task in enumerate(tasks)),
        Key("break-even", INK, line=DASHES),
    ]
    legends, top = legend(keys, WIDTH)
    grid = Grid(len(sizes), min(3, max(2, len(sizes))), height=270, top=top)
    longest = max([2.0, *(max(cell["accept_length"], cell["break_even_accept_length"]) for cell in known)]) * 1.05
    highest = max([1.15, *(cell["speedup"] for cell in known)]) * 1.08
    parts = [legends]
    for index, size in enumerate(sizes):
        panel = grid.panel(index, (1.0, longest), (0.0, highest))
        here = [cell for cell in known if cell["concurrency"] == size]
        parts.append(panel.frame(f"concurrency {size}", "accept length", "speed-up" if index % grid.columns == 0 else ""))
        parts.append(panel.level(1))
        parts += [ray(panel, [cell for cell in here if cell["variant"] == key.words], key) for key in variant_keys(cells)]
        parts += [speedup_mark(panel, cell, tasks, names(cells, "variant")) for cell in here]
    return drawing("Speed-up against accept length", WIDTH, grid.whole_height, "".join(parts))


def ray(panel: Panel, cells: Sequence[Cell], key: Key) -> str:
    """Where a variant would lie with other accept lengths, as far as the panel goes: the speed-up is accept length over break-even."""
    if not cells:
        return ""
    slope = 1 / geometric_mean([cell["break_even_accept_length"] for cell in cells])
    end = min(panel.x.high, panel.y.high / slope)
    tip = f"{key.words} breaks even at accept length {1 / slope:.2f}"
    rays = panel.line([(1, slope), (end, end * slope)], key.fill, 1.2, tip, stroke_opacity="0.35")
    return rays + mark(panel.at(1 / slope, 1), "bar", key.fill, tip)


def speedup_mark(panel: Panel, cell: Cell, tasks: Sequence[str], variants: Sequence[str]) -> str:
    """One cell with its interval: the colour is its variant's, the shape its task's."""
    fill = colour(variants.index(cell["variant"]))
    low, high = cell["speedup_interval"] or (cell["speedup"], cell["speedup"])
    point = panel.at(cell["accept_length"], cell["speedup"])
    return panel.whisker(cell["accept_length"], low, min(high, panel.y.high), fill) + mark(
        point, marker(tasks.index(cell["task"])), fill, described(cell)
    )


def position_plot(cells: Sequence[Cell]) -> str:
    """The share of drafts accepted at each position where all before were, a panel for each task, at the lowest concurrency."""
    shown = [cell for cell in at_lowest(cells) if cell["accepted_histogram"]]
    tasks = names(shown, "task")
    longest = max([2, *(len(cell["accepted_histogram"]) - 1 for cell in shown)])
    legends, top = legend(variant_keys(cells), WIDTH)
    grid = Grid(len(tasks), min(3, max(2, len(tasks))), top=top)
    ticks = [(float(place), str(place)) for place in range(1, longest + 1)]
    shares = [(step / 5, f"{step / 5:.0%}") for step in range(6)]
    parts = [legends]
    for index, task in enumerate(tasks):
        panel = grid.panel(index, (0.7, longest + 0.3), (0.0, 1.0))
        parts.append(panel.frame(task, "position of the draft", "accepted" if index % grid.columns == 0 else "", ticks, shares))
        parts += [positions(panel, cell, colour(names(cells, "variant").index(cell["variant"]))) for cell in shown if cell["task"] == task]
    return drawing("Acceptance by position of the draft", WIDTH, grid.whole_height, "".join(parts))


def positions(panel: Panel, cell: Cell, stroke: str) -> str:
    """Acceptance by position of one cell."""
    known = [(place, rate) for place, rate in enumerate(by_position(cell["accepted_histogram"]), 1) if rate is not None]
    parts = [panel.line([(place, rate.value) for place, rate in known], stroke)] if len(known) > 1 else []
    for place, rate in known:
        tip = f"{cell['variant']}, draft {place}: {rate.value:.1%} accepted ({rate.low:.1%} to {rate.high:.1%})"
        parts.append(panel.whisker(place, max(rate.low, 0.0), min(rate.high, 1.0), stroke))
        parts.append(mark(panel.at(place, rate.value), "circle", stroke, tip))
    return "".join(parts)


def accept_length_plot(cells: Sequence[Cell]) -> str:
    """Accept length by task and variant at the lowest concurrency: a bar each, and a black mark where the variant would break even."""
    shown = at_lowest(cells)
    tasks, variants = names(shown, "task"), names(cells, "variant")
    keys = [*variant_keys(cells), Key("break-even", INK, "bar"), Key("no draft accepted", INK, line=DASHES)]
    legends, top = legend(keys, WIDTH)
    per_line = max(2, min(len(tasks), 20 // (len(variants) + 1)))
    grid = Grid(len(tasks), per_line, height=180, top=top)
    figures = [cell[name] for cell in shown for name in ("accept_length", "break_even_accept_length") if cell[name] is not None]
    parts = [legends]
    for index, task in enumerate(tasks):
        panel = grid.panel(index, (-0.7, len(variants) - 0.3), (0.0, 1.08 * max([1.5, *figures])))
        parts.append(panel.frame(task, y_label="accept length" if index % per_line == 0 else "", x_ticks=()))
        here = {cell["variant"]: cell for cell in shown if cell["task"] == task}
        parts += [accept_bar(panel, place, here.get(variant)) for place, variant in enumerate(variants)]
        parts.append(panel.level(1))
    return drawing("Accept length by task and variant", WIDTH, grid.whole_height - 24, "".join(parts))


def accept_bar(panel: Panel, place: int, cell: Cell | None) -> str:
    """One variant's bar. Its value stands at the foot, where no mark can lie on it; a dash where nothing was measured."""
    left, right, foot = panel.x.at(place - 0.42), panel.x.at(place + 0.42), panel.y.start
    if cell is None or cell["accept_length"] is None:
        return text(((left + right) / 2, foot - 5), "–", "middle", 11)
    top = panel.y.at(cell["accept_length"])
    parts = [box((left, top), right - left, foot - top, colour(place), described(cell))]
    parts.append(text(((left + right) / 2, foot - 5), f"{cell['accept_length']:.2f}", "middle", 11, fill="#ffffff"))
    even = cell["break_even_accept_length"]
    if even is not None:
        parts.append(box((left, panel.y.at(even) - 1.3), right - left, 2.6, INK, f"breaks even at {even:.2f}"))
    return "".join(parts)


def throughput_plot(rows: Sequence[Cell]) -> str:
    """Tokens a second of all requests together against concurrency, the target alone included; a panel for each task."""
    tasks, variants = names(rows, "task"), names([row for row in rows if not is_baseline(row)], "variant")
    alone = names([row for row in rows if is_baseline(row)], "variant")
    looks = {name: (colour(index), "1 0") for index, name in enumerate(variants)} | {name: (INK, DASHES) for name in alone}
    legends, top = legend([Key(name, fill, line=dashes) for name, (fill, dashes) in looks.items()], WIDTH)
    grid = Grid(len(tasks), min(3, max(2, len(tasks))), height=250, top=top)
    sizes = sorted({row["concurrency"] for row in rows})
    speeds = [row["tok_s"] for row in rows if row["tok_s"]]
    parts = [legends]
    for index, task in enumerate(tasks):
        panel = grid.panel(index, (sizes[0] / 1.25, sizes[-1] * 1.25), (min(speeds) / 1.3, max(speeds) * 1.3), log_x=True, log_y=True)
        ticks = [(float(size), str(size)) for size in sizes]
        parts.append(panel.frame(task, "requests at a time", "tok/s" if index % grid.columns == 0 else "", ticks))
        for name, (fill, dashes) in looks.items():
            here = [row for row in rows if (row["task"], row["variant"]) == (task, name) and row["tok_s"]]
            points = sorted((row["concurrency"], row["tok_s"]) for row in here)
            parts.append(panel.line(points, fill, 1.8, stroke_dasharray=dashes) if len(points) > 1 else "")
            parts += [mark(panel.at(*point), "circle", fill, f"{name}, {point[0]} at a time: {point[1]:,.1f} tok/s") for point in points]
    return drawing("Throughput against concurrency", WIDTH, grid.whole_height, "".join(parts))


def cycle_plot(cells: Sequence[Cell], splits: Mapping[tuple[str, str, int], Split]) -> str:
    """A bar for each variant and concurrency: what a cycle costs in steps of the target alone, and a diamond for the tokens it writes."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        if cell["break_even_accept_length"] and cell["drafter"]:
            groups.setdefault((cell["concurrency"], cell["variant"]), []).append(cell)
    labels = ("check by the target", "drafts", "overhead, or all but a plain step where the parts are not known")
    keys = [*(Key(label, fill) for label, fill in zip(labels, PARTS, strict=True)), Key("accept length", INK, "diamond")]
    legends, top = legend(keys, WIDTH)
    bars = sorted(groups.items())
    grid = Grid(1, 1, height=BAR * len(bars) + 8, margin=230, top=top)
    most = max([1.5, *(max(mean(group, "break_even_accept_length"), mean(group, "accept_length")) for _, group in bars)])
    panel = grid.panel(0, (0.0, 1.06 * most), (0.0, 1.0))
    parts = [legends, panel.frame("cost of a cycle, in decoding steps of the target alone", y_ticks=())]
    for index, ((size, variant), group) in enumerate(bars):
        middle = panel.y.end + 4 + BAR * (index + 0.5)
        parts.append(text((panel.x.start - 8, middle + 4), f"{variant}, concurrency {size}", "end", 11.5))
        parts += cycle_bar(panel, middle, group, [splits.get((cell["task"], variant, size)) for cell in group])
    return drawing("Cost of a cycle", WIDTH, grid.whole_height - 14, "".join(parts))


def cycle_bar(panel: Panel, middle: float, cells: Sequence[Cell], known: Sequence[Split | None]) -> list[str]:
    """One bar: the parts of the cycle, scaled to the mean of the cells, and the mean accept length."""
    cost, tau = mean(cells, "break_even_accept_length"), mean(cells, "accept_length")
    split = known[0]
    whole = (1.0, 0.0, cost - 1) if split is None else (split.verify, split.draft, split.overhead)
    parts, left = [], 0.0
    for name, part, fill in zip(("check", "drafts", "the rest"), whole, PARTS, strict=True):
        width = part * cost / sum(whole)
        start, end = panel.x.at(left), panel.x.at(left + width)
        parts.append(box((start, middle - BAR / 2 + 2), end - start, BAR - 4, fill, f"{name}: {width:.2f} steps, {width / cost:.0%}"))
        left += width
    tip = f"writes {tau:.2f} tokens a cycle that costs {cost:.2f} steps: {tau / cost:.2f} times"
    return [*parts, mark((panel.x.at(tau), middle), "diamond", INK, tip)]


def mean(cells: Sequence[Cell], key: str) -> float:
    """The mean of ratios over cells."""
    return geometric_mean([cell[key] for cell in cells])


def steps_plot(verdicts: Sequence[Verdict]) -> str:
    """Speed-up over all tasks by draft steps, by what is known of it, a panel for each drafter and concurrency."""
    keys = [*(Key(basis, fill, shape) for basis, (fill, shape) in BASES.items()), Key("break-even", INK, line=DASHES)]
    legends, top = legend(keys, WIDTH)
    grid = Grid(len(verdicts), min(3, max(2, len(verdicts))), height=190, top=top)
    highest = max([1.15, *(setting.speedup.high for verdict in verdicts for setting in verdict.settings)]) * 1.06
    parts = [legends]
    for index, verdict in enumerate(verdicts):
        longest = verdict.settings[-1].steps
        panel = grid.panel(index, (0.5, longest + 0.5), (0.0, min(highest, 6.0)))
        ticks = [(float(steps), str(steps)) for steps in range(1, longest + 1)]
        title = f"{verdict.family.name}, concurrency {verdict.family.concurrency}"
        parts.append(panel.frame(title, "draft steps", "speed-up" if index % grid.columns == 0 else "", ticks))
        parts.append(panel.level(1))
        for setting in verdict.settings:
            fill, shape = BASES[setting.basis]
            low, high = max(setting.speedup.low, 0.0), min(setting.speedup.high, panel.y.high)
            tip = f"{setting.steps} draft steps: {setting.speedup.words()} times"
            parts.append(panel.whisker(setting.steps, low, high, fill))
            parts.append(mark(panel.at(setting.steps, min(setting.speedup.value, panel.y.high)), shape, fill, tip))
    return drawing("Speed-up by draft steps", WIDTH, grid.whole_height, "".join(parts))


def at_lowest(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the lowest concurrency."""
    lowest = min(cell["concurrency"] for cell in cells)
    return [cell for cell in cells if cell["concurrency"] == lowest]
