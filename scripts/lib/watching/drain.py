"""The end of a run, when there are more slots than rows left: expected requests in flight, step by step.

Shapes: D draws, T steps of equally many tokens, S steps of the run.
"""

import numpy as np

from scripts.lib.watching.lengths import Floats

STEPS = 64
ROUNDS_OF_SLOTS = 2.0  # rows that are started within the simulated part, in multiples of the slots


def survivors(alive: Floats, running: Floats) -> Floats:
    """Requests [D, T+1] of those `running` now that still run after each step: f64[T] of them by present length, `alive` [D, T+1]."""
    left = np.zeros_like(alive)
    for place in np.flatnonzero(running):
        here = np.maximum(alive[:, place], 1e-12)
        left[:, : alive.shape[1] - place] += running[place] * alive[:, place:] / here[:, None]
    return left


def in_flight(alive: Floats, left: Floats, slots: float, rows: float) -> Floats:
    """Expected requests [D, S] in flight from now on, step by step, when `rows` more are started as slots come free.

    `alive` [D, T+1] is the share of new answers longer than each step, `left` [D, T+1] what is left of those that run already.
    A discrete renewal equation: what is started at a step is what has come free of those started before.
    """
    draws, size = alive.shape
    waiting = np.full(draws, rows)
    starts: list[Floats] = []
    counts: list[Floats] = []
    kept = np.zeros((size - 1, draws))  # started so many steps ago and less, the latest first
    ages = np.ascontiguousarray(alive[:, 1:].T)  # [T, D]
    while waiting.max() > 1e-6 or len(counts) < len(starts) + size:
        busy = np.einsum("td,td->d", kept, ages)
        if len(counts) < size:
            busy += left[:, len(counts)]
        begun = np.clip(slots - busy, 0.0, waiting)
        waiting = waiting - begun
        if waiting.max() > 1e-6 or begun.max() > 1e-6:
            starts.append(begun)
        kept = np.concatenate([begun[None], kept[:-1]])
        counts.append(busy + begun)
    return np.stack(counts, axis=1)
