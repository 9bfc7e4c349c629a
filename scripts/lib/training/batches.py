"""Rows as training sees them, and batches of whole rows end to end.

Shapes: T tokens of a row, S its trained slots; N positions and Q slots of a batch; H hidden size.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.lib.states.encoded import States, decoded


@dataclass(frozen=True)
class TrainingRow:
    """One row cut behind its last trained slot; tensors may be views of a mapped file, states may still be encoded (`decoded`).

    Slot t takes the states of token t and the token t+1 and predicts token t+2 (`docs/design.md`, section 4).
    """

    id: str
    tokens: Tensor  # i32[T + 1], one more than there are positions: the last slot takes the next token
    aux: States  # bf16[T, 3, H]
    slots: Tensor  # i64[S], ascending positions trained at step 0
    remaining: Tensor  # i64[S], slots from here to the end of the slot's own span, itself included
    final: States  # bf16[S, H], the target's state at slot + 1, which is the teacher
    argmax: Tensor  # i32[S], the target's choice for the token that the slot predicts


@dataclass(frozen=True)
class Batch:
    """Whole rows end to end. A slot q is trained at step s iff s < remaining[q]; its teacher then stands at q + s."""

    ids: tuple[str, ...]
    aux: Tensor  # [N, 3, H]
    next_tokens: Tensor  # i64[N], the token behind each position
    positions: Tensor  # i64[N], within the row
    slots: Tensor  # i64[Q], indices into the N positions
    remaining: Tensor  # i64[Q]
    row_starts: tuple[int, ...]  # into the N positions, one more than there are rows
    slot_starts: tuple[int, ...]  # into the Q slots, one more than there are rows
    final: Tensor  # [Q, H]
    argmax: Tensor  # i64[Q]


def collate(rows: Sequence[TrainingRow], dtype: torch.dtype, device: str) -> Batch:
    """Put `rows` end to end on `device`; states become `dtype` there."""
    lengths, counts = [len(row.aux) for row in rows], [len(row.slots) for row in rows]
    starts, slot_starts = offsets(lengths), offsets(counts)

    def joined(tensors: list[Tensor], kind: torch.dtype) -> Tensor:
        return torch.cat(tensors).to(device).to(kind)

    return Batch(
        ids=tuple(row.id for row in rows),
        aux=joined([decoded(row.aux) for row in rows], dtype),
        next_tokens=joined([row.tokens[1:] for row in rows], torch.int64),
        positions=joined([torch.arange(length) for length in lengths], torch.int64),
        slots=joined([row.slots + start for row, start in zip(rows, starts, strict=False)], torch.int64),
        remaining=joined([row.remaining for row in rows], torch.int64),
        row_starts=starts,
        slot_starts=slot_starts,
        final=joined([decoded(row.final) for row in rows], dtype),
        argmax=joined([row.argmax for row in rows], torch.int64),
    )


def everywhere(batch: Batch) -> Batch:
    """`batch` with a slot at each of its N positions, for what attention asks of slots."""
    return replace(batch, slots=torch.arange(len(batch.positions), device=batch.positions.device), slot_starts=batch.row_starts)


def offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each of things of these `lengths`, end to end, starts, and where the last one ends."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return tuple(sums)


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` rows in `epoch`: a function of `seed` and `epoch` alone, so that a resumed run needs no state."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def shard_order(shards: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The order in `epoch` of the shards in which rows are; `shards` names that of each row."""
    order = sorted(set(shards))
    random.Random(f"{seed}/{epoch}/shards").shuffle(order)
    return order


def order_by_shard(shards: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The order in `epoch` of rows, whose `shards` are given: a shard after the other, the rows of each shuffled."""
    rows: dict[int, list[int]] = {}
    for row, shard in enumerate(shards):
        rows.setdefault(shard, []).append(row)
    for shard, own in rows.items():
        random.Random(f"{seed}/{epoch}/{shard}").shuffle(own)
    return [row for shard in shard_order(shards, seed, epoch) for row in rows[shard]]
