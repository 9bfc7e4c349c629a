"""Which weights an engine's `LlamaForCausalLMEagle3` has for a `config.json`, by the names that we use, and their shapes."""

from collections.abc import Mapping
from typing import Any

EMBEDDING, HEAD, FUSION = "embed_tokens.weight", "lm_head.weight", "fc.weight"
# Weights that an engine reads only if config.json says so.
SWITCHED = {"fc_norm.0.weight": "fc_norm", "input_norm.weight": "norm_before_fc", "fc.bias": "bias"}
# Of a decoder layer. Behind the first one SGLang has an `input_layernorm` that it does not use.
PARTS = (
    *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def layer_count(config: Mapping[str, Any]) -> int:
    """How many decoder layers an engine makes; 0 where `config` does not say."""
    count = config.get("num_hidden_layers")
    return count if isinstance(count, int) else 0


def layer_shapes(config: Mapping[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of the decoder layer `prefix`, whose projections see inputs `width` wide."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    return {
        f"{prefix}.hidden_norm.weight": (size,),
        f"{prefix}.post_attention_layernorm.weight": (size,),
        f"{prefix}.self_attn.q_proj.weight": (queries, width),
        f"{prefix}.self_attn.k_proj.weight": (keys, width),
        f"{prefix}.self_attn.v_proj.weight": (keys, width),
        f"{prefix}.self_attn.o_proj.weight": (size, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, size),
        f"{prefix}.mlp.up_proj.weight": (inner, size),
        f"{prefix}.mlp.down_proj.weight": (size, inner),
    }


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that an engine fills, from the sizes in `config`."""
    size = config["hidden_size"]
    states = config.get("num_aux_hidden_states") or len(
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    entering = config.get("target_hidden_size", size)
    first, *further = layer_names(config)
    shapes = {"norm.weight": (size,), f"{first}.input_layernorm.weight": (size,), **layer_shapes(config, first, 2 * size)}
    for layer in further:
        shapes |= layer_shapes(config, layer, size)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{number}.weight": (entering,) for number in range(states)}
    if config.get("norm_before_fc") or (config.get("eagle_config") or {}).get("norm_before_fc"):
        shapes["input_norm.weight"] = (states * entering,)
    if config.get("bias"):
        shapes["fc.bias"] = (size,)
    if entering != size:
        shapes[EMBEDDING] = (config["vocab_size"], size)
    return shapes | {FUSION: (size, states * entering)}


def layer_names(config: Mapping[str, Any]) -> list[str]:
    """The decoder layers that `config` asks for."""
    return ["midlayer", *(f"layers.{number}" for number in range(1, layer_count(config)))]


def known_names(config: Mapping[str, Any]) -> set[str]:
    """Every name that may mean something to an engine."""
    layers = {f"{layer}.{part}.weight" for layer in layer_names(config) for part in PARTS}
    return {*SWITCHED, EMBEDDING, HEAD, FUSION, "norm.weight", "fc_norm.1.weight", "fc_norm.2.weight"} | layers
