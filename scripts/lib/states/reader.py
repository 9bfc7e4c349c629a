"""Reads shards of hidden states without copying them: tensors are views of the mapped file, encoded states are decoded when used."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scripts.lib.ground.errors import StageError
from scripts.lib.states.encoded import EncodedStates, Encoding, States, factored
from scripts.lib.states.finite import finite
from scripts.lib.states.format import STATES, TENSORS, HiddenShard, final_borders

DTYPES = {
    "input_ids": torch.int32,
    "row_offsets": torch.int64,
    "aux": torch.bfloat16,
    "final": torch.bfloat16,
    "final_index": torch.int64,
    "argmax": torch.int32,
    "loss_spans": torch.int64,
}
ENCODINGS = ({"values", "scales"}, {"scales", "frames"}, {"fractions", "frames"}, {"steps", "lowest", "frames"})
REMEDY = "delete this file and the manifest.json beside it and run again to rebuild stage hidden"


def read_shard(path: Path) -> HiddenShard:
    """Open the shard at `path`; its bytes are read when they are used.

    Raises StageError that names the file and the remedy when it is cut, not a shard, or its shapes contradict each other.
    """
    try:
        with safe_open(path, framework="pt") as file:
            ids = tuple(json.loads((file.metadata() or {})["ids"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shard = opened(tensors, ids)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StageError(f"{path}: not a readable shard of hidden states ({error}); {REMEDY}") from error
    problem = contradiction(shard)
    if problem:
        raise StageError(f"{path}: {problem}; {REMEDY}")
    return shard


def opened(tensors: Mapping[str, Tensor], ids: tuple[str, ...]) -> HiddenShard:
    """The shard made of the `tensors` of a file. Raises KeyError without one of them, ValueError for parts that do not fit together."""
    plain = {name: tensors[name] for name in TENSORS if name not in STATES}
    offsets, places = plain["row_offsets"], plain["final_index"]
    aux = states_of("aux", tensors, offsets.tolist())
    return HiddenShard(**plain, aux=aux, final=states_of("final", tensors, final_borders(offsets, places)), ids=ids)


def states_of(name: str, tensors: Mapping[str, Tensor], borders: list[int]) -> States:
    """The states called `name`: the tensor itself, or how to decode its parts, which `encoded` made."""
    parts = {part: tensors.get(f"{name}.{part}") for part in ("scales", "fractions", "steps", "lowest", "frames")}
    present = {part for part, tensor in parts.items() if tensor is not None} | ({"values"} if name in tensors else set())
    if present == {"values"}:
        return tensors[name]
    if present not in ENCODINGS:
        raise ValueError(f"{name} is made of {sorted(present) or 'nothing'}, which is no way to store states")
    shape = shape_of(name, tensors)
    frames = parts["frames"]
    offsets = [] if frames is None else tensors[f"{name}.offsets"].tolist()
    if frames is not None and (len(offsets) != len(borders) or offsets[-1] != len(frames) or sorted(offsets) != offsets):
        raise ValueError(f"{name}.offsets do not cut {len(frames)} bytes into {len(borders) - 1} rows")
    for part, dimensions in (("scales", 2), ("steps", 1)):
        factors = parts[part]
        if factors is not None and factors.shape != shape[:dimensions]:
            raise ValueError(f"{name}.{part} are {list(factors.shape)} for states {list(shape)}")
    return EncodedStates(Encoding(shape, borders, tensors.get(name), **parts, offsets=offsets), 0, shape[0])


def shape_of(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape of the states called `name`, as one of their parts tells it. Raises KeyError when none does."""
    if f"{name}.shape" in tensors:
        return tuple(tensors[f"{name}.shape"].tolist())
    if f"{name}.lowest" in tensors:
        count, pairs = tensors[f"{name}.lowest"].shape
        return count, 2 * pairs
    return tuple(tensors[name if name in tensors else f"{name}.fractions"].shape)


def contradiction(shard: HiddenShard) -> str | None:
    """What in the shapes and offsets of `shard` cannot be true, or None."""
    rows, teachers = len(shard.ids), len(shard.final_index)
    for name, dtype in DTYPES.items():
        tensor = getattr(shard, name)
        if isinstance(tensor, Tensor) and tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
    if len(shard.aux.shape) != 3 or shard.aux.shape[:2] != (shard.tokens, 3):
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
    """Read all states of `shard`, a row at a time, and raise StageError when one is NaN or infinite."""
    for name, states, borders in each_states(shard):
        bad = torch.cat([~finite(factored(states[start:end])) for start, end in pairwise(borders)])
        if bad.any():
            raise StageError(f"{path}: {int(bad.sum())} rows of {name} are not finite, first at {int(bad.nonzero()[0])}; {REMEDY}")


def each_states(shard: HiddenShard) -> Iterator[tuple[str, States, list[int]]]:
    """Name, states and the borders of the rows in them, of the aux and the final states."""
    yield "aux", shard.aux, shard.row_offsets.tolist()
    yield "final", shard.final, final_borders(shard.row_offsets, shard.final_index)
