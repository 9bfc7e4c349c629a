"""Forward passes of the decoder under the language model head.

Shapes: B rows, T tokens, H hidden size, L layers.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel


def final_states(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache | None, **arguments: torch.Tensor) -> torch.Tensor:
    """States [B, T, H] after the last norm of the new tokens `input_ids` [B, T], which are appended to `cache` if there is one.

    `arguments` are `attention_mask` and `position_ids` where plain causal attention at consecutive positions is not meant.
    """
    named = {} if cache is None else {cache_argument(model.model): cache}
    return model.model(input_ids=input_ids, use_cache=cache is not None, **named, **arguments).last_hidden_state


@contextmanager
def tapped(model: PreTrainedModel, boundaries: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect, by boundary id k in [0, L], the residual stream [B, T, H] that enters layer k in this thread's forward passes inside.

    For k < L that is HF `hidden_states[k]`; k = L is the stream before the last norm, where HF shows it after.
    """
    entries = [*model.model.layers, model.model.norm]
    taps: dict[int, torch.Tensor] = {}
    own = threading.get_ident()

    def keeper(boundary: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if threading.get_ident() == own:
                taps[boundary] = inputs[0]

        return keep

    handles = [entries[boundary].register_forward_pre_hook(keeper(boundary)) for boundary in boundaries]
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def cache_argument(decoder: torch.nn.Module) -> str:
    """The name under which a decoder takes its cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
