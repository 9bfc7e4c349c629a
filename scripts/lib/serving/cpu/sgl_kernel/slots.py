"""Where the keys and values of each token lie: `req_to_token` [requests, pool] holds the slot of every position of a request.

Legend: B requests in the batch, of which `req_pool_indices` [B] are the rows in `req_to_token`.
"""

# ruff: noqa: PLR0913, PLR0917
# The arguments are SGLang's.

import ctypes
from collections.abc import Iterator

import torch


def ranges(req_pool_indices: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> Iterator[tuple[int, int, int, slice]]:
    """Row, first and last position of each request, and where its slots lie in a list of all requests' slots end to end."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=False):
        yield row, first, last, slice(offset, offset + last - first)
        offset += last - first


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the new slots `out_cache_loc` to positions `start_offset` [B] … `end_offset` [B] of each request."""
    for row, first, last, part in ranges(req_pool_indices, start_offset, end_offset):
        req_to_token[row, first:last] = out_cache_loc[part].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots of positions `start_offset` [B] … `end_offset` [B] of each request into `out_cache_loc`."""
    for row, first, last, part in ranges(req_pool_indices, start_offset, end_offset):
        out_cache_loc[part] = req_to_token[row, first:last].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the topk x num_steps draft slots behind each request's `seq_lens` [B] tokens into `out_cache_loc`."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, topk: int, num_steps: int, pool_len: int
) -> torch.Tensor:
    """Slots [B x topk, pool] that each draft branch sees: those of its request's tokens, then its own num_steps."""
    table = torch.zeros((req_pool_indices.shape[0] * topk, pool_len), dtype=req_to_token.dtype)
    for index, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
        for branch in range(topk):
            own = length + branch * num_steps
            table[index * topk + branch, :length] = req_to_token[row, :length]
            table[index * topk + branch, length : length + num_steps] = req_to_token[row, own : own + num_steps]
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copy slots `src_loc` to `tgt_loc` in every buffer: `data_ptrs` are their addresses, `strides` the bytes of one slot.

    All are read before the first is written, as slots may be in both lists.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=False):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=False):
            ctypes.memmove(base + target * stride, row, stride)
