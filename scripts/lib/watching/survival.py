"""How long answers become, from those that ended, those that were cut and those that still run.

A running request says that its answer is longer than it is now; the mean of the finished ones alone is too short, because short answers
finish first. Hazard of bin b = answers that ended in it / tokens generated in it (Kaplan-Meier in its piecewise exponential form: a
running request and one cut at its cap are right-censored). Groups of rows and cohorts scale one common hazard (proportional hazards).

Shapes: D draws of what is not known exactly, G groups, K cohorts, B bins of length.
"""

from dataclasses import dataclass

import numpy as np

from scripts.lib.watching.lengths import Counts, Floats, Lengths

ROUNDS = 6
GROUP_PRIOR, COHORT_PRIOR = 4.0, 2.0  # answers as expected that each factor starts with
CLASS_SLOPE, CLASS_SPREAD = -0.35, 0.35  # log hazard by class before anything was seen: between none and half for double the length
SHAPE_PRIOR = 3.0  # answers as expected that each bin of each group starts with
BIN_PRIOR = 0.3  # answers that each bin's hazard starts with, at the hazard of the shorter bins
FORGET = 0.8  # weight of the next shorter bin in that
TAIL_SPREAD = 1.8  # log standard deviation of how much lower the hazard is where no answer has ended yet: long answers tend to go on


@dataclass(frozen=True)
class Fit:
    """ended: f64[B], exposure: f64[B] tokens at the common hazard; group: f64[G, B], cohort: f64[K] factors; answers: f64[K];
    spread: f64[G] standard deviation of the log factor of groups without answers, signed."""

    edges: Counts
    ended: Floats
    exposure: Floats
    group: Floats
    spread: Floats
    cohort: Floats
    answers: Floats


def fit(lengths: Lengths, running: Counts, classes: Counts) -> Fit:
    """Common hazard and factors from all answers and the `running` requests [G, K, B]; i64[G] `classes` are as in `Plan`."""
    ended = lengths.ended.astype(np.float64)
    exposure = exposures(lengths, running)
    cohort: Floats = np.ones(ended.shape[1])
    by_group, by_cohort, common = ended.sum((1, 2)), ended.sum((0, 2)), ended.sum((0, 1))
    group: Floats = np.ones(len(ended))
    spread: Floats = np.zeros(len(ended))
    for _ in range(ROUNDS):  # groups first: rows come sorted by them, and what they explain is no drift
        hazard = common / np.maximum(np.einsum("gkb,g->b", exposure, group), 1e-9)
        expected = (exposure @ hazard).sum(1)
        usual, spread = by_class(by_group, expected, classes)
        group = (by_group + GROUP_PRIOR) / (expected + GROUP_PRIOR / usual)
    alike = exposure.sum(1) * hazard * group[:, None]  # [G, B] answers expected if all groups had one shape
    shape = group[:, None] * (ended.sum(1) + SHAPE_PRIOR) / (alike + SHAPE_PRIOR)
    hazard = common / np.maximum(np.einsum("gkb,gb->b", exposure, shape), 1e-9)
    for _ in range(ROUNDS):
        cohort = (by_cohort + COHORT_PRIOR) / (np.einsum("gkb,gb,b->k", exposure, shape, hazard) + COHORT_PRIOR)
        hazard = common / np.maximum(np.einsum("gkb,gb,k->b", exposure, shape, cohort), 1e-9)
    pooled = np.einsum("gkb,gb,k->b", exposure, shape, cohort)
    return Fit(lengths.edges, common, pooled, shape, spread, cohort, by_cohort)


def by_class(ended: Floats, expected: Floats, classes: Counts) -> tuple[Floats, Floats]:
    """Factor [G] that the classes of a group let expect, from those with answers, and how uncertain its logarithm is [G].

    The second falls to zero for groups with answers of their own; its sign says on which side of the others a class lies, as all are
    uncertain together, by one slope.
    """
    weight = ended / (1 + 0.1 * ended)
    center = float((weight * classes).sum() / max(weight.sum(), 1e-9))
    away = classes - center
    factor = np.log((ended + 0.5) / (expected + 0.5))
    level = float((weight * factor).sum() / max(weight.sum(), 1e-9))
    precision = float((weight * away**2).sum()) + 1 / CLASS_SPREAD**2
    slope = (float((weight * away * (factor - level)).sum()) + CLASS_SLOPE / CLASS_SPREAD**2) / precision
    own = GROUP_PRIOR / (GROUP_PRIOR + ended)
    return np.exp(np.clip(level + slope * away, -4, 4)), away * own / np.sqrt(precision)


def exposures(lengths: Lengths, running: Counts) -> Floats:
    """Tokens [G, K, B] generated in each bin: whole bins passed, and half of the bin in which an answer ended or is now."""
    widths = np.diff(lengths.edges)
    here = lengths.ended + lengths.cut + running
    beyond = here[..., ::-1].cumsum(-1)[..., ::-1] - here
    top = lengths.cut  # a cut answer filled its bin up to the cap, which is an edge
    return widths * (beyond + 0.5 * (here + top))


def reference(ended: Floats, exposure: Floats) -> Floats:
    """Hazard [B] that each bin is expected to have from the shorter ones, those near it counting most."""
    hazard = np.empty_like(ended)
    deaths, tokens = 0.5 * FORGET, max(exposure.sum() / max(ended.sum(), 0.5) * 0.5 * FORGET, 1e-9)
    for place in range(len(ended)):
        deaths, tokens = FORGET * deaths + ended[place], FORGET * tokens + exposure[place]
        hazard[place] = deaths / tokens
    return hazard


def drawn_hazards(fitted: Fit, draws: int, random: np.random.Generator) -> Floats:
    """Common hazard [D, B], drawn from what the counts allow; the first draw is the expected one."""
    shorter = reference(fitted.ended, fitted.exposure)
    tail = np.exp(-TAIL_SPREAD * np.abs(random.standard_normal((draws, 1))))
    known = fitted.exposure + BIN_PRIOR / shorter
    drawn: Floats = random.gamma(fitted.ended + BIN_PRIOR * tail, size=(draws, len(shorter))) / known
    drawn[0] = (fitted.ended + BIN_PRIOR) / known
    return drawn


def cumulative(edges: Counts, hazard: Floats) -> Floats:
    """Cumulative hazard [..., B+1] at the edges."""
    steps = hazard * np.diff(edges)
    return np.concatenate([np.zeros((*hazard.shape[:-1], 1)), steps.cumsum(-1)], axis=-1)


def survival(hazards: Floats, factors: Floats) -> Floats:
    """Share of answers longer than each edge: [..., B+1] cumulative hazards and [...] factors."""
    result: Floats = np.exp(-hazards * factors[..., None])
    return result


def areas(edges: Counts, alive: Floats) -> Floats:
    """Integral of the survival `alive` [..., B+1] from 0 to each edge, in tokens: at the last edge it is the mean length."""
    steps = 0.5 * (alive[..., 1:] + alive[..., :-1]) * np.diff(edges)
    return np.concatenate([np.zeros((*alive.shape[:-1], 1)), steps.cumsum(-1)], axis=-1)


def mean_and_variance(edges: Counts, alive: Floats) -> tuple[Floats, Floats]:
    """Mean and variance [...] of the length from the survival at the edges [..., B+1], cut at the last edge."""
    middles = 0.5 * (edges[1:] + edges[:-1])
    weights = 0.5 * (alive[..., 1:] + alive[..., :-1]) * np.diff(edges)
    mean = weights.sum(-1)
    return mean, np.maximum(2.0 * (weights * middles).sum(-1) - mean**2, 0.0)
