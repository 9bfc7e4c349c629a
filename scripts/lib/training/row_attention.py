"""Attention of packed rows: the first keys up to the own position within the row, then the own later keys.

Both parts are softmaxes over different keys of the same query; their log-sum-exps join them into one.
Shapes: N positions and Q slots of a batch, A attention heads, G key/value heads, E head size, R = A / G.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from scripts.lib.training.packed import BLOCK, PackedBatch


class FirstKeys(Protocol):
    """Attention to the keys of step 0."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output [Q, A, E] and log-sum-exp f32[Q, A] of `queries` [Q, A, E] over `keys` and `values` [N, G, E]."""
        ...


def dense_first_keys(batch: PackedBatch) -> FirstKeys:
    """With the whole score matrix in memory: plain, for any device, and what the block kernel is checked against."""
    index = torch.arange(len(batch.positions), device=batch.slots.device)
    seen = (index >= batch.starts[:, None]) & (index <= batch.slots[:, None])

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        groups, size = keys.shape[1:]
        grouped = queries.unflatten(1, (groups, -1)).float()
        scores = torch.einsum("qgre,nge->qgrn", grouped, keys.float()) * size**-0.5
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        output = torch.einsum("qgrn,nge->qgre", scores.softmax(-1), values.float())
        return output.flatten(1, 2).to(queries.dtype), scores.logsumexp(-1).flatten(1)

    return attend


def block_first_keys(batch: PackedBatch, kernel: Callable[..., Any] = flex_attention) -> FirstKeys:
    """With a block mask that skips what no query of a block sees; `kernel` is FlexAttention, compiled on CUDA."""
    mask = block_mask(batch)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        output, extra = kernel(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            block_mask=mask,
            enable_gqa=queries.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return output[0].transpose(0, 1), extra.lse[0].transpose(0, 1)

    return attend


def block_mask(batch: PackedBatch) -> BlockMask:
    """Which blocks of keys each block of slots sees, from the slots' ranges alone: no [Q, N] matrix is built."""
    starts, slots = batch.starts, batch.slots
    firsts, lasts = starts.view(-1, BLOCK), slots.view(-1, BLOCK)
    blocks = torch.arange(len(batch.positions) // BLOCK, device=slots.device)
    touched = (blocks >= firsts.amin(1, keepdim=True) // BLOCK) & (blocks <= lasts.amax(1, keepdim=True) // BLOCK)
    full = (blocks * BLOCK >= firsts.amax(1, keepdim=True)) & ((blocks + 1) * BLOCK - 1 <= lasts.amin(1, keepdim=True))

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= starts[query]) & (key <= slots[query])

    # Slots are listed for the keys too: `from_kv_blocks` would do that by a `vmap` that takes the host as long as a small batch's products
    # take the GPU.
    part = touched & ~full
    partial, whole, partial_slots, whole_slots = (listed(blocks) for blocks in (part, full, part.t(), full.t()))
    lengths = (len(slots), len(batch.positions))
    return BlockMask(lengths, *partial, *whole, *partial_slots, *whole_slots, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)


def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts i32[1, 1, B] and indices i32[1, 1, B, C] of the blocks `chosen` bool[B, C] in each row, chosen ones first.

    Kernels read them as one piece of memory; sorting keeps the layout of a transposed `chosen`.
    """
    order = chosen.contiguous().int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1).int()[None, None], order.int()[None, None]


def join(queries: Tensor, output: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """`output` [Q, A, E] over the first keys, whose log-sum-exp is `lse` [Q, A], widened to the slots' own `keys` and `values`.

    One own key and value [Q, G, E] for each step since the first.
    """
    groups, size = keys[0].shape[1:]
    grouped = queries.unflatten(1, (groups, -1)).float()
    scores = torch.stack([(grouped * key.float()[:, :, None]).sum(-1) for key in keys]) * size**-0.5
    first = lse.unflatten(1, (groups, -1))
    total = torch.logsumexp(torch.cat([first[None], scores]), 0)
    joined = output.unflatten(1, (groups, -1)).float() * (first - total).exp()[..., None]
    for score, value in zip(scores, values, strict=True):
        joined = joined + (score - total).exp()[..., None] * value.float()[:, :, None]
    return joined.flatten(1, 2).to(queries.dtype)
