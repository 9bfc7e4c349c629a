"""Stands in for SGLang's compiled CPU kernels (`sgl_kernel`), of which the package index has no build: plain PyTorch, any processor.

Enough for dense decoders of the Llama kind served plainly, and for EAGLE, EAGLE3, STANDALONE and NGRAM (which needs a C++ compiler) with
greedy verification, on SGLang 0.5.23.
Names and arguments are those that SGLang calls with SGLANG_USE_CPU_ENGINE=1; what they do follows the Triton kernels that SGLang ships for
GPUs (`sglang/kernels/ops/speculative`). A kernel that is not here raises when it is called.
"""

from typing import Any

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.tree import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+standin"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang calls these two as operators.
vars(torch.ops.sgl_kernel).update(decode_attention_cpu=decode_attention_cpu, extend_attention_cpu=extend_attention_cpu)


def __getattr__(name: str) -> Any:
    """Importable, so that SGLang's modules load; calling it says what is missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the CPU stand-in of SGLang's kernels has no {name}: serve this model on a GPU")

    return missing
