"""Lengths of answers so far, as histograms: by group of rows, by when they were started, and by length."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]

BINS = 64
COHORTS = 24
FIRST_SIZE = 8  # rows of a cohort at first; it doubles whenever the cohorts run out


def length_edges(caps: Sequence[int]) -> Counts:
    """Bin edges [B+1] in tokens, finer where answers are short: 0 to the longest answer, every cap an edge."""
    steps = np.round(np.geomspace(min(8, max(caps)), max(caps), BINS)).astype(np.int64)
    return np.unique(np.concatenate([[0], steps, np.asarray(caps, np.int64)]))


@dataclass
class Lengths:
    """G groups, K cohorts of rows that were started one after the other, B bins of length.

    edges: i64[B+1] tokens; ended: i64[G, K, B] answers that came to their end; cut: i64[G, K, B] answers cut at their cap;
    size: rows of one cohort.
    """

    edges: Counts
    ended: Counts
    cut: Counts
    size: int = FIRST_SIZE

    @classmethod
    def empty(cls, caps: Sequence[int]) -> "Lengths":
        """No answers yet; one cap, in tokens, for each group."""
        edges = length_edges(caps)
        shape = (len(caps), COHORTS, len(edges) - 1)
        return cls(edges, np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def add(self, group: int, position: int, tokens: int, ended: bool) -> None:
        """Count the answer of the row that was started as number `position` (from 0)."""
        self.make_room(position)
        counts = self.ended if ended else self.cut
        counts[group, position // self.size, self.bin(tokens)] += 1

    def make_room(self, position: int) -> None:
        """Merge cohorts two by two until `position` lies in one of them."""
        while position >= COHORTS * self.size:
            self.ended, self.cut = halved(self.ended), halved(self.cut)
            self.size *= 2

    def bin(self, tokens: int) -> int:
        """The bin of an answer of `tokens` (an edge belongs to the bin that it closes)."""
        return min(max(bisect_left(self.edges, tokens) - 1, 0), len(self.edges) - 2)  # numpy takes ten times as long for one number

    def running(self, groups: Counts, positions: Counts, lengths: Floats) -> Counts:
        """Histogram [G, K, B] of R requests that still run: i64[R] groups and positions, f64[R] present lengths in tokens."""
        if len(positions):
            self.make_room(int(positions.max()))
        bins = np.clip(np.searchsorted(self.edges, lengths) - 1, 0, len(self.edges) - 2)
        counts = np.zeros_like(self.ended)
        np.add.at(counts, (groups, positions // self.size, bins), 1)
        return counts

    def positions(self) -> Floats:
        """Middle of each cohort [K], in rows started."""
        result: Floats = (np.arange(COHORTS) + 0.5) * self.size
        return result

    def state(self) -> dict[str, Any]:
        """What `restored` needs, as JSON."""
        counts = {name: packed(value) for name, value in (("ended", self.ended), ("cut", self.cut))}
        return {"edges": self.edges.tolist(), "groups": len(self.ended), "size": self.size, **counts}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Lengths":
        """The histograms that `state` describes."""
        edges = np.asarray(state["edges"], np.int64)
        shape = (state["groups"], COHORTS, len(edges) - 1)
        return cls(edges, unpacked(state["ended"], shape), unpacked(state["cut"], shape), state["size"])


def halved(counts: Counts) -> Counts:
    """`counts` [G, K, B] with cohorts 2k and 2k+1 as cohort k, the later half empty."""
    groups, cohorts, bins = counts.shape
    merged = counts.reshape(groups, cohorts // 2, 2, bins).sum(axis=2)
    return np.concatenate([merged, np.zeros_like(merged)], axis=1)


def packed(counts: Counts) -> list[list[int]]:
    """Places of the counts above zero in the flat array, and the counts."""
    flat = counts.ravel()
    places = np.flatnonzero(flat)
    return [places.tolist(), flat[places].tolist()]


def unpacked(pair: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Counts:
    """The array of `shape` that `packed` described."""
    flat = np.zeros(int(np.prod(shape)), np.int64)
    flat[np.asarray(pair[0], np.int64)] = pair[1]
    return flat.reshape(shape)
