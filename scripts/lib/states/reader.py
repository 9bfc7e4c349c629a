"""Reads shards of hidden states without copying them: tensors are views of the mapped file."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from scripts.lib.ground.errors import StageError
from scripts.lib.states.format import TENSORS, HiddenShard

DTYPES = {
    "input_ids": torch.int32,
    "row_offsets": torch.int64,
    "aux": torch.bfloat16,
    "final": torch.bfloat16,
    "final_index": torch.int64,
    "argmax": torch.int32,
    "loss_spans": torch.int64,
}
REMEDY = "delete this file and the manifest.json beside it and run again to rebuild stage hidden"


def read_shard(path: Path) -> HiddenShard:
    """Open the shard at `path`; its bytes are read when they are used.

    Raises StageError that names the file and the remedy when it is cut, not a shard, or its shapes contradict each other.
    """
    try:
        with safe_open(path, framework="pt") as file:
            ids = tuple(json.loads((file.metadata() or {})["ids"]))
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        shard = HiddenShard(**tensors, ids=ids)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StageError(f"{path}: not a readable shard of hidden states ({error}); {REMEDY}") from error
    problem = contradiction(shard)
    if problem:
        raise StageError(f"{path}: {problem}; {REMEDY}")
    return shard


def contradiction(shard: HiddenShard) -> str | None:
    """What in the shapes and offsets of `shard` cannot be true, or None."""
    rows, teachers = len(shard.ids), len(shard.final_index)
    for name, dtype in DTYPES.items():
        if getattr(shard, name).dtype != dtype:
            return f"{name} is {getattr(shard, name).dtype}, not {dtype}"
    if shard.aux.dim() != 3 or shard.aux.shape[:2] != (shard.tokens, 3):
        return f"aux is {list(shard.aux.shape)}, not [{shard.tokens}, 3, H] for {shard.tokens} input_ids"
    if shard.final.shape != (teachers, shard.aux.shape[2]) or shard.argmax.shape != (teachers,):
        return f"final is {list(shard.final.shape)} and argmax {list(shard.argmax.shape)} for {teachers} final_index"
    offsets = [-1, *shard.row_offsets.tolist()]
    if len(offsets) != rows + 2 or offsets[1] != 0 or offsets[-1] != shard.tokens or not ascending(offsets):
        return f"row_offsets do not cut {shard.tokens} tokens into {rows} rows"
    if not ascending([-1, *shard.final_index.tolist(), shard.tokens]):
        return f"final_index does not ascend inside {shard.tokens} tokens"
    return None


def ascending(values: Sequence[int]) -> bool:
    """Whether every value is greater than the one before."""
    return all(before < after for before, after in pairwise(values))


def check_finite(path: Path, shard: HiddenShard) -> None:
    """Read all states of `shard` and raise StageError when one is NaN or infinite."""
    for name in ("aux", "final"):
        states = getattr(shard, name)
        bad = ~torch.isfinite(states).flatten(1).all(1)
        if bad.any():
            raise StageError(f"{path}: {int(bad.sum())} rows of {name} are not finite, first at {int(bad.nonzero()[0])}; {REMEDY}")
