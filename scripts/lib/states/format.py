"""One shard of hidden states: many rows end to end, no padding, in one safetensors file.

Shapes: T tokens, R rows, H hidden size, F positions with a teacher, S loss spans, all over the whole shard.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.lib.engines.protocol import RowStates
from scripts.lib.ground.files import whole_file
from scripts.lib.states.encoded import States, decoded, encoded
from scripts.lib.states.rounded import Rounded
from scripts.lib.states.rows import TokenRow
from scripts.lib.states.storing import Storing

STATES = ("aux", "final")
TENSORS = ("input_ids", "row_offsets", "aux", "final", "final_index", "argmax", "loss_spans")
PLAIN = Storing()
NAMES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
}
DTYPES = tuple(NAMES)  # safetensors puts the last of them first
ALIGNMENT = 8  # of the data in the file
STRETCH = 2**21  # numbers that are put together and encoded at a time: memory for more would be new each time
Parts = Sequence[Tensor]  # of one tensor, end to end


@dataclass(frozen=True)
class HiddenShard:
    """The content of one shard; positions are token positions in the shard.

    `input_ids` i32 [T], `row_offsets` i64 [R + 1], `aux` bf16 [T, 3, H] at the three boundaries, `final` bf16 [F, H] after the last
    norm (both still encoded in a shard that was read, if it is stored so: `decoded` gives the tensor), `final_index` i64 [F]
    ascending, `argmax` i32 [F] of `lm_head(final)` in the forward's dtype, `loss_spans` i64 [S, 2] half-open, `ids` of the R rows.
    """

    input_ids: Tensor
    row_offsets: Tensor
    aux: States
    final: States
    final_index: Tensor
    argmax: Tensor
    loss_spans: Tensor
    ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """T, tokens of all rows."""
        return len(self.input_ids)


def write_shard(path: Path, shard: HiddenShard, storing: Storing = PLAIN) -> str:
    """Write `shard` to `path`, whole or not at all; the sha256 of the file."""
    plain = {name: getattr(shard, name) for name in TENSORS if name not in STATES}
    return write_states(path, plain, {name: [decoded(getattr(shard, name))] for name in STATES}, shard.ids, storing)


def write_rows(
    path: Path, rows: Sequence[TokenRow], states: Sequence[RowStates], storing: Storing = PLAIN, rounded: Sequence[Rounded] = ()
) -> str:
    """The file that `write_shard` of the `packed` ones makes. The `states` are not put together first: they may be gigabytes.

    Of those that are `rounded` already, for fp8 without compression, the bytes are only written.
    """
    plain = tables(rows) | {"argmax": together([state.argmax for state in states]).to(torch.int32)}
    ids = tuple(row.id for row in rows)
    if rounded:
        return write_parts(path, {name: [tensor] for name, tensor in plain.items()} | rounded_parts(rounded), ids)
    return write_states(path, plain, {name: [getattr(state, name) for state in states] for name in STATES}, ids, storing)


def write_states(path: Path, plain: Mapping[str, Tensor], states: Mapping[str, Parts], ids: Sequence[str], storing: Storing) -> str:
    """Write a shard of `plain` tensors and the parts of its `states`, `aux` and `final`; the sha256 of the file."""
    borders = {"aux": plain["row_offsets"].tolist(), "final": final_borders(plain["row_offsets"], plain["final_index"])}
    tensors: dict[str, Parts] = {name: [tensor] for name, tensor in plain.items()}
    for name in STATES:
        tensors |= encoded_parts(name, states[name], borders[name], storing)
    return write_parts(path, tensors, ids)


def write_parts(path: Path, tensors: Mapping[str, Parts], ids: Sequence[str]) -> str:
    """Write the file of a shard; its sha256. The header has one entry, `ids`: several come in a random order."""
    try:
        return write_tensors(path, tensors, {"ids": json.dumps(ids, ensure_ascii=False)})
    except OSError as error:
        error.filename = str(path)  # a failed write does not say where
        raise


def encoded_parts(name: str, parts: Parts, borders: Sequence[int], storing: Storing) -> dict[str, Parts]:
    """The tensors that hold the states `parts`, called `name`. Rows are compressed each with its own frame, all others state by state."""
    if storing == PLAIN:
        return {name: parts}
    if storing.compression != "none":
        return {part: [tensor] for part, tensor in encoded(name, together(parts), borders, storing).items()}
    made: dict[str, list[Tensor]] = {}
    for some in stretches(parts):
        for part, tensor in encoded(name, together(some), [0, sum(map(len, some))], storing).items():
            made.setdefault(part, []).append(tensor)
    return dict(made)


def rounded_parts(rows: Sequence[Rounded]) -> dict[str, Parts]:
    """The tensors that hold the states of `rows` in fp8 without compression."""
    return {"aux": [row.aux for row in rows], "aux.scales": [row.scales for row in rows], "final": [row.final for row in rows]}


def stretches(parts: Parts) -> list[Parts]:
    """Consecutive `parts` of at most `STRETCH` numbers together, one of them empty where all are."""
    most = max(STRETCH // max(parts[0][:1].numel(), 1), 1)
    found: list[list[Tensor]] = [[]]
    filled = 0
    for part in chain.from_iterable(part.split(most) for part in parts):
        if filled + len(part) > most and found[-1]:
            found.append([])
            filled = 0
        found[-1].append(part)
        filled += len(part)
    return list(found)


def together(parts: Parts) -> Tensor:
    """`parts` as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def write_tensors(path: Path, tensors: Mapping[str, Parts], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file, whole or not at all; its sha256.

    `safetensors.torch.save_file` gives the same bytes, and no OSError for a full disk. It is hashed from memory while it is written.
    """
    names = sorted(tensors, key=lambda name: (-DTYPES.index(tensors[name][0].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in names:
        parts, start = tensors[name], place
        place += sum(part.nbytes for part in parts)
        shape = [sum(map(len, parts)), *parts[0].shape[1:]]
        header[name] = {"dtype": NAMES[parts[0].dtype], "shape": shape, "data_offsets": [start, place]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    data: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    data += [part.contiguous().view(torch.uint8).numpy().data for name in names for part in tensors[name] if len(part)]
    with ThreadPoolExecutor(1) as pool, whole_file(path) as file:
        digest = pool.submit(sha256_of, data)
        for stretch in data:
            file.write(stretch)
    return digest.result()


def sha256_of(data: Sequence[bytes | memoryview]) -> str:
    """Hex digest of all `data`, end to end."""
    digest = hashlib.sha256()
    for stretch in data:
        digest.update(stretch)
    return digest.hexdigest()


def final_borders(row_offsets: Tensor, final_index: Tensor) -> list[int]:
    """Where the final states of each row start, and where those of the last one end."""
    return torch.searchsorted(final_index, row_offsets).tolist()


def packed(rows: Sequence[TokenRow], states: Sequence[RowStates]) -> HiddenShard:
    """`rows` and their `states` end to end."""
    return HiddenShard(
        **tables(rows),
        aux=torch.cat([state.aux for state in states]),
        final=torch.cat([state.final for state in states]),
        argmax=together([state.argmax for state in states]).to(torch.int32),
        ids=tuple(row.id for row in rows),
    )


def tables(rows: Sequence[TokenRow]) -> dict[str, Tensor]:
    """What a shard of `rows` holds beside their states: `input_ids`, `row_offsets`, `final_index`, `loss_spans`."""
    offsets = np.cumsum([0, *(len(row.input_ids) for row in rows)])
    starts = offsets[:-1].tolist()
    spans = [(start + first, start + last) for start, row in zip(starts, rows, strict=True) for first, last in row.spans]
    tensors = {
        "input_ids": np.concatenate([row.ids for row in rows]),
        "row_offsets": offsets,
        "final_index": np.concatenate([np.array(row.final_index, np.int64) + start for start, row in zip(starts, rows, strict=True)]),
        "loss_spans": np.array(spans, np.int64).reshape(-1, 2),
    }
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
