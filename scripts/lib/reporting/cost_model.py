"""What a cycle of drafting and checking costs, fitted on cells, and what other settings would cost.

    cycle(steps, tokens) = overhead + steps * draft + verify(tokens)

for one drafter on one ground at one concurrency. The unit is the target's own decoding step at that concurrency, as measured beside
each cell: in this unit a cell's cycle is its break-even accept length, and what slows the machine or lengthens the context for both
cancels. verify(1) is that step. What more tokens cost is taken from the target alone at other concurrencies where those reach as far,
since one forward of c requests with t tokens each is about as large as one of c * t requests; otherwise it is fitted, as a cost for
each further token. Chains check one token more than they draft, so that a fit alone cannot tell a draft from its check; the sum of
the two is all that chains of other lengths need. Nothing is said of a setting that the cells do not determine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.lib.reporting.cells import Cell, Ground, middle
from scripts.lib.reporting.estimate import Z95, Estimate, student

Array = np.ndarray[Any, np.dtype[np.float64]]

BOOTSTRAP_FREEDOM = 20  # how much the spread between prompts and repeats weighs against the misfit, in degrees of freedom
DETERMINED = 1e-6


@dataclass(frozen=True)
class Observation:
    """One cell: its setting, its cycle in steps of the target alone, and the standard error of that as a share (None: unknown)."""

    steps: int
    tokens: int
    cycle: float
    noise: float | None


@dataclass(frozen=True)
class VerifyCurve:
    """Seconds of one decoding step of the target alone at the concurrencies measured, ascending."""

    seconds: tuple[tuple[int, float], ...]

    def relative(self, tokens: int, concurrency: int) -> float | None:
        """The step that checks `tokens` for each request over the plain one; None beyond the largest concurrency measured."""
        sizes, seconds = zip(*self.seconds, strict=True) if self.seconds else ((), ())
        if concurrency not in sizes or not sizes[0] <= tokens * concurrency <= sizes[-1] or len(sizes) < 2:
            return None
        return float(np.interp(tokens * concurrency, sizes, seconds)) / seconds[sizes.index(concurrency)]


@dataclass(frozen=True)
class Split:
    """The parts of a cycle in steps of the target alone."""

    verify: float
    draft: float
    overhead: float

    @property
    def draft_share(self) -> float:
        """The drafter's share of the cycle."""
        return self.draft / (self.verify + self.draft + self.overhead)


@dataclass(frozen=True)
class CostModel:
    """A fitted model. `costs` are overhead, draft step and, where the target alone does not tell, a further token to check."""

    curve: VerifyCurve
    concurrency: int
    known_verify: bool
    costs: Array
    determined: Array
    uncertainty: Array
    spread: float | None
    quantile: float

    def cycle(self, steps: int, tokens: int) -> Estimate | None:
        """The cycle of a setting with the interval in which a cell's own would lie; None when the cells do not determine it."""
        row = self.row(steps, tokens)
        base = self.base(tokens)
        if base is None or self.spread is None or not self.is_determined(row):
            return None
        value = base + float(row @ self.costs)
        return Estimate(value, self.quantile * self.spread * float(np.sqrt(row @ self.uncertainty @ row + value**2)))

    def draft_and_check(self) -> Estimate | None:
        """What one more draft and its check cost; None when only one number of steps was measured."""
        row = np.array([0.0, 1.0] if self.known_verify else [0.0, 1.0, 1.0])
        if self.spread is None or not self.is_determined(row):
            return None
        return Estimate(float(row @ self.costs), self.quantile * self.spread * float(np.sqrt(row @ self.uncertainty @ row)))

    def split(self, steps: int, tokens: int) -> Split | None:
        """The parts of a cycle; None when the cells cannot tell drafts from their check, or when noise hides a part."""
        apart = [np.array([0.0, 1.0])] if self.known_verify else [np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])]
        base = self.base(tokens)
        if base is None or not all(self.is_determined(row) for row in apart):
            return None
        verify = base if self.known_verify else base + (tokens - 1) * float(self.costs[2])
        draft, overhead = steps * float(self.costs[1]), float(self.costs[0])
        doubt = self.quantile * (self.spread or 0.0) * float(np.sqrt(self.uncertainty[0, 0]))
        possible = draft > 0 and verify >= 1 and overhead >= -doubt
        return Split(verify, draft, max(overhead, 0.0)) if possible else None

    def row(self, steps: int, tokens: int) -> Array:
        """How often each of `costs` is paid."""
        return np.array([1.0, steps] if self.known_verify else [1.0, steps, tokens - 1])

    def base(self, tokens: int) -> float | None:
        """The part of a cycle that is not fitted: the check as known from the target alone, or of one token."""
        return self.curve.relative(tokens, self.concurrency) if self.known_verify else 1.0

    def is_determined(self, row: Array) -> bool:
        """Do the cells measured say what `row` costs? Yes, where it is a combination of theirs."""
        return bool(np.linalg.norm(row @ self.determined - row) < DETERMINED * np.linalg.norm(row))


def fit(observations: Sequence[Observation], curve: VerifyCurve, concurrency: int) -> CostModel:
    """The model of `observations` (at least one), each weighted so that errors count as shares of its cycle."""
    longest = max(one.tokens for one in observations)
    known = curve.relative(longest, concurrency) is not None
    bases = [curve.relative(one.tokens, concurrency) if known else 1.0 for one in observations]
    cycles = np.array([one.cycle for one in observations])
    rows = np.array([[1.0, one.steps] if known else [1.0, one.steps, one.tokens - 1] for one in observations]) / cycles[:, None]
    wanted = 1 - np.array(bases, dtype=np.float64) / cycles
    inverse = np.linalg.pinv(rows, rcond=1e-9)
    costs = inverse @ wanted
    freedom = len(observations) - int(np.linalg.matrix_rank(rows, tol=1e-9))
    spread, quantile = spread_of(wanted - rows @ costs, [one.noise for one in observations], freedom)
    return CostModel(curve, concurrency, known, costs, inverse @ rows, inverse @ inverse.T, spread, quantile)


def spread_of(misfit: Array, noises: Sequence[float | None], freedom: int) -> tuple[float | None, float]:
    """Standard error of one cell as a share of its cycle, from the misfit and from the cells' own noise, and the quantile for 95 %.

    None when neither is known: as many costs as cells, and no cell with an interval.
    """
    known = [noise for noise in noises if noise is not None]
    weight = BOOTSTRAP_FREEDOM if known else 0
    if freedom + weight == 0:
        return None, Z95
    own = sum(noise**2 for noise in known) / len(known) if known else 0.0
    return float(np.sqrt((float(misfit @ misfit) + weight * own) / (freedom + weight))), student(freedom + weight)


def observation(cell: Cell) -> Observation | None:
    """A cell as the model takes it; None where it has no drafter, no verify step or no speed."""
    known = cell["drafter"] and cell["draft_steps"] and cell["draft_tokens"] and cell["break_even_accept_length"]
    if not known or cell["algorithm"] == "NGRAM":
        return None
    return Observation(cell["draft_steps"], cell["draft_tokens"], cell["break_even_accept_length"], noise_of(cell))


def noise_of(cell: Cell) -> float | None:
    """Standard error of the speed-up as a share, from its interval over prompts and repeats."""
    if not cell["speedup_interval"]:
        return None
    low, high = cell["speedup_interval"]
    return (high - low) / (2 * Z95 * cell["speedup"])


def verify_curve(cells: Sequence[Cell], ground: Ground) -> VerifyCurve:
    """The decoding step of the target alone on a ground, by concurrency: the median over cells."""
    steps: dict[int, list[float | None]] = {}
    for cell in cells:
        if Ground.of(cell) == ground:
            steps.setdefault(cell["concurrency"], []).append(baseline_step(cell))
    medians: Mapping[int, float | None] = {size: middle(seconds) for size, seconds in steps.items()}
    return VerifyCurve(tuple(sorted((size, seconds) for size, seconds in medians.items() if seconds is not None)))


def baseline_step(cell: Cell) -> float | None:
    """Seconds of one decoding step of the target alone, which writes one token for every request."""
    if cell["baseline_step_seconds"] is not None:
        return float(cell["baseline_step_seconds"])
    return cell["concurrency"] / cell["baseline_tok_s"] if cell["baseline_tok_s"] else None
