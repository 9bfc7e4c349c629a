"""Which of the measured settings to serve with."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.ground.errors import StageError
from scripts.lib.reporting.cells import Cell
from scripts.lib.reporting.estimate import geometric_mean


@dataclass(frozen=True)
class Choice:
    """A variant at one concurrency, its cells by task, and its speed-up and accept length over them (means of ratios)."""

    cells: Sequence[Cell]
    speedup: float
    accept_length: float

    @property
    def cell(self) -> Cell:
        """Any of its cells: all have the same setting."""
        return self.cells[0]

    @property
    def pays(self) -> bool:
        """Whether the target alone was slower."""
        return self.speedup > 1

    @property
    def served(self) -> bool:
        """Whether it was measured in SGLang, and not in the reference loop."""
        return bool(self.cell["engine"] == "sglang")

    @property
    def break_even(self) -> float:
        """The accept length from which on this setting pays."""
        return self.accept_length / self.speedup


def best_choice(cells: Sequence[Cell], drafters: Sequence[str]) -> Choice:
    """The EAGLE-3 setting of one of `drafters` with the highest speed-up; those measured in SGLang go before all others.

    Raises StageError when no cell has a speed-up.
    """
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell["drafter"] in drafters and cell["algorithm"] == "EAGLE3" and cell["speedup"] and cell["accept_length"]:
            groups.setdefault((cell["variant"], cell["concurrency"]), []).append(cell)
    if not groups:
        raise StageError(
            f"none of {len(cells)} cells has a speed-up of one of {', '.join(drafters)}; measure a variant of a trained drafter"
        )
    return max((choice(group) for group in groups.values()), key=lambda one: (one.served, one.speedup))


def choice(group: Sequence[Cell]) -> Choice:
    """One variant at one concurrency."""
    speedups, lengths = ([cell[name] for cell in group] for name in ("speedup", "accept_length"))
    return Choice(group, geometric_mean(speedups), geometric_mean(lengths))


def verdict(chosen: Choice) -> str:
    """In words: does it pay, and where."""
    cell = chosen.cell
    where = f"{cell['machine']['gpu'] or cell['machine']['cpu']}, {cell['engine']}, concurrency {cell['concurrency']}"
    tasks = ", ".join(sorted(one["task"] for one in chosen.cells))
    figures = f"{chosen.speedup:.2f} times the target alone at accept length {chosen.accept_length:.2f} ({tasks}; {where})"
    if chosen.pays:
        return f"The fastest setting measured is `{cell['variant']}`: {figures}."
    return (
        f"No measured setting pays. The best is `{cell['variant']}`: {figures}; it would pay from accept length "
        f"{chosen.break_even:.2f} on. Serve the target alone, or train a better drafter first."
    )
