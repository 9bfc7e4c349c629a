"""Figures with their uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.96
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 % quantiles for 1 to 10 degrees of freedom


@dataclass(frozen=True)
class Estimate:
    """A figure and the half width of its 95 % interval, None where nothing tells how far it may be off."""

    value: float
    error: float | None = None

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - (self.error or 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + (self.error or 0.0)

    @property
    def relative(self) -> float:
        """The half width as a share of the figure, 0 where it is not known."""
        return (self.error or 0.0) / self.value

    def words(self, digits: int = 2) -> str:
        """The figure with its interval."""
        if self.error is None:
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def student(freedom: int) -> float:
    """Half width of a 95 % interval in standard errors, for a spread known from `freedom` degrees of freedom (at least 1)."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else Z95 + (Z95**3 + Z95) / (4 * freedom)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
