"""Where a figure that drifts will be on average over the rest of the work."""

from dataclasses import dataclass

import numpy as np

from scripts.lib.watching.lengths import Floats

SLOPE_PRIOR = 0.3  # standard deviation of the relative change over the whole work, before anything was seen
GOES_ON = (0.9, 0.4)  # mean and standard deviation of how much of the slope seen so far goes on
MOST_ALIKE = 0.9  # correlation of neighbouring points
WANDER = 0.09  # standard deviation of what else may change over the whole work, relative


@dataclass(frozen=True)
class Seen:
    """A figure as it was: position f64[K] in shares of the work, value f64[K], relative standard error f64[K]."""

    position: Floats
    value: Floats
    error: Floats


def forecast(seen: Seen, now: float, draws: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Draws [D] of the figure at position `now`, and of its mean over the rest, up to position 1; never below a tenth of the mean.

    A line through the points, those of the last half counting most. Some draws take a slope for chance until it is certain, the
    others, as many as its evidence says, as it is: early on the interval holds both, later they agree.
    """
    weight = np.exp(-(now - seen.position) / max(0.5 * now, 1e-6)) / seen.error**2
    mean = float((weight * seen.value).sum() / weight.sum())
    design = np.stack([np.ones_like(seen.position), seen.position - now], axis=1)  # [K, 2]: level at `now`, slope
    relative = seen.value / mean
    slope, error = slope_of(design, relative, weight)
    believed = round(draws * odds(slope, error))
    chance = drawn_lines(regression(design, relative, weight, SLOPE_PRIOR), draws - believed, random)
    real = drawn_lines(regression(design, relative, weight, np.hypot(SLOPE_PRIOR, slope)), believed, random)
    drawn = random.permutation(np.concatenate([chance, real]))
    rest = max(1.0 - now, 0.0)
    ahead = drawn[:, 0] + random.normal(*GOES_ON, draws) * drawn[:, 1] * rest / 2 + WANDER * rest * random.standard_normal(draws)
    return mean * np.maximum(drawn[:, 0], 0.1), mean * np.maximum(ahead, 0.1)


def regression(design: Floats, values: Floats, weight: Floats, prior: float) -> tuple[Floats, Floats]:
    """Level and slope [2] of a weighted line, the slope shrunk to zero by a `prior` standard deviation, and their covariance [2, 2].

    Points that scatter more than their errors say, and neighbours that err to the same side, make the line less certain.
    """
    known = design.T @ (weight[:, None] * design)
    line = np.linalg.solve(known + np.diag([1e-6, 1 / prior**2]), design.T @ (weight * values))
    rest = np.sqrt(weight) * (values - design @ line)
    misfit = max(float((rest**2).sum()) / max(len(values) - 2, 1), 1.0)
    alike = float(np.clip((rest[1:] * rest[:-1]).sum() / max(float((rest**2).sum()), 1e-12), 0.0, MOST_ALIKE))
    certain = 1 / (misfit * (1 + alike) / (1 - alike))
    precision = certain * known + np.diag([1e-6, 1 / prior**2])
    line = np.linalg.solve(precision, certain * design.T @ (weight * values))
    covariance: Floats = np.linalg.inv(precision)
    return line, covariance


def slope_of(design: Floats, values: Floats, weight: Floats) -> tuple[float, float]:
    """The slope as it is, and its variance."""
    line, covariance = regression(design, values, weight, 1e3)
    return float(line[1]), float(covariance[1, 1])


def odds(slope: float, variance: float) -> float:
    """Share of the draws that take the `slope` as it is: its likelihood if slopes of its size are usual against small ones being so."""
    small = variance + SLOPE_PRIOR**2
    large = small + slope**2
    evidence = 0.5 * slope**2 * (1 / small - 1 / large) - 0.5 * np.log(large / small)
    return float(np.clip(1 / (1 + np.exp(-evidence)), 0.1, 0.98))


def drawn_lines(fitted: tuple[Floats, Floats], draws: int, random: np.random.Generator) -> Floats:
    """Levels and slopes [D, 2] from their mean and covariance."""
    line, covariance = fitted
    result: Floats = line + random.standard_normal((draws, 2)) @ np.linalg.cholesky(covariance).T
    return result
