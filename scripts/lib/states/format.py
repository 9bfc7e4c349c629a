"""One shard of hidden states: many rows end to end, no padding, in one safetensors file.

Shapes: T tokens, R rows, H hidden size, F positions with a teacher, S loss spans, all over the whole shard.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.lib.engines.protocol import RowStates
from scripts.lib.ground.files import whole_file
from scripts.lib.states.encoded import States, decoded, encoded
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


@dataclass(frozen=True)
class HiddenShard:
    """The content of one shard; positions are token positions in the shard.

    `input_ids` i32 [T], `row_offsets` i64 [R + 1], `aux` bf16 [T, 3, H] at the three boundaries, `final` bf16 [F, H] after the last
    norm (both still encoded in a shard that was read, if it is stored so: `decoded` gives the tensor), `final_index` i64 [F]
    ascending, `argmax` i32 [F] of `lm_head(final)` in the forward's dtype, `loss_spans` i64 [S, 2] half-open, `ids` of the R rows.
    """

    input_ids: torch.Tensor
    row_offsets: torch.Tensor
    aux: States
    final: States
    final_index: torch.Tensor
    argmax: torch.Tensor
    loss_spans: torch.Tensor
    ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """T, tokens of all rows."""
        return len(self.input_ids)


def write_shard(path: Path, shard: HiddenShard, storing: Storing = PLAIN) -> None:
    """Write `shard` to `path`, whole or not at all. The header has one entry, `ids`: several come in a random order."""
    tensors = {name: getattr(shard, name).contiguous() for name in TENSORS if name not in STATES}
    tensors |= encoded("aux", decoded(shard.aux), shard.row_offsets.tolist(), storing)
    tensors |= encoded("final", decoded(shard.final), final_borders(shard.row_offsets, shard.final_index), storing)
    try:
        write_tensors(path, tensors, {"ids": json.dumps(shard.ids, ensure_ascii=False)})
    except OSError as error:
        error.filename = str(path)  # a failed write does not say where
        raise


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all. `safetensors.torch.save_file` gives the same bytes, and no OSError for a full disk."""
    names = sorted(tensors, key=lambda name: (-DTYPES.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in names:
        tensor, start = tensors[name], place
        place += tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, place]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].contiguous().view(torch.uint8).numpy().data)


def final_borders(row_offsets: torch.Tensor, final_index: torch.Tensor) -> list[int]:
    """Where the final states of each row start, and where those of the last one end."""
    return torch.searchsorted(final_index, row_offsets).tolist()


def packed(rows: Sequence[TokenRow], states: Sequence[RowStates]) -> HiddenShard:
    """`rows` and their `states` end to end."""
    lengths = torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    starts = offsets[:-1].tolist()
    return HiddenShard(
        input_ids=torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        row_offsets=offsets,
        aux=torch.cat([state.aux for state in states]),
        final=torch.cat([state.final for state in states]),
        final_index=torch.tensor([start + place for start, row in zip(starts, rows, strict=True) for place in row.final_index]),
        argmax=torch.cat([state.argmax for state in states]).to(torch.int32),
        loss_spans=torch.tensor([[start + place for place in span] for start, row in zip(starts, rows, strict=True) for span in row.spans]),
        ids=tuple(row.id for row in rows),
    )
