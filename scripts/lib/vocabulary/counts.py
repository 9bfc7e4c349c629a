"""How often the target generated each token, and which tokens are worth a place in the draft vocabulary.

Shapes: V ids of the target, N tokens of one shard, D ids of the drafter.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.ground.errors import StageError


def trained_counts(paths: Sequence[Path], vocabulary_size: int) -> np.ndarray:
    """int64 [V]: how often each target id lies inside a loss span of the token rows in `paths`.

    Raises StageError when a row holds an id that the target does not have.
    """
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for path in paths:
        rows = pl.read_parquet(path, columns=["input_ids", "loss_spans"])
        ids = trained_ids(rows)
        if ids.size and int(ids.max()) >= vocabulary_size:
            raise StageError(
                f"{path}: token id {int(ids.max())} is outside the target's {vocabulary_size} ids; "
                "the rows were encoded for another target, run encode again"
            )
        counts += np.bincount(ids, minlength=vocabulary_size)
    return counts


def trained_ids(rows: pl.DataFrame) -> np.ndarray:
    """int64 [≤N]: the tokens inside the loss spans of `rows`, in order.

    Spans become steps of +1 and -1 along the tokens of all rows, whose running sum is 1 inside and 0 outside.
    """
    lengths = rows["input_ids"].list.len().to_numpy().astype(np.int64)
    starts_of_rows = np.cumsum(lengths) - lengths
    flat = rows["input_ids"].explode().to_numpy()
    spans = rows.select(pl.Series("offset", starts_of_rows), "loss_spans").explode("loss_spans").unnest("loss_spans")
    offsets = spans["offset"].to_numpy()
    steps = np.zeros(len(flat) + 1, dtype=np.int64)
    np.add.at(steps, offsets + spans["start"].to_numpy(), 1)
    np.add.at(steps, offsets + spans["end"].to_numpy(), -1)
    return flat[np.cumsum(steps[:-1]) > 0]


def choose(counts: np.ndarray, size: int, eos_ids: Iterable[int]) -> np.ndarray:
    """int64 [D]: `size` = D target ids, ascending, from `counts` int64 [V]: all `eos_ids`, then the most frequent.

    Ties go to the lower id, so that never seen ids fill up from the lowest. Without the end-of-turn ids a drafter could
    never propose to stop. Raises StageError when D is larger than V or smaller than the number of `eos_ids`.
    """
    forced = np.unique(np.fromiter(eos_ids, dtype=np.int64))
    if size > len(counts):
        raise StageError(f"vocab.size {size} is larger than the target's vocabulary of {len(counts)} ids; lower it to at most that")
    if size < len(forced):
        raise StageError(f"vocab.size {size} is smaller than the target's {len(forced)} end-of-turn ids; raise it")
    ranks = counts.copy()
    ranks[forced] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranks, kind="stable")[:size])


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """Share of the tokens in `counts` int64 [V] that `target_ids` int64 [D] hold."""
    return round(float(counts[target_ids].sum() / counts.sum()), 6)
