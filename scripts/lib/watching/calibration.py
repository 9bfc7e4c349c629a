"""What a whole run will take, from the answers to a few of its prompts."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.lib.watching.estimate import INTERVAL
from scripts.lib.watching.lengths import Floats, Lengths
from scripts.lib.watching.survival import cumulative, drawn_hazards, fit, mean_and_variance, survival

DRAWS = 1000
FIXED = (0.4, 1.0)  # share of a step's time that fewer requests in flight do not save
SAMPLE_ERROR = 0.07  # relative: few answers seldom show how long the longest are
ENGINE_ERROR = 0.10  # relative: the whole run fills the memory for keys and values, a few prompts do not


@dataclass(frozen=True)
class Sample:
    """Answers to prompts drawn at random: tokens of each, whether it was cut at `max_tokens`, `slots` at once, `seconds` for all."""

    tokens: Sequence[int]
    cut: Sequence[bool]
    max_tokens: int
    slots: int
    seconds: float


@dataclass(frozen=True)
class Foretold:
    """Low, middle and high of tokens and seconds of all turns; low to high holds 99 % of the draws."""

    tokens: tuple[float, float, float]
    seconds: tuple[float, float, float]


def foretold(sample: Sample, turns: int, seed: int = 0) -> Foretold:
    """What `turns` answers like those of the `sample` take at the same number of slots."""
    random = np.random.default_rng(seed)
    tokens = np.maximum(tokens_of(sample, turns, random), 1.0)
    fixed = random.uniform(*FIXED, DRAWS)
    longest, flights = float(makespan(sample.tokens, sample.slots)), sum(sample.tokens) / sample.slots
    step = sample.seconds / (fixed * longest + (1 - fixed) * flights)  # with all slots in use
    seconds = step * (tokens / sample.slots + fixed * max(sample.tokens)) * np.exp(ENGINE_ERROR * random.standard_normal(DRAWS))
    return Foretold(interval(tokens), interval(seconds))


def tokens_of(sample: Sample, turns: int, random: np.random.Generator) -> Floats:
    """Draws [D] of the tokens of `turns` answers."""
    lengths = Lengths.empty([sample.max_tokens])
    for place, (tokens, cut) in enumerate(zip(sample.tokens, sample.cut, strict=True)):
        lengths.add(0, place, tokens, not cut)
    fitted = fit(lengths, np.zeros_like(lengths.ended), np.zeros(1, np.int64))
    hazards = cumulative(fitted.edges, drawn_hazards(fitted, DRAWS, random) * fitted.group[0])
    mean, variance = mean_and_variance(fitted.edges, survival(hazards, np.ones(DRAWS)))
    noise = np.sqrt(turns * variance) * random.standard_normal(DRAWS)
    return (turns * mean + noise) * np.exp(SAMPLE_ERROR * random.standard_normal(DRAWS))


def makespan(tokens: Sequence[int], slots: int) -> int:
    """Steps until the last of these answers ends when `slots` are written at once, in this order."""
    ends = [0] * slots
    for length in tokens:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def interval(values: Floats) -> tuple[float, float, float]:
    """Low, middle and high of draws."""
    low, middle, high = np.quantile(values, [INTERVAL[0], 0.5, INTERVAL[1]])
    return float(low), float(middle), float(high)
