"""Which setting to serve with, at each concurrency: from what was measured and from what the cost model expects of other chains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.lib.reporting.cells import Cell, Ground, is_baseline
from scripts.lib.reporting.cost_model import CostModel
from scripts.lib.reporting.estimate import Estimate, geometric_mean
from scripts.lib.reporting.families import Family
from scripts.lib.reporting.outlook import BOUNDED, MEASURED, Outlook, Setting, measured_speedup, outlook, settings_of


@dataclass(frozen=True)
class Verdict:
    """What the cells of a family say: settings by steps, and sentences on why there are not more of them."""

    family: Family
    settings: Sequence[Setting]
    refusals: Sequence[str]

    @property
    def best(self) -> Setting:
        """The setting with the highest speed-up of those that are more than bounded; of equals the shortest."""
        known = [setting for setting in self.settings if setting.basis != BOUNDED]
        return max(known, key=lambda setting: (round(setting.speedup.value, 6), -setting.steps))

    @property
    def rivals(self) -> list[Setting]:
        """Other settings that the interval of the best one does not exclude."""
        best = self.best
        return [setting for setting in self.settings if setting is not best and setting.speedup.high >= best.speedup.low]

    @property
    def candidate(self) -> Setting | None:
        """The setting worth measuring next: the best if it was not, or else what may be better still. None where that is all known."""
        if self.best.basis != MEASURED:
            return self.best
        open_ones = [one for one in self.settings if one.basis != MEASURED and one.speedup.high > self.best.speedup.value]
        return max(open_ones, key=lambda setting: setting.speedup.high, default=None)


def verdicts(families: Sequence[Family]) -> list[Verdict]:
    """A verdict for every family that has a chain."""
    return [verdict(family) for family in families if family.chain_steps]


def verdict(family: Family) -> Verdict:
    """All chains up to the longest measured whose cost and acceptance the cells tell, at least within bounds."""
    model = family.model()
    doubt = doubts(family, model)
    longest = family.chain_steps[-1]
    beyond = f"Chains of more than {longest} drafts are not judged: no cell measured whether a draft at position {longest + 1} is accepted."
    return Verdict(family, settings_of(family, None if doubt else model), [*doubt, beyond])


def doubts(family: Family, model: CostModel | None) -> list[str]:
    """Why the cost of chains between those measured cannot be told, as a sentence; empty when it can, or when there are none."""
    lengths = family.chain_steps
    between = [steps for steps in range(lengths[0], lengths[-1]) if steps not in lengths]
    if not between:
        return []
    others = f"Chains of {' or '.join(map(str, between))} drafts are not judged"
    price = model.draft_and_check() if model else None
    if price is None:
        return [f"{others}: nothing tells how far off these cells may be; set benchmark.repeats above 1."]
    if price.low <= 0:
        steps = f"{price.words()} decoding steps of the target"
        return [f"{others}: one more draft with its check cost {steps}, which noise hides; measure more prompts or repeats."]
    return []


@dataclass(frozen=True)
class Check:
    """A chain that was measured beside what the others of its family let expect of it."""

    family: Family
    task: str
    steps: int
    expected: Outlook
    measured: Outlook

    @property
    def agrees(self) -> bool:
        """Do the two speed-ups differ by no more than both intervals allow?"""
        allowed = math.hypot(self.expected.speedup.error or 0.0, self.measured.speedup.error or 0.0)
        return abs(self.expected.speedup.value - self.measured.speedup.value) <= allowed


def checks(families: Sequence[Family]) -> list[Check]:
    """Every measured chain of which the other lengths of its family say something."""
    found = []
    for family in families:
        for steps in family.chain_steps[:-1]:
            others = family.without(steps)
            model = None if doubts(others, others.model()) else others.model()
            for task in sorted({cell["task"] for cell in family.chains if cell["draft_steps"] == steps}):
                foreseen, own = outlook(others, task, steps, model), outlook(family, task, steps, None)
                if foreseen is not None and own is not None:
                    found.append(Check(family, task, steps, foreseen, own))
    return found


@dataclass(frozen=True)
class Leader:
    """The variant with the most tokens a second at a concurrency, of whatever algorithm; `gain` is over the fastest target alone.

    One that is not `lossless` leads only where no other was measured.
    """

    concurrency: int
    variant: str
    gain: Estimate
    lossless: bool


def leaders(rows: Sequence[Cell]) -> list[Leader]:
    """The fastest variant at each concurrency, over all tasks. Only variants measured on as many tasks as any other are compared."""
    return [leader for size in sorted({row["concurrency"] for row in rows}) if (leader := leader_at(rows, size)) is not None]


def leader_at(rows: Sequence[Cell], concurrency: int) -> Leader | None:
    """The fastest variant of one concurrency; None where no speed is known."""
    here = [row for row in rows if row["concurrency"] == concurrency and row["tok_s"]]
    alone: dict[str, dict[Ground, float]] = {}
    groups: dict[str, list[Cell]] = {}
    for row in here:
        if is_baseline(row):
            alone.setdefault(row["task"], {})[Ground.of(row)] = row["tok_s"]
        elif row["speedup"]:
            groups.setdefault(row["variant"], []).append(row)
    most = max((len(group) for group in groups.values()), default=0)
    gains = {name: mean_gain(group, alone) for name, group in groups.items() if len(group) == most}
    lossless = {name: not any(cell["different"] for cell in groups[name]) for name in gains}
    best = max(sorted(gains), key=lambda name: (lossless[name], gains[name].value), default=None)
    return None if best is None else Leader(concurrency, best, gains[best], lossless[best])


def mean_gain(cells: Sequence[Cell], alone: Mapping[str, Mapping[Ground, float]]) -> Estimate:
    """Speed over that of the fastest target `alone` on each task; the interval is as wide as the speed-ups' own.

    A cell's speed-up is over the target that took turns with it; what lies between that one's ground and the fastest comes from all cells.
    """
    shares = {(task, ground): speed / max(speeds.values()) for task, speeds in alone.items() for ground, speed in speeds.items()}
    value = geometric_mean([cell["speedup"] * shares[cell["task"], Ground.of(cell)] for cell in cells])
    spreads = [measured_speedup(cell) for cell in cells]
    if any(spread.error is None for spread in spreads):
        return Estimate(value)
    return Estimate(value, value * math.sqrt(sum(spread.relative**2 for spread in spreads)) / len(cells))
