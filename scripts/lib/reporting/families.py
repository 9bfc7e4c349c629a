"""Cells that one cost model describes: a drafter on one ground at one concurrency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scripts.lib.reporting.cells import Cell, Ground, ground_names
from scripts.lib.reporting.cost_model import CostModel, Split, VerifyCurve, fit, observation, verify_curve


@dataclass(frozen=True)
class Family:
    """The cells of one drafter, algorithm, ground, concurrency and flags; `ground_name` tells the ground from the run's others."""

    drafter: str
    algorithm: str
    ground: Ground
    ground_name: str
    concurrency: int
    cells: Sequence[Cell]
    curve: VerifyCurve

    @property
    def name(self) -> str:
        """The drafter, with the algorithm where it is not EAGLE-3's, and its ground where the run has several."""
        algorithm = "" if self.algorithm == "EAGLE3" else f" ({self.algorithm})"
        return f"{self.drafter}{algorithm}" + (f", {self.ground_name}" if self.ground_name else "")

    @property
    def chains(self) -> list[Cell]:
        """Cells whose drafts form a chain."""
        return [cell for cell in self.cells if cell["topk"] == 1]

    @property
    def chain_steps(self) -> list[int]:
        """The lengths of chain that were measured."""
        return sorted({cell["draft_steps"] for cell in self.chains})

    def without(self, steps: int) -> "Family":
        """The family had chains of that length not been measured."""
        return replace(self, cells=[cell for cell in self.cells if cell["topk"] != 1 or cell["draft_steps"] != steps])

    def model(self) -> CostModel | None:
        """The cost model; None when there is no cell to fit it on."""
        observations = [one for one in map(observation, self.cells) if one is not None]
        return fit(observations, self.curve, self.concurrency) if observations else None


def families(cells: Sequence[Cell]) -> list[Family]:
    """Every family of a run, by concurrency and drafter."""
    groups: dict[tuple[int, str, str, Ground, tuple[str, ...]], list[Cell]] = {}
    for cell in cells:
        if observation(cell) is not None:
            key = cell["concurrency"], cell["drafter"], cell["algorithm"], Ground.of(cell), tuple(cell["flags"])
            groups.setdefault(key, []).append(cell)
    names = ground_names({Ground.of(cell) for cell in cells})
    ordered = sorted(groups.items(), key=lambda item: (*item[0][:3], item[0][3].words, item[0][4]))
    return [
        Family(drafter, algorithm, ground, names[ground], concurrency, group, verify_curve(cells, ground))
        for (concurrency, drafter, algorithm, ground, _), group in ordered
    ]


def splits(all_families: Sequence[Family]) -> Mapping[tuple[str, str, int], Split]:
    """The parts of the cycle of each cell, by task, variant and concurrency, where the cells of its family tell them apart."""
    found = {}
    for family in all_families:
        model = family.model()
        for cell in family.cells:
            split = model.split(cell["draft_steps"], cell["draft_tokens"]) if model else None
            if split is not None:
                found[cell["task"], cell["variant"], cell["concurrency"]] = split
    return found
