"""Which rows go together: the runs of an optimizer step, and the batches of a step that is computed in parts.

Every batch takes the time and the memory of the largest one, where all have its size: what counts is how small that is.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scripts.lib.training.batches import TrainingRow, offsets

NEIGHBOURS = 16  # sets whose rows may change places
LEAST = 1e-3  # of the largest set: what a trade is worth at least
LOOKED_AT = 1024  # rows of a set, and of all others, that a trade is chosen from: bounds time and memory
Size = tuple[int, int]  # slots and positions of a row


def size_of(row: TrainingRow) -> Size:
    """The size of `row`."""
    return len(row.slots), len(row.aux)


def spread(sizes: Sequence[Size], order: Sequence[int], batch_tokens: int, neighbours: int = NEIGHBOURS) -> list[list[int]]:
    """Cut `order` into sets of whole rows of about `batch_tokens` slots, as equal in slots and in positions as can be.

    Rows change places within a run of so many `neighbours`; one keeps the order.
    """
    runs = pack([slots for slots, _ in sizes], order, batch_tokens, neighbours)
    return [indices for run in runs for indices in (split(sizes, run, batch_tokens) if neighbours > 1 else [run])]


def pack(lengths: Sequence[int], order: Sequence[int], batch_tokens: int, batches: int = 1) -> list[list[int]]:
    """Cut `order` into runs of whole rows of about so many `batches` of `batch_tokens`: the largest as small as can be, all about equal.

    A row that is longer than a batch is one, however long. Equal runs keep the last step of an epoch from resting on a few tokens.
    """
    ends, counted = (offsets([min(lengths[index], most) for index in order]) for most in (sum(lengths), batch_tokens))
    count = min(max(round(counted[-1] / (batches * batch_tokens)), 1), len(order))
    cuts = [0]
    if count:
        largest = smallest_room(ends, count)
        needed = runs_needed(ends, largest)
        for behind in range(count - 1, 0, -1):
            start = cuts[-1]
            earliest = bisect_left(needed, -behind, lo=start + 1, key=lambda runs: -runs)
            latest = min(furthest(ends, start, largest), len(order) - behind)
            equal = nearest(counted, counted[start] + (counted[-1] - counted[start]) / (behind + 1))
            cuts.append(min(max(equal, earliest), latest))
        cuts.append(len(order))
    return [list(order[first:last]) for first, last in pairwise(cuts)]


def smallest_room(ends: Sequence[int], count: int) -> int:
    """The least that the largest of at most `count` runs can hold of rows that end at `ends`, the first of which is 0."""
    longest = max(end - start for start, end in pairwise(ends))
    sizes = range(max(longest, -(-ends[-1] // count)), ends[-1] + 1)
    return sizes[bisect_left(sizes, True, key=lambda size: full_runs(ends, size) <= count)]


def full_runs(ends: Sequence[int], size: int) -> int:
    """How many runs of at most `size` there are when each takes what it can."""
    place = runs = 0
    while place < len(ends) - 1:
        place, runs = furthest(ends, place, size), runs + 1
    return runs


def runs_needed(ends: Sequence[int], size: int) -> list[int]:
    """For each row how many runs of at most `size` hold it and all behind it; none behind the last."""
    needed = [0] * len(ends)
    for place in range(len(ends) - 2, -1, -1):
        needed[place] = 1 + needed[furthest(ends, place, size)]
    return needed


def furthest(ends: Sequence[int], start: int, size: int) -> int:
    """Where a run from row `start` ends that takes what it can of `size`."""
    return bisect_right(ends, ends[start] + size) - 1


def nearest(ends: Sequence[int], goal: float) -> int:
    """The row whose start is nearest to `goal`."""
    after = bisect_left(ends, goal)
    return after if after == 0 or ends[after] - goal < goal - ends[after - 1] else after - 1


def split(sizes: Sequence[Size], indices: Sequence[int], limit: int, multiple: int = 1) -> list[list[int]]:
    """Cut the rows `indices` into as few sets of about `limit` slots as can be, as equal as whole rows allow; a set keeps their order.

    Their number is a `multiple`; with fewer rows than that some are empty. Slots and positions are equal both: a set is as large as the
    larger of its shares of them. A row longer than `limit` counts as one set, which may get some more. Sets come in the order of their
    first rows.
    """
    slots, positions = (sum(sizes[index][kind] for index in indices) for kind in (0, 1))
    count = min(max(round(sum(min(sizes[index][0], limit) for index in indices) / limit), 1), len(indices))
    count = -(-count // multiple) * multiple
    shares = [(sizes[index][0] / slots, sizes[index][1] / positions) for index in indices]
    sets = traded(np.array(shares).reshape(-1, 2), dealt(shares, count), count)
    return [[indices[place] for place in places] for places in sorted(sets, key=lambda places: min(places, default=len(indices)))]


def dealt(shares: Sequence[tuple[float, float]], count: int) -> list[int]:
    """Which of `count` sets each row is in when the largest goes first, each to the set that is smallest with it.

    `shares` are a row's of all slots and of all positions; a set is as large as the larger of its own.
    """
    sets, held = [0] * len(shares), [(0.0, 0.0)] * count
    for place in sorted(range(len(shares)), key=lambda place: (-max(shares[place]), place)):
        mine, yours = shares[place]
        least = min(range(count), key=lambda number: max(held[number][0] + mine, held[number][1] + yours))
        sets[place] = least
        held[least] = (held[least][0] + mine, held[least][1] + yours)
    return sets


def traded(shares: NDArray[np.float64], sets: Sequence[int], count: int) -> list[list[int]]:
    """The rows of each of `count` sets once no trade makes the largest one of several rows smaller by `LEAST` of it.

    It gives a row to another set, for one of that set's or for none. `shares` [R, 2] are as in `dealt`, `sets` the set of each of R rows.
    Of the two kinds one may get larger on the way, as long as the larger one gets smaller.
    """
    owner = np.array(sets, dtype=np.int64)
    held: NDArray[np.float64] = np.stack([np.bincount(owner, kind, count) for kind in shares.T], 1).astype(np.float64)
    while count > 1 and (several := np.bincount(owner, minlength=count) > 1).any():  # a row alone, however long, cannot be helped
        largest = int(np.argmax(held.max(1) * several))
        mine, theirs, partner, after = best_trade(shares, owner, held, largest)
        if after > held[largest].max() * (1 - LEAST):
            break
        change = shares[mine] - (shares[theirs] if theirs is not None else 0.0)
        held[largest] -= change
        held[partner] += change
        owner[mine] = partner
        if theirs is not None:
            owner[theirs] = largest
    return [np.flatnonzero(owner == number).tolist() for number in range(count)]


def best_trade(
    shares: NDArray[np.float64], owner: NDArray[np.int64], held: NDArray[np.float64], largest: int
) -> tuple[int, int | None, int, float]:
    """The row that set `largest` best gives away, the row that it gets or None, the set of that, and how large the larger of both is then.

    Of very many rows only some are looked at: so many are dealt out evenly as it is. `owner` [R] and `held` [sets, 2] are as in `traded`.
    """
    mine, others = thinned(np.flatnonzero(owner == largest)), thinned(np.flatnonzero(owner != largest))
    partners = np.concatenate([owner[others], np.delete(np.arange(len(held)), largest)])
    taken = np.concatenate([shares[others], np.zeros((len(partners) - len(others), 2))])
    change = shares[mine][:, None] - taken
    after = np.maximum(held[largest] - change, held[partners] + change).max(2)
    given, place = np.unravel_index(after.argmin(), after.shape)
    return int(mine[given]), int(others[place]) if place < len(others) else None, int(partners[place]), float(after[given, place])


def thinned(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """About `LOOKED_AT` of `rows` at most, evenly drawn."""
    return rows[:: -(-len(rows) // LOOKED_AT) or 1]
