"""Attention over the cache of keys and values, with PyTorch's own scaled dot product.

Legend: T new tokens, B requests, H query heads over K key/value heads of size D, L tokens of the longest request. Buffers are
[slots, K, D]; `req_to_token` [requests, pool] holds the slot of every position of a request.
"""

# ruff: noqa: PLR0913, PLR0917
# The arguments are SGLang's.

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_attention_cpu(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    o: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Any = None,
    sinks: Any = None,
) -> None:
    """One new token a request: store its `k` and `v` [B, K, D] at slots `loc` [B], then write attention of `q` [B, H, D] to `o`."""
    assert not logit_cap and sinks is None and not is_cross_attn
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    batch, heads, size = q.shape
    places = torch.arange(int(seq_lens.max()))[None]
    seen = places < seq_lens[:, None]  # [B, L]
    if sliding_window_size > 0:
        seen &= places >= seq_lens[:, None] - sliding_window_size
    slots = req_to_token[req_pool_indices, : places.shape[1]].to(torch.int64).masked_fill(~seen, 0)
    keys, values = k_buffer[slots].transpose(1, 2), v_buffer[slots].transpose(1, 2)  # [B, K, L, D]
    shared = keys.shape[1]
    # The query heads of one key head become its rows: no key is repeated.
    queries = q.view(batch, shared, heads // shared, size)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None, None], scale=sm_scale)
    o.copy_(out.reshape(batch, heads, -1))


def extend_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Any = None,
    sinks: Any = None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Several new tokens a request, whose keys are in the buffers already: write attention of `q` [T, H, D] to `o`.

    Each request's tokens see all before them, and of themselves the earlier ones or, with `tree_mask`, their ancestors in a draft tree.
    """
    assert not logit_cap and sinks is None and not is_cross_attn
    used = 0
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=False)
    for row, length, new, start in requests:
        seen = torch.ones((new, length), dtype=torch.bool)
        if tree_mask is not None:
            seen[:, length - new :] = tree_mask.view(-1)[used : used + new * new].view(new, new).bool()
            used += new * new
        elif is_causal:
            seen[:, length - new :] = torch.ones((new, new), dtype=torch.bool).tril()
        if sliding_window_size > 0:
            seen &= torch.arange(length)[None] > torch.arange(length - new, length)[:, None] - sliding_window_size
        slots = req_to_token[row, :length].to(torch.int64)
        keys, values = k_buffer[slots].transpose(0, 1), v_buffer[slots].transpose(0, 1)  # [K, L, D]
        queries = q[start : start + new].transpose(0, 1)  # [H, new, D]
        repeats = queries.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
        out = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=seen, scale=sm_scale)[0]
        o[start : start + new] = out.transpose(0, 1)
