"""What a chain of a length does, or would do, on a task: measured, expected between measured lengths, or bounded below the shortest."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.lib.reporting.acceptance import shortened
from scripts.lib.reporting.cells import Cell
from scripts.lib.reporting.cost_model import CostModel
from scripts.lib.reporting.estimate import Estimate, geometric_mean
from scripts.lib.reporting.families import Family

MEASURED, EXPECTED, BOUNDED = "measured", "expected", "bounded"
BEND = 0.05


@dataclass(frozen=True)
class Outlook:
    """A chain of one length on one task; `break_even` is what its cycle costs in decoding steps of the target alone."""

    accept_length: Estimate
    break_even: Estimate
    speedup: Estimate
    basis: str

    @classmethod
    def joined(cls, accept_length: Estimate, cycle: Estimate, basis: str) -> "Outlook":
        """From an accept length and a cost that are off independently."""
        speedup = accept_length.value / cycle.value
        return cls(accept_length, cycle, Estimate(speedup, speedup * math.hypot(accept_length.relative, cycle.relative)), basis)


@dataclass(frozen=True)
class Setting:
    """A chain of `steps` drafts over all tasks of its family; figures are means of ratios."""

    steps: int
    tasks: Mapping[str, Outlook]
    speedup: Estimate

    @property
    def accept_length(self) -> float:
        """Mean over tasks."""
        return geometric_mean([task.accept_length.value for task in self.tasks.values()])

    @property
    def break_even(self) -> float:
        """Mean over tasks."""
        return geometric_mean([task.break_even.value for task in self.tasks.values()])

    @property
    def basis(self) -> str:
        """The weakest basis of its tasks."""
        found = {task.basis for task in self.tasks.values()}
        return next(basis for basis in (BOUNDED, EXPECTED, MEASURED) if basis in found)


def settings_of(family: Family, model: CostModel | None) -> list[Setting]:
    """Every length up to the longest measured of which something can be said on every task; without a model none between those measured."""
    longest = family.chain_steps[-1]
    tasks = sorted({cell["task"] for cell in family.chains if cell["draft_steps"] == longest})
    found = []
    for steps in range(1, longest + 1):
        outlooks = {task: outlook(family, task, steps, model) for task in tasks}
        known = {task: one for task, one in outlooks.items() if one is not None}
        if len(known) == len(tasks):
            found.append(Setting(steps, known, overall(list(known.values()))))
    return found


def outlook(family: Family, task: str, steps: int, model: CostModel | None) -> Outlook | None:
    """A chain of `steps` on a task; None where the cells do not tell."""
    chains = {cell["draft_steps"]: cell for cell in family.chains if cell["task"] == task}
    if steps in chains:
        own = chains[steps]
        return Outlook(Estimate(own["accept_length"]), Estimate(own["break_even_accept_length"]), measured_speedup(own), MEASURED)
    longer = [length for length in sorted(chains) if length > steps and chains[length]["accepted_histogram"]]
    tau = shortened(chains[longer[0]]["accepted_histogram"], steps) if longer else None
    if tau is None:
        return None
    if steps < min(chains):
        return Outlook.joined(tau, bounds(chains[min(chains)], steps), BOUNDED)
    cycle = model.cycle(steps, steps + 1) if model else None
    return None if cycle is None else Outlook.joined(tau, cycle, EXPECTED)


def bounds(shortest: Cell, steps: int) -> Estimate:
    """The cost of a chain below the shortest measured: no more than that one, and no less than on the line from it to the target alone.

    The line goes through one step for no draft. What drafting costs beside drafts and their check is paid by every chain, so that
    shorter ones lie above the line; a check that grows only from some size on bends it by less than BEND.
    """
    most = shortest["break_even_accept_length"]
    least = min(most, (1 - BEND) * (1 + (most - 1) * steps / shortest["draft_steps"]))
    noise = measured_speedup(shortest).relative
    low, high = least * (1 - noise), most * (1 + noise)
    return Estimate((low + high) / 2, (high - low) / 2)


def measured_speedup(cell: Cell) -> Estimate:
    """The speed-up of a cell; half its interval is its error."""
    if not cell["speedup_interval"]:
        return Estimate(cell["speedup"])
    low, high = cell["speedup_interval"]
    return Estimate(cell["speedup"], (high - low) / 2)


def overall(tasks: Sequence[Outlook]) -> Estimate:
    """The mean speed-up over tasks. Cells are off independently; costs that were not measured are off for all tasks alike."""
    value = geometric_mean([task.speedup.value for task in tasks])
    if any(task.speedup.error is None for task in tasks):
        return Estimate(value)
    own = math.sqrt(sum(task.speedup.relative**2 for task in tasks if task.basis == MEASURED))
    alike = sum(task.speedup.relative for task in tasks if task.basis != MEASURED)
    return Estimate(value, value * math.hypot(own, alike) / len(tasks))
