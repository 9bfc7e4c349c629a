"""When a run of generation ends, as an interval.

What is left is what running requests have still to write, given that they are as long as they are, and the answers not yet started, whose
mean drifts. It is written at the speed of the full phase, which drifts too, until fewer requests are left than slots.
Everything that is not known exactly is drawn D times; the interval holds the middle 99 % of the draws.
"""

from dataclasses import dataclass

import numpy as np

from scripts.lib.watching import drain
from scripts.lib.watching.lengths import Counts, Floats, Lengths
from scripts.lib.watching.rates import Rates
from scripts.lib.watching.survival import Fit, areas, cumulative, drawn_hazards, fit, mean_and_variance, survival
from scripts.lib.watching.trend import Seen, forecast

DRAWS = 200
INTERVAL = (0.005, 0.995)
ENOUGH = 8  # answers before anything is said
MODEL_ERROR = 0.08  # relative, of all that the model leaves out
LEVELS = np.geomspace(1 / 30, 30, 61)


@dataclass(frozen=True)
class Situation:
    """What a run looks like now.

    unstarted: i64[G] rows; running: i64[G, K, B]; classes: i64[G], as in `Plan`; started and total: rows of all groups;
    slots: requests in flight at once.
    """

    lengths: Lengths
    running: Counts
    unstarted: Counts
    classes: Counts
    started: int
    total: int
    slots: int
    rates: Rates

    @property
    def waiting(self) -> int:
        """Rows not started yet."""
        return int(self.unstarted.sum())

    @property
    def busy(self) -> int:
        """Requests in flight."""
        return int(self.running.sum())


@dataclass(frozen=True)
class Estimate:
    """Seconds from now on (`low` to `high` holds 99 % of the draws), tokens still to be written, and mean length of answers to come."""

    low: float
    middle: float
    high: float
    tokens_left: float
    mean_to_come: float


@dataclass(frozen=True)
class Drawn:
    """What lengths may be like: common hazards [D, B], and factors [D] of rows started last (`level`) and of rows to come (`ahead`)."""

    fitted: Fit
    hazards: Floats
    level: Floats
    ahead: Floats

    def summed(self, group: int) -> Floats:
        """Cumulative hazard [D, B+1] of a group."""
        return cumulative(self.fitted.edges, self.hazards * self.fitted.group[group])


def estimate(now: Situation, seed: int = 0) -> Estimate | None:
    """The interval; None while too few answers are there to say anything."""
    if not now.waiting + now.busy:
        return Estimate(0.0, 0.0, 0.0, 0.0, 0.0)
    if not len(now.rates.seen().position) or now.lengths.ended.sum() + now.lengths.cut.sum() < ENOUGH:
        return None
    random = np.random.default_rng(seed)
    drawn = draw(now, random)
    tokens, mean = tokens_left(now, drawn, random)
    seconds = seconds_left(now, drawn, tokens, random) * np.exp(MODEL_ERROR * random.standard_normal(DRAWS))
    low, middle, high = np.quantile(seconds, [INTERVAL[0], 0.5, INTERVAL[1]])
    return Estimate(float(low), float(middle), float(high), float(np.median(tokens)), float(np.median(mean)))


def draw(now: Situation, random: np.random.Generator) -> Drawn:
    """Hazards that the answers so far allow, and where the drift of the cohorts' means may lead."""
    fitted = fit(now.lengths, now.running, now.classes)
    hazards = drawn_hazards(fitted, DRAWS, random)
    means, _ = mean_and_variance(fitted.edges, survival(cumulative(fitted.edges, hazards[:1]), LEVELS))  # falling
    places = now.lengths.positions()
    known = places - now.lengths.size / 2 < now.started
    cohort = np.interp(np.log(fitted.cohort[known]), np.log(LEVELS), means)
    seen = Seen(places[known] / now.total, cohort, 1 / np.sqrt(fitted.answers[known] + 1))
    level, ahead = forecast(seen, now.started / now.total, DRAWS, random)
    return Drawn(fitted, hazards, factor_of(level, means), factor_of(ahead, means))


def factor_of(mean: Floats, means: Floats) -> Floats:
    """The hazard factor at which answers have the `mean` length, from the falling `means` at LEVELS."""
    result: Floats = np.exp(np.interp(mean, means[::-1], np.log(LEVELS)[::-1]))
    return result


def tokens_left(now: Situation, drawn: Drawn, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Draws [D] of the tokens still to be written, and of the mean length of an answer to come."""
    edges = drawn.fitted.edges
    total, noise, of_waiting = np.zeros(DRAWS), np.zeros(DRAWS), np.zeros(DRAWS)
    unknown = random.standard_normal(DRAWS)  # of groups without answers: one slope, so all at once
    for group, rows in enumerate(now.unstarted):
        summed = drawn.summed(group) * np.exp(drawn.fitted.spread[group] * unknown)[:, None]
        if rows:
            mean, variance = mean_and_variance(edges, survival(summed, drawn.ahead))
            of_waiting += rows * mean
            noise += rows * variance
        here = now.running[group].sum(0)  # [B]
        if here.any():
            left = rest_of_length(edges, survival(summed, drawn.level))
            total += left @ here
            noise += left**2 @ here
    total += of_waiting
    return np.maximum(total + np.sqrt(noise) * random.standard_normal(DRAWS), 1.0), of_waiting / max(now.waiting, 1)


def rest_of_length(edges: Counts, alive: Floats) -> Floats:
    """Mean tokens [D, B] still to come of an answer that is as long as the middle of a bin, from the survival [D, B+1]."""
    area = areas(edges, alive)
    half = 0.5 * (area[:, 1:] + area[:, :-1])
    result: Floats = (area[:, -1:] - half) / np.maximum(0.5 * (alive[:, 1:] + alive[:, :-1]), 1e-12)
    return result


def seconds_left(now: Situation, drawn: Drawn, tokens: Floats, random: np.random.Generator) -> Floats:
    """Draws [D] of the seconds until the last answer: of the full phase, and of its end, which is gone through step by step."""
    slots = max(float(now.slots if now.waiting else now.busy), 1.0)
    cost = costs(now, slots, random)[:, None]
    new, left, step = stepped(now, drawn)
    rows = min(float(now.waiting), drain.ROUNDS_OF_SLOTS * slots)
    flight = drain.in_flight(new, left, slots, rows)  # [D, S]
    fixed = random.uniform(*now.rates.alone(slots), (DRAWS, 1))
    seconds = step * slots * cost * (fixed + (1 - fixed) * flight / slots)
    over = flight < random.exponential(1.0, (DRAWS, 1))  # none is left with a chance of exp(-expected number)
    seconds[np.logical_and.accumulate(over[:, ::-1], axis=1)[:, ::-1]] = 0.0
    simulated = (flight * step).sum(1)
    if now.waiting > rows:
        return seconds.sum(1) + np.maximum(tokens - simulated, 0.0) * cost[:, 0]
    return seconds.sum(1) * np.clip(tokens / np.maximum(simulated, 1.0), 0.5, 2.0)


def costs(now: Situation, slots: float, random: np.random.Generator) -> Floats:
    """Draws [D] of the seconds a token with all slots in use: a forecast while rows wait, later what the last answers say."""
    if now.waiting:
        return forecast(now.rates.seen(), (now.started - now.busy) / now.total, DRAWS, random)[1]
    last = now.rates.recent(max(int(slots), ENOUGH))
    result: Floats = np.exp(0.5 / np.sqrt(last.answers + 1) * random.standard_normal(DRAWS)) / (last.stream * slots)
    return result


def stepped(now: Situation, drawn: Drawn) -> tuple[Floats, Floats, float]:
    """Survival [D, T+1] of answers to come and survivors [D, T+1] of the running ones on a grid of equal steps, and the step in tokens."""
    edges = drawn.fitted.edges
    summed = mixture(drawn, now.unstarted if now.waiting else now.running.sum((1, 2)))
    likely = survival(summed[:1], drawn.ahead[:1])[0] > 0.1 / (now.waiting + now.busy)
    step = float(max(edges[likely].max(), edges[1])) / drain.STEPS
    coarse = summed @ interpolation(edges, np.arange(drain.STEPS + 1.0) * step).T  # [D, T+1]
    new, old = survival(coarse, drawn.ahead), survival(coarse, drawn.level)
    new[:, -1] = old[:, -1] = 0.0
    places = np.minimum(0.5 * (edges[1:] + edges[:-1]) / step, drain.STEPS - 1).astype(np.int64)
    present = np.bincount(places, now.running.sum((0, 1)), minlength=drain.STEPS + 1).astype(np.float64)
    return new, drain.survivors(old, present), step


def mixture(drawn: Drawn, rows: Counts) -> Floats:
    """Cumulative hazard [D, B+1] of i64[G] rows of the groups together: their survival is the mean of the groups'."""
    alive = sum(count * np.exp(-drawn.summed(group)) for group, count in enumerate(rows) if count) / rows.sum()
    result: Floats = -np.log(np.maximum(alive, 1e-300))
    return result


def interpolation(edges: Counts, points: Floats) -> Floats:
    """Matrix [P, B+1] that turns values at the edges into values at `points`, linearly."""
    left = np.clip(np.searchsorted(edges, points, side="right") - 1, 0, len(edges) - 2)
    share = np.clip((points - edges[left]) / (edges[left + 1] - edges[left]), 0.0, 1.0)
    matrix = np.zeros((len(points), len(edges)))
    rows = np.arange(len(points))
    matrix[rows, left] = 1 - share
    matrix[rows, left + 1] += share
    return matrix
