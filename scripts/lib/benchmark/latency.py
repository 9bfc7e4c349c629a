"""How long answers take: to the first token, between tokens, in a verify step; and how sure a speed-up is."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scripts.lib.benchmark.answers import Answer, Pair

Way = Callable[[Pair], Answer]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
DRAWS = 1000
INTERVAL = (0.025, 0.975)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and quantiles; None of nothing."""
    if not len(values):
        return None
    array = np.asarray(values)
    return {"mean": float(array.mean())} | {name: float(np.quantile(array, share)) for name, share in QUANTILES.items()}


def first_token(pairs: Sequence[Pair], way: Way) -> dict[str, float] | None:
    """Seconds from the question to the first token."""
    return spread([way(pair).prefill_seconds for pair in pairs])


def inter_token(pairs: Sequence[Pair], way: Way) -> dict[str, float] | None:
    """Seconds between tokens: those that came in one piece share its time. None where nobody saw them come."""
    gaps: list[float] = []
    for pair in pairs:
        before = 0.0
        for moment, tokens in way(pair).events:
            gaps += [(moment - before) / tokens] * tokens
            before = moment
    return spread(gaps)


def decoding(passes: Sequence[Sequence[Pair]], way: Way) -> float:
    """Seconds of decoding of a pass, summed over its answers; the mean of all passes."""
    return sum(way(pair).decode_seconds for row in passes for pair in row) / len(passes)


def step_seconds(passes: Sequence[Sequence[Pair]], way: Way, steps: Callable[[Answer], int | None]) -> float | None:
    """Seconds of one step of decoding over all passes; None when there was none, or one was not counted."""
    counted = [steps(way(pair)) for row in passes for pair in row]
    known = [count for count in counted if count is not None]
    if len(known) < len(counted) or not sum(known):
        return None
    return decoding(passes, way) * len(passes) / sum(known)


def speedup_interval(
    passes: Sequence[Sequence[Pair]], seconds: Callable[[Answer], float], speedup: float | None, seed: int
) -> list[float] | None:
    """Where `speedup` lies with 95 %: drawn anew from the prompts, and for each from its passes, with both ways always together.

    What is drawn is the ratio of tokens a second of `seconds`; its spread is laid around `speedup`, which at several requests at once
    comes from the clock and not from the requests. None when there is one pair alone.
    """
    ways = (plain_answer, chain_answer)
    tokens = np.asarray([[[len(way(pair).ids) for pair in row] for row in passes] for way in ways], dtype=float)  # [way, pass, pair]
    times = np.asarray([[[seconds(way(pair)) for pair in row] for row in passes] for way in ways])
    _, repeats, count = tokens.shape
    if speedup is None or repeats * count < 2:
        return None
    draw = np.random.default_rng(seed)
    pairs, rows = (draw.integers(size, size=(DRAWS, count)) for size in (count, repeats))
    written, taken = (values[:, rows, pairs].sum(-1) for values in (tokens, times))  # [way, draw]
    written, taken = (values[:, (taken > 0).all(0)] for values in (written, taken))  # answers of one token are not decoded
    ratios = written[1] * taken[0] / (taken[1] * written[0])
    whole, whole_time = tokens.sum((1, 2)), times.sum((1, 2))
    ratio = whole[1] * whole_time[0] / (whole_time[1] * whole[0])
    return [float(speedup * quantile / ratio) for quantile in np.quantile(ratios, INTERVAL)]


def plain_answer(pair: Pair) -> Answer:
    """The answer of the target alone."""
    return pair.plain


def chain_answer(pair: Pair) -> Answer:
    """The answer with drafts."""
    return pair.chain


def summary(passes: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """All figures of time but the speeds, as `cell.json` names them."""
    pairs = [pair for row in passes for pair in row]
    found: dict[str, Any] = {}
    for name, way in (("", chain_answer), ("baseline_", plain_answer)):
        found |= {
            f"{name}prefill_seconds": sum(way(pair).prefill_seconds for pair in pairs) / len(pairs),
            f"{name}ttft_seconds": first_token(pairs, way),
            f"{name}itl_seconds": inter_token(pairs, way),
            f"{name}decode_seconds": decoding(passes, way),
        }
    found["cycle_seconds"] = step_seconds(passes, chain_answer, lambda answer: answer.steps)
    found["baseline_step_seconds"] = step_seconds(passes, plain_answer, lambda answer: len(answer.ids) - 1)
    return found
