"""Layer ids of the captured features: one convention inside, one function for each consumer.

Boundary k is the residual stream that enters layer k, which Hugging Face calls `hidden_states[k]` (0 is the embedding).
"""

from collections.abc import Sequence

from scripts.lib.ground.errors import StageError


def default_boundaries(num_layers: int) -> list[int]:
    """The boundaries that engines take when a drafter names none: near the start, the middle, near the end.

    Raises StageError when a target of `num_layers` is too shallow for three distinct ones.
    """
    return checked_boundaries([2, num_layers // 2, num_layers - 3], num_layers)


def checked_boundaries(boundaries: Sequence[int], num_layers: int) -> list[int]:
    """`boundaries` as a list when they are three ascending ids that every engine can capture.

    The embedding (0) is no layer's output and the last layer's output is no layer's input: both are refused.
    Raises StageError otherwise.
    """
    ascending = sorted(set(boundaries)) == list(boundaries)
    if len(boundaries) != 3 or not ascending or not 0 < boundaries[0] <= boundaries[-1] < num_layers:
        raise StageError(
            f"layers {list(boundaries)}: a target of {num_layers} layers needs three ascending boundary ids from 1 to {num_layers - 1}; "
            "set `hidden.layers` to three such ids"
        )
    return list(boundaries)


def to_sglang(boundaries: Sequence[int]) -> list[int]:
    """Ids for SGLang's Llama family: the layer whose output is captured, one below the boundary."""
    return [boundary - 1 for boundary in boundaries]


def from_sglang(outputs: Sequence[int]) -> list[int]:
    """Boundaries of SGLang's ids, the inverse of `to_sglang`."""
    return [output + 1 for output in outputs]


def to_vllm(boundaries: Sequence[int]) -> list[int]:
    """Ids for vLLM: boundaries as they are."""
    return list(boundaries)
