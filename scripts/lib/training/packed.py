"""Packed batches of one fixed size, whose tensors have the same shapes whatever rows they hold: what compiled kernels want.

Shapes: N positions and Q slots of a batch, both filled up to a multiple of a block; H hidden size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.lib.states.encoded import Factored, States, as_bits, decoded, factored
from scripts.lib.training.batches import TrainingRow, offsets

Each = Callable[[Callable[[States], Any], Iterable[States]], Iterable[Any]]
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

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: str) -> "PackedBatch":
        """The same on `device`; from pinned memory the copy does not wait."""
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()}
        return replace(self, **moved)


@dataclass(frozen=True)
class FactoredBatch:
    """A batch in page-locked memory that is decoded where it is going: numbers stand in place of states, with the `factors` of some.

    `factors` f32, called `aux` [N, 3] and `final` [Q]; states whose encoding has none are there as they are. `dtype` is what they become.
    """

    batch: PackedBatch
    factors: Mapping[str, Tensor]
    dtype: torch.dtype

    def to(self, device: str) -> PackedBatch:
        """The batch on `device`; from pinned memory the copy does not wait."""
        moved = self.batch.to(device)
        factors = {name: factor.to(device, non_blocking=True) for name, factor in self.factors.items()}
        aux, final = (Factored(numbers, factors.get(name)).product() for name, numbers in (("aux", moved.aux), ("final", moved.final)))
        return replace(moved, aux=aux.to(self.dtype), final=final.to(self.dtype))


def collate_packed(rows: Sequence[TrainingRow], capacity: Capacity, dtype: torch.dtype, each: Each = map) -> PackedBatch:
    """Put `rows` end to end into a batch of `capacity` on the CPU, states in `dtype`.

    `each` decodes the rows' states, like `map`; that of a pool does so in several threads.
    """
    size = rows[0].aux.shape[2]
    aux = filled(list(each(decoded, [row.aux for row in rows])), (capacity.positions, 3, size), dtype)
    final = filled(list(each(decoded, [row.final for row in rows])), (capacity.slots, size), dtype)
    return without_states(rows, capacity, aux, final)


def collate_factored(
    rows: Sequence[TrainingRow], capacity: Capacity, dtype: torch.dtype, each: Each = map, pinned: bool = True
) -> FactoredBatch:
    """The same for another device, which does the products; in page-locked memory if `pinned`. `each` unpacks compressed rows."""
    numbers: dict[str, Tensor] = {}
    factors: dict[str, Tensor] = {}
    for name, count in (("aux", capacity.positions), ("final", capacity.slots)):
        parts = list(each(factored, [getattr(row, name) for row in rows]))
        kind = parts[0].numbers.dtype
        bits = [as_bits(part.numbers) for part in parts]
        numbers[name] = filled(bits, (count, *bits[0].shape[1:]), bits[0].dtype, pinned).view(kind)
        found = [part.factors for part in parts if part.factors is not None]
        if found:
            factors[name] = filled(found, (count, *found[0].shape[1:]), torch.float32, pinned)
    return FactoredBatch(without_states(rows, capacity, numbers["aux"], numbers["final"], pinned), factors, dtype)


def without_states(rows: Sequence[TrainingRow], capacity: Capacity, aux: Tensor, final: Tensor, pinned: bool = False) -> PackedBatch:
    """The batch of `rows` around the states `aux` and `final`, which are made already."""
    lengths, counts = [len(row.aux) for row in rows], [len(row.slots) for row in rows]
    row_starts, trained = offsets(lengths), sum(counts)

    def joined(parts: Sequence[Tensor], count: int) -> Tensor:
        return filled(parts, (count,), torch.int64, pinned)

    slots = joined([row.slots + start for row, start in zip(rows, row_starts, strict=False)], capacity.slots)
    starts = joined([torch.full((count,), start) for count, start in zip(counts, row_starts, strict=False)], capacity.slots)
    slots[trained:], starts[trained:] = slots[trained - 1], starts[trained - 1]
    return PackedBatch(
        ids=tuple(row.id for row in rows),
        trained=trained,
        aux=aux,
        next_tokens=joined([row.tokens[1:] for row in rows], capacity.positions),
        positions=joined([torch.arange(length) for length in lengths], capacity.positions),
        slots=slots,
        starts=starts,
        remaining=joined([row.remaining for row in rows], capacity.slots),
        final=final,
        argmax=joined([row.argmax for row in rows], capacity.slots),
    )


def everywhere(batch: PackedBatch) -> PackedBatch:
    """`batch` with a slot at each of its N positions, for what attention asks of slots; filler sees itself."""
    index = torch.arange(len(batch.positions), device=batch.positions.device)
    return replace(batch, slots=index, starts=index - batch.positions)


def filled(parts: Sequence[Tensor], shape: tuple[int, ...], kind: torch.dtype, pinned: bool = False) -> Tensor:
    """`parts` end to end in memory of `shape`; zeros behind them.

    What needs no conversion is copied by the calling thread alone. Several batches are made at once, and torch would wake a team of
    threads for each.
    """
    whole = torch.empty(shape, dtype=kind, pin_memory=pinned)
    used = sum(len(part) for part in parts)
    place = 0
    for part in parts:
        here = whole[place : place + len(part)]
        if part.dtype == kind:
            bits_of(here)[...] = bits_of(part)
        else:
            here.copy_(part)
        place += len(part)
    whole[used:] = 0
    return whole


def bits_of(tensor: Tensor) -> np.ndarray:
    """The memory of `tensor` as numpy sees it, which knows few kinds of one or two bytes."""
    return (as_bits(tensor) if tensor.element_size() < torch.float32.itemsize else tensor).numpy()
