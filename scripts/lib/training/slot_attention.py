"""Attention of slots to their row's first keys up to the own position, and to the own later keys; for a CPU.

With own keys, query heads that share a key stand below each other, so that a row is one matrix product for each key/value
head. Scores are made again in the backward pass: they would be the largest thing to keep.
Shapes: N positions, M active slots, A attention heads, G key/value heads, R = A / G, E head size; m slots and L first keys of
a piece, S own keys of a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.training.batches import Batch

QUERIES = 256  # slots of a piece: bounds the scores in memory, and spares long rows most of the triangle that is not seen


@dataclass(frozen=True)
class Piece:
    """Slots of one row, as a slice of the M active ones, and the first keys that any of them sees, of the N."""

    slots: slice
    keys: slice
    unseen: Tensor  # bool[m, L]


def pieces(batch: Batch, active: Tensor) -> list[Piece]:
    """The pieces of the slots `active` i64[M] of `batch`, in order."""
    borders = torch.searchsorted(active, torch.tensor(batch.slot_starts, device=active.device)).tolist()
    places = batch.slots[active]
    found = []
    for row, (start, end) in enumerate(pairwise(borders)):
        for first in range(start, end, QUERIES):
            slots = slice(first, min(first + QUERIES, end))
            seen = places[slots]
            keys = slice(batch.row_starts[row], int(seen[-1]) + 1)
            index = torch.arange(keys.start, keys.stop, device=active.device)
            found.append(Piece(slots, keys, index > seen[:, None]))
    return found


def attend(parts: Sequence[Piece], queries: Tensor, first: tuple[Tensor, Tensor], own: tuple[Sequence[Tensor], Sequence[Tensor]]) -> Tensor:
    """[M, A, E] of `queries` [M, A, E]; `first` are keys and values [N, G, E], `own` S keys and S values, all [M, G, E]."""
    return SlotAttention.apply(parts, queries, *first, *own[0], *own[1]) if own[0] else attend_first(parts, queries, *first)


def attend_first(parts: Sequence[Piece], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention to first keys alone, for which torch has a kernel."""
    outputs = []
    for part in parts:
        output = functional.scaled_dot_product_attention(
            queries[part.slots].transpose(0, 1)[None],
            keys[part.keys].transpose(0, 1)[None],
            values[part.keys].transpose(0, 1)[None],
            ~part.unseen,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


class SlotAttention(torch.autograd.Function):
    """Softmax over first and own keys together."""

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Piece], queries: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        """[M, A, E] from `queries` [M, A, E], `keys` and `values` [N, G, E]; `own` are S keys and then S values, all [M, G, E]."""
        ctx.parts = parts
        ctx.save_for_backward(queries, keys, values, *own)
        output = torch.empty_like(queries)
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        for part in parts:
            _, shares = weights(part, queries, keys, own_keys)
            length = shares.shape[-1] - len(own_keys)
            found = shares[..., :length].to(values.dtype) @ values[part.keys].transpose(0, 1)
            for share, value in zip(shares[..., length:].unbind(-1), own_values, strict=True):
                found += share[..., None].to(values.dtype) * repeated(value[part.slots], queries)
            output[part.slots] = ungrouped(found, queries)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To queries, keys, values and own ones."""
        queries, keys, values, *own = ctx.saved_tensors
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        to_queries, to_keys, to_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        to_own_keys, to_own_values = ([torch.empty_like(one) for one in ones] for ones in (own_keys, own_values))
        scale, kind = queries.shape[-1] ** -0.5, queries.dtype
        for part in ctx.parts:
            asked, shares = weights(part, queries, keys, own_keys)
            length = shares.shape[-1] - len(own_keys)
            given = grouped(grad[part.slots], keys)
            to_values[part.keys] += (shares[..., :length].to(kind).mT @ given).transpose(0, 1)
            slopes = (given @ values[part.keys].permute(1, 2, 0)).float()
            if own:
                owned = [(given * repeated(value[part.slots], queries)).sum(-1).float() for value in own_values]
                slopes = torch.cat([slopes, torch.stack(owned, -1)], -1)
            slopes = torch.ops.aten._softmax_backward_data(slopes, shares, -1, torch.float32).mul_(scale).to(kind)
            found = slopes[..., :length] @ keys[part.keys].transpose(0, 1)
            to_keys[part.keys] += (slopes[..., :length].mT @ asked).transpose(0, 1)
            for step, (key, key_grad, value_grad) in enumerate(zip(own_keys, to_own_keys, to_own_values, strict=True)):
                slope, share = slopes[..., length + step, None], shares[..., length + step, None].to(kind)
                found += slope * repeated(key[part.slots], queries)
                key_grad[part.slots] = summed(slope * asked, queries)
                value_grad[part.slots] = summed(share * given, queries)
            to_queries[part.slots] = ungrouped(found, queries)
        return None, to_queries, to_keys, to_values, *to_own_keys, *to_own_values


def weights(part: Piece, queries: Tensor, keys: Tensor, own_keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The queries of `part` [G, R m, E], and what share each gives to its first and own keys, f32[G, R m, L + S]."""
    asked = grouped(queries[part.slots], keys)
    scores = (asked @ keys[part.keys].permute(1, 2, 0)).float()
    scores.unflatten(1, (-1, len(part.unseen))).masked_fill_(part.unseen, float("-inf"))
    if own_keys:
        own = [(asked * repeated(key[part.slots], queries)).sum(-1).float() for key in own_keys]
        scores = torch.cat([scores, torch.stack(own, -1)], -1)
    return asked, torch.softmax(scores.mul_(queries.shape[-1] ** -0.5), -1)


def grouped(heads: Tensor, keys: Tensor) -> Tensor:
    """[G, R m, E] from `heads` [m, A, E]."""
    return heads.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def ungrouped(heads: Tensor, queries: Tensor) -> Tensor:
    """[m, A, E] from `heads` [G, R m, E]."""
    return heads.unflatten(1, (queries.shape[1] // len(heads), -1)).permute(2, 0, 1, 3).flatten(1, 2)


def repeated(own: Tensor, queries: Tensor) -> Tensor:
    """[G, R m, E] from `own` [m, G, E], the same for all R."""
    return own.transpose(0, 1).repeat(1, queries.shape[1] // own.shape[1], 1)


def summed(heads: Tensor, queries: Tensor) -> Tensor:
    """[m, G, E] from `heads` [G, R m, E], the R added up."""
    return heads.unflatten(1, (queries.shape[1] // len(heads), -1)).sum(1).transpose(0, 1)
