"""Whether SGLang would serve a drafter, whoever trained it, as it was trained: what an engine passes over in silence is said here.

The rules are those of SGLang's `LlamaForCausalLMEagle3`: unknown tensors are skipped, missing ones stay random, draft ids without
`d2t` are taken for target ids, and the target's embedding replaces the drafter's.
Shapes: H hidden size, D draft vocabulary, V target vocabulary.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from scripts.lib.eagle3.export import ARCHITECTURE
from scripts.lib.eagle3.foreign import engine_name, engine_tensors
from scripts.lib.eagle3.layers import default_boundaries, from_sglang
from scripts.lib.eagle3.model import UNREAD_ROPE_KEYS
from scripts.lib.ground.errors import StageError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TABLES = ("d2t", "t2d")


@dataclass(frozen=True)
class Verdict:
    """What keeps an engine from serving the drafter as it was trained, and what is unusual but harmless."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]


def judge(folder: Path, target: PretrainedConfig | None) -> Verdict:
    """The verdict on the drafter in `folder`, for `target` if it is given. StageError when there is nothing to judge."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise StageError(f"{folder}: no readable config.json ({error}); give a drafter's folder as SGLang loads it") from error
    tensors = engine_tensors(folder)
    checks = [config_faults(config), tensor_faults(config, tensors), vocabulary_faults(config, tensors)]
    if target is not None:
        checks.append(target_faults(config, target))
    return Verdict(tuple(fault for found in checks for fault in found), tuple(notes(folder, config, tensors)))


def config_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Values of `config.json` that make an engine do something else."""
    if config.get("architectures") != [ARCHITECTURE]:
        yield f"architectures is {config.get('architectures')}, must be ['{ARCHITECTURE}']"
    dtype = config.get("torch_dtype", config.get("dtype"))
    if dtype not in ("bfloat16", None):
        yield f"torch_dtype is '{dtype}', the target's states are bfloat16: serve with --dtype bfloat16 or correct it"
    if config.get("tie_word_embeddings", False):
        yield "tie_word_embeddings is true: the head is then the embedding; set it to false"
    if config.get("num_hidden_layers") != 1:
        yield f"num_hidden_layers is {config.get('num_hidden_layers')}, must be 1"
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if top is not None and nested is None:
        yield (
            f"eagle_aux_hidden_state_layer_ids {top} stand at the top level, which SGLang does not read: "
            "write the ids of outputs under eagle_config"
        )
    if "rope_theta" not in config and "rope_theta" not in (config.get("rope_parameters") or {}):
        yield "rope_theta is missing: engines take 10000"


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that an engine fills, from the sizes in `config`."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    states = config.get("num_aux_hidden_states") or len(
        (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    entering = config.get("target_hidden_size", size)
    norms = ["norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name in norms}
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{number}.weight": (entering,) for number in range(states)}
    if entering != size:
        shapes[EMBEDDING] = (config["vocab_size"], size)
    return shapes | {
        "fc.weight": (size, states * entering),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
    }


def tensor_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Weights that are missing, of another shape, or not finite."""
    try:
        shapes = expected_shapes(config)
    except KeyError as error:
        yield f"config.json has no {error}"
        return
    for name, shape in shapes.items():
        if name not in tensors:
            yield f"{name} is missing: it would stay random"
        elif tuple(tensors[name].shape) != shape:
            yield f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        yield f"{sorted(broken)} hold values that are not finite"
    if "fc_norm.0.weight" in tensors and "fc_norm.0.weight" not in shapes:
        yield "fc_norm.0.weight is there, but config.json does not say fc_norm: it would be skipped"


def vocabulary_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """A head and tables that do not belong together."""
    size, whole, head = config.get("draft_vocab_size"), config.get("vocab_size", 0), tensors.get(HEAD)
    if size is None:
        if "d2t" in tensors or head is not None:
            yield "draft_vocab_size is missing: the drafter's head would be replaced by the target's"
        return
    if head is None:
        yield f"{HEAD} is missing: it would stay random"
    elif tuple(head.shape) != (size, config.get("hidden_size")):
        yield f"{HEAD} is {list(head.shape)}, must be [{size}, {config.get('hidden_size')}]"
    if "d2t" not in tensors:
        if size != whole:
            yield "d2t is missing: draft ids would be taken for target ids"
        return
    yield from table_faults(tensors["d2t"], tensors.get("t2d"), size, whole)


def table_faults(d2t: Tensor, t2d: Tensor | None, size: int, whole: int) -> Iterator[str]:
    """What is wrong with the offsets `d2t` [D], by themselves and against the mask `t2d` [V]."""
    if d2t.is_floating_point():
        yield f"d2t is {d2t.dtype}, must be int64"
    elif tuple(d2t.shape) != (size,):
        yield f"d2t has {len(d2t)} entries for a draft vocabulary of {size}"
    else:
        ids = torch.arange(size) + d2t
        offset_wrong = int(ids.max()) >= whole or int(ids.min()) < 0 or len(ids.unique()) < size
        kept = None if t2d is None else t2d.nonzero().flatten()
        if kept is not None and torch.equal(d2t.long(), kept) and not torch.equal(ids, kept):
            yield "d2t holds target ids, must hold offsets (target id minus draft id)"
        elif offset_wrong:
            found = f"{int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones of {size}"
            yield f"d2t leads to ids from {found}, in a vocabulary of {whole}"
        elif kept is not None and not torch.equal(ids.sort().values, kept):
            yield "d2t and t2d keep different tokens"


def target_faults(config: Mapping[str, Any], target: PretrainedConfig) -> Iterator[str]:
    """Where the drafter does not fit its target."""
    text = target.get_text_config()
    entering = config.get("target_hidden_size", config.get("hidden_size"))
    for name, found, wanted in (
        ("hidden size of the states", entering, text.hidden_size),
        ("vocab_size", config.get("vocab_size"), text.vocab_size),
    ):
        if found != wanted:
            yield f"{name} is {found}, the target's {wanted}"
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 10000.0)}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta != text.rope_parameters["rope_theta"]:
        yield f"rope_theta is {theta}, the target's {text.rope_parameters['rope_theta']}"
    kinds = [
        {key: value for key, value in one.items() if key not in (*UNREAD_ROPE_KEYS, "rope_theta")} for one in (rope, text.rope_parameters)
    ]
    if kinds[0].get("rope_type", kinds[0].get("type", "default")) != kinds[1].get("rope_type", "default"):
        yield f"rotary scaling is {kinds[0]}, the target's {kinds[1]}"
    if config.get("max_position_embeddings", 0) < text.max_position_embeddings:
        length = config.get("max_position_embeddings")
        yield f"max_position_embeddings is {length}, the target's {text.max_position_embeddings}: longer contexts are refused"
    boundaries = boundaries_of(config, text.num_hidden_layers)
    if not 0 < min(boundaries) <= max(boundaries) < text.num_hidden_layers:
        yield f"states are those before layers {boundaries}, the target has {text.num_hidden_layers} layers"


def boundaries_of(config: Mapping[str, Any], layers: int) -> list[int]:
    """The boundaries that SGLang captures for the drafter in a target of `layers` layers."""
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return default_boundaries(layers) if outputs is None else from_sglang(outputs)


def notes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """What is unusual and does no harm."""
    names = [name for path in sorted(folder.glob("*.safetensors")) for name in stored_names(path)]
    renamed = sorted(name for name in names if engine_name(name) != name)
    if renamed:
        yield f"{len(renamed)} tensors have other names than midlayer.*, such as {renamed[0]}: SGLang 0.5.11 and later load them"
    if EMBEDDING in tensors and "target_hidden_size" not in config:
        yield f"{EMBEDDING} is there: the target's replaces it"
    unknown = sorted(tensors.keys() - KNOWN - {EMBEDDING, HEAD, *TABLES})
    if unknown:
        yield f"{unknown} mean nothing to an engine and are skipped"
    if not (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        yield "no layer ids under eagle_config: engines take the default layers"


def stored_names(path: Path) -> list[str]:
    """Names of the tensors in the file at `path`."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


KNOWN = {
    *(f"{name}.weight" for name in ("fc", "norm", "fc_norm.0", "fc_norm.1", "fc_norm.2")),
    *(f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
