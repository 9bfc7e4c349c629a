"""Packed batches of one fixed size, whose tensors have the same shapes whatever rows they hold: what compiled kernels want.

Shapes: N positions and Q slots of a batch, both filled up to a multiple of a block; H hidden size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from scripts.lib.states.encoded import States, decoded
from scripts.lib.training.batches import TrainingRow, offsets

Each = Callable[[Callable[[States], Tensor], Iterable[States]], Iterable[Tensor]]
BLOCK = 128  # side of the blocks in which attention masks are kept


@dataclass(frozen=True)
class Capacity:
    """How many positions N and slots Q a packed batch has room for, multiples of `BLOCK`."""

    positions: int
    slots: int

    @classmethod
    def of(cls, *runs: Sequence[TrainingRow]) -> "Capacity":
        """The smallest that holds each of `runs`."""
        positions = max(sum(len(row.aux) for row in rows) for rows in runs)
        slots = max(sum(len(row.slots) for row in rows) for rows in runs)
        return cls(-(-positions // BLOCK) * BLOCK, -(-slots // BLOCK) * BLOCK)


@dataclass(frozen=True)
class PackedBatch:
    """Whole rows end to end, then filler. Filler slots repeat the last real one and have nothing `remaining`.

    Slot q is trained at step s iff s < remaining[q]; it then takes the token behind slot q + s and its teacher stands there.
    """

    ids: tuple[str, ...]
    trained: int  # slots that are no filler
    aux: Tensor  # [N, 3, H]
    next_tokens: Tensor  # i64[N]
    positions: Tensor  # i64[N], within the row
    slots: Tensor  # i64[Q], indices into the N positions
    starts: Tensor  # i64[Q], where the slot's row starts
    remaining: Tensor  # i64[Q]
    final: Tensor  # [Q, H]
    argmax: Tensor  # i64[Q]

    def to(self, device: str) -> "PackedBatch":
        """The same on `device`; from pinned memory the copy does not wait."""
        moved: dict[str, Any] = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def collate_packed(
    rows: Sequence[TrainingRow], capacity: Capacity, dtype: torch.dtype, pinned: bool = False, each: Each = map
) -> PackedBatch:
    """Put `rows` end to end into a batch of `capacity` on the CPU, states in `dtype`, in page-locked memory if `pinned`.

    `each` decodes the rows' states, like `map`; that of a pool does so in several threads.
    """
    lengths, counts = [len(row.aux) for row in rows], [len(row.slots) for row in rows]
    row_starts = offsets(lengths)
    trained, size = sum(counts), rows[0].aux.shape[2]

    def filled(parts: Sequence[Tensor], shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """`parts` end to end in memory of `shape`; zeros behind them."""
        whole = torch.empty(shape, dtype=kind, pin_memory=pinned)
        used = sum(len(part) for part in parts)
        place = 0
        for part in parts:
            whole[place : place + len(part)].copy_(part)
            place += len(part)
        whole[used:] = 0
        return whole

    slots = filled([row.slots + start for row, start in zip(rows, row_starts, strict=False)], (capacity.slots,), torch.int64)
    starts = filled([torch.full((count,), start) for count, start in zip(counts, row_starts, strict=False)], (capacity.slots,), torch.int64)
    slots[trained:], starts[trained:] = slots[trained - 1], starts[trained - 1]
    return PackedBatch(
        ids=tuple(row.id for row in rows),
        trained=trained,
        aux=filled(list(each(decoded, [row.aux for row in rows])), (capacity.positions, 3, size), dtype),
        next_tokens=filled([row.tokens[1:] for row in rows], (capacity.positions,), torch.int64),
        positions=filled([torch.arange(length) for length in lengths], (capacity.positions,), torch.int64),
        slots=slots,
        starts=starts,
        remaining=filled([row.remaining for row in rows], (capacity.slots,), torch.int64),
        final=filled(list(each(decoded, [row.final for row in rows])), (capacity.slots, size), dtype),
        argmax=filled([row.argmax for row in rows], (capacity.slots,), torch.int64),
    )
