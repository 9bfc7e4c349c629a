"""How accept length grows with the tokens that a drafter is trained on.

    log((tau - 1) / (ceiling - tau)) = level + growth * log2(tokens) (+ repeats * log2(epochs), where epochs differ)

Between no accepted draft and every draft accepted, neither of which it reaches, accept length so grows by about the same with every
doubling of the data, and less near the ceiling. Least squares; intervals are those of a linear model with Student's t, so three
drafters give wide ones. Nothing here knows what the data are: other prompts or another target have another line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, log2, sqrt
from typing import Any

import numpy as np

from scripts.lib.ground.errors import StageError
from scripts.lib.reporting.estimate import student

FEWEST = 3
FARTHEST = 64.0  # log2 of tokens: more than that is no answer


@dataclass(frozen=True)
class Point:
    """One drafter: trained tokens of one pass over its rows, passes, and its accept length."""

    drafter: str
    tokens: int
    epochs: int
    accept_length: float


@dataclass(frozen=True)
class Between:
    """A figure with its 95 % interval; None where the points set no bound, or none is reached."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Growth:
    """A fitted line: `level`, `growth` a doubling of tokens, `repeats` a doubling of epochs; `covariance` [3, 3] of these.

    `quantile` is Student's t for the fit's degrees of freedom; `most_epochs` are those of the drafter that was trained most.
    """

    ceiling: int
    level: float
    growth: float
    repeats: float
    covariance: Sequence[Sequence[float]]
    quantile: float
    most_tokens: int
    most_epochs: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Growth":
        """From its JSON."""
        return cls(**data)

    def json(self) -> dict[str, Any]:
        """As `report/scaling.json` keeps it."""
        return asdict(self)

    def expected(self, tokens: float, epochs: int) -> Between:
        """Accept length after `epochs` passes over `tokens` trained tokens."""
        row = np.array([1.0, log2(tokens), log2(epochs)])
        middle = float(row @ [self.level, self.growth, self.repeats])
        half = self.quantile * sqrt(max(float(row @ np.array(self.covariance) @ row), 0.0))
        value, low, high = (1 + (self.ceiling - 1) / (1 + exp(-place)) for place in (middle, middle - half, middle + half))
        return Between(value, low, high)

    def needed(self, accept_length: float, epochs: int) -> Between | None:
        """Trained tokens for `accept_length`; None when it is not below the ceiling, or when more tokens gave no more."""
        if not 1 < accept_length < self.ceiling or self.growth <= 0:
            return None
        fixed, slope = np.array([1.0, 0.0, log2(epochs)]), np.array([0.0, 1.0, 0.0])
        start = self.level + self.repeats * log2(epochs) - transformed(accept_length, self.ceiling)
        best = -start / self.growth
        if best > FARTHEST:
            return None
        # Where the interval of the line holds the goal: (start + growth x)^2 = t^2 var(x), a quadratic in x = log2(tokens).
        spread = self.quantile**2 * np.array(self.covariance)
        square = self.growth**2 - slope @ spread @ slope
        half = start * self.growth - fixed @ spread @ slope
        low, high = bounds(float(square), float(half), float(start**2 - fixed @ spread @ fixed), best)
        return Between(2.0**best, tokens_at(low), tokens_at(high))


def tokens_at(place: float | None) -> float | None:
    """2 to the power `place`; None beyond what makes sense."""
    return None if place is None or place > FARTHEST else 2.0**place


def bounds(square: float, half: float, constant: float, best: float) -> tuple[float | None, float | None]:
    """The ends of the range around `best` in which `square` x^2 + 2 `half` x + `constant` is at most zero; None where it has no end."""
    root = sqrt(max(half**2 - square * constant, 0.0))
    if square > 0:
        return (-half - root) / square, (-half + root) / square
    # The growth itself may be zero: however much data, the goal may not be reached.
    low = max((-half - root) / square, (-half + root) / square) if square and half**2 > square * constant else None
    return (low if low is not None and low <= best else None), None


def transformed(accept_length: float, ceiling: int) -> float:
    """Where an accept length stands between 1 and the ceiling, on a scale without ends."""
    return log((accept_length - 1) / (ceiling - accept_length))


def fit(points: Sequence[Point], ceiling: int) -> Growth:
    """The line through `points`.

    Raises StageError for fewer than three amounts of trained tokens, an accept length at an end of its range, or points that
    cannot tell tokens from epochs.
    """
    amounts = {point.tokens for point in points}
    if len(amounts) < FEWEST:
        raise StageError(f"a line needs {FEWEST} amounts of trained tokens, here are {len(amounts)}; add drafters with other `fraction`s")
    ends = [point.drafter for point in points if not 1 < point.accept_length < ceiling]
    if ends:
        raise StageError(f"{', '.join(ends)}: accept length at an end of its range, 1 to {ceiling}; look at these drafters first")
    varied = len({point.epochs for point in points}) > 1
    columns = [[1.0, log2(point.tokens), log2(point.epochs)][: 3 if varied else 2] for point in points]
    rows, goals = np.array(columns), np.array([transformed(point.accept_length, ceiling) for point in points])
    freedom = len(points) - rows.shape[1]
    if np.linalg.matrix_rank(rows) < rows.shape[1] or freedom < 1:
        raise StageError(f"{len(points)} drafters cannot tell tokens from epochs; give drafters of equal epochs at {FEWEST} fractions")
    inverse = np.linalg.inv(rows.T @ rows)
    found = inverse @ rows.T @ goals
    covariance = np.zeros((3, 3))
    covariance[: len(found), : len(found)] = inverse * float(((goals - rows @ found) ** 2).sum() / freedom)
    level, growth, repeats = [*found.tolist(), 0.0][:3]
    most = max(points, key=lambda point: (point.tokens, point.epochs))
    return Growth(ceiling, level, growth, repeats, covariance.tolist(), student(freedom), most.tokens, most.epochs)
