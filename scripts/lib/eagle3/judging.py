"""Whether SGLang would serve a drafter, whoever trained it, as it was trained: what an engine passes over in silence is said here.

The rules are those of SGLang's `LlamaForCausalLMEagle3`: unknown tensors are skipped, missing ones stay random, draft ids without
`d2t` are taken for target ids, and the target's embedding replaces the drafter's.
Shapes: H hidden size, D draft vocabulary, V target vocabulary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
from scripts.lib.eagle3.shapes import EMBEDDING, FUSION, HEAD, SWITCHED, expected_shapes, known_names, layer_count, layer_names
from scripts.lib.ground.errors import StageError

TABLES = ("d2t", "t2d")
# Target classes that take layer ids as boundaries when the first is not 1, and those that do when the last boundary is among them.
BOUNDARIES_UNLESS_ONE = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite"}
LAST_IS_CAPTURED = {"gpt_oss"}


@dataclass(frozen=True)
class Fault:
    """One thing that an engine would serve in another way than it was trained: its name, and what shows it."""

    name: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What keeps an engine from serving the drafter as it was trained, and what is unusual but harmless."""

    faults: tuple[Fault, ...]
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


def config_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Values of `config.json` that make an engine do something else."""
    if config.get("architectures") != [ARCHITECTURE]:
        yield Fault("other_architecture", f"architectures is {config.get('architectures')}, must be ['{ARCHITECTURE}']")
    dtype = config.get("torch_dtype") or config.get("dtype")
    if dtype != "bfloat16":
        found = "missing" if dtype is None else f"'{dtype}'"
        takes = "float16" if dtype in ("float32", None) else dtype
        yield Fault("dtype_differs", f"torch_dtype is {found}, which an engine serves as {takes}, while the target's states are bfloat16")
    if config.get("tie_word_embeddings", False):
        yield Fault("head_tied", "tie_word_embeddings is true: the embedding would be taken for the head")
    if layer_count(config) < 1:
        yield Fault("other_architecture", f"num_hidden_layers is {config.get('num_hidden_layers')}, must be 1 or more")
    yield from layer_faults(config)
    rope = config.get("rope_parameters") or {}
    thetas = [where["rope_theta"] for where in (config, rope) if where.get("rope_theta") is not None]
    if not thetas:
        yield Fault("rope_differs", "rope_theta is missing: engines take 10000")
    elif thetas[0] != thetas[-1]:
        yield Fault("rope_differs", f"rope_theta is {thetas[0]}, and {thetas[-1]} in rope_parameters: engines read one or the other")


def layer_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Layer ids that an engine reads in another way than they are meant."""
    eagle, top = config.get("eagle_config") or {}, config.get("eagle_aux_hidden_state_layer_ids")
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    if top is not None and nested is None:
        yield Fault("layers_unread", f"eagle_aux_hidden_state_layer_ids {top} stand at the top level, which SGLang does not read")
    if nested is not None and sorted(set(nested)) != list(nested):
        yield Fault("layers_unread", f"the layer ids {nested} do not ascend: engines give the states in ascending order")
    count = config.get("num_aux_hidden_states")
    if nested is not None and count not in (None, len(nested)):
        yield Fault("fc_width", f"num_aux_hidden_states is {count}, but {len(nested)} layers are named")
    if eagle.get("use_aux_hidden_state", True) is not True:
        yield Fault("layers_unread", "use_aux_hidden_state is false: no state of the target would reach the drafter")


def tensor_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Fault]:
    """Weights that are missing, under another name, of another shape, or not finite."""
    try:
        shapes = expected_shapes(config)
    except KeyError as error:
        yield Fault("config_incomplete", f"config.json has no {error}")
        return
    for name, shape in shapes.items():
        if name not in tensors:
            yield absent(name, shape, config, tensors)
        elif tuple(tensors[name].shape) != shape:
            text = f"{name} is {list(tensors[name].shape)}, must be {list(shape)}"
            yield Fault("fc_width" if name == FUSION else "weights_shape", text)
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        yield Fault("weights_not_finite", f"{sorted(broken)} hold values that are not finite")
    for name, switch in SWITCHED.items():
        if name in tensors and name not in shapes:
            yield Fault("weights_unread", f"{name} is there, but config.json does not say {switch}: it would be skipped")
    layers = {".".join(name.split(".")[:2]) for name in tensors if name.startswith("layers.")} - {*layer_names(config)}
    if layers:
        found = ", ".join(sorted(layers))
        yield Fault("weights_unread", f"{found} is there, but num_hidden_layers is {layer_count(config)}: it would be skipped")


def absent(name: str, shape: Sequence[int], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Fault:
    """The fault of a tensor `name` that is not among `tensors`: nowhere, or under a name that engines skip."""
    strange = tensors.keys() - known_names(config) - {*TABLES}
    nameless = sorted(other for other in strange if tuple(tensors[other].shape) == tuple(shape))
    if nameless:
        return Fault("weights_renamed", f"{name} is missing: it would stay random, and {nameless[0]} of its shape would be skipped")
    return Fault("weights_missing", f"{name} is missing: it would stay random")


def vocabulary_faults(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Fault]:
    """A head and tables that do not belong together."""
    size, whole, head = config.get("draft_vocab_size"), config.get("vocab_size", 0), tensors.get(HEAD)
    if size is None:
        if "d2t" in tensors or head is not None:
            yield Fault("head_replaced", "draft_vocab_size is missing: the drafter's head would be replaced by the target's")
        return
    shape = (size, config.get("hidden_size", 0))
    if head is None:
        yield absent(HEAD, shape, config, tensors)
    elif tuple(head.shape) != shape:
        yield Fault("weights_shape", f"{HEAD} is {list(head.shape)}, must be {list(shape)}")
    if "d2t" not in tensors:
        if size != whole:
            yield Fault("d2t_missing", "d2t is missing: draft ids would be taken for target ids")
        return
    yield from table_faults(tensors["d2t"], tensors.get("t2d"), size, whole)


def table_faults(d2t: Tensor, t2d: Tensor | None, size: int, whole: int) -> Iterator[Fault]:
    """What is wrong with the offsets `d2t` [D], by themselves and against the mask `t2d` [V]."""
    if d2t.is_floating_point():
        yield Fault("d2t_malformed", f"d2t is {d2t.dtype}, must be int64")
        return
    if tuple(d2t.shape) != (size,):
        yield Fault("d2t_malformed", f"d2t has {len(d2t)} entries for a draft vocabulary of {size}")
        return
    ids = torch.arange(size) + d2t
    kept = None if t2d is None else t2d.nonzero().flatten()
    outside = int(ids.max()) >= whole or int(ids.min()) < 0 or len(ids.unique()) < size
    # Offsets onto ascending ids stay equal from a token to its neighbour; only ids grow at every place.
    absolute = bool((d2t.diff() > 0).all()) and outside if kept is None else torch.equal(d2t.long(), kept) and not torch.equal(ids, kept)
    if absolute:
        yield Fault("d2t_absolute", "d2t holds target ids, must hold offsets (target id minus draft id)")
    elif outside:
        found = f"{int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones of {size}"
        yield Fault("d2t_malformed", f"d2t leads to ids from {found}, in a vocabulary of {whole}")
    elif kept is not None and not torch.equal(ids.sort().values, kept):
        yield Fault("d2t_t2d_disagree", "d2t and t2d keep different tokens")
    elif kept is None and size < whole and not d2t.any():
        yield Fault("d2t_malformed", f"d2t is all zeros: it would draft nothing but the first {size} of {whole} tokens")


def target_faults(config: Mapping[str, Any], target: PretrainedConfig) -> Iterator[Fault]:
    """Where the drafter does not fit its target."""
    text = target.get_text_config()
    entering = config.get("target_hidden_size", config.get("hidden_size"))
    for name, found, wanted in (
        ("hidden size of the states", entering, text.hidden_size),
        ("vocab_size", config.get("vocab_size"), text.vocab_size),
    ):
        if found != wanted:
            yield Fault("other_target", f"{name} is {found}, the target's {wanted}")
    yield from rope_faults(config, text)
    if config.get("max_position_embeddings", 0) < text.max_position_embeddings:
        length = config.get("max_position_embeddings")
        yield Fault("positions_short", f"max_position_embeddings is {length}, the target's {text.max_position_embeddings}")
    boundaries = boundaries_of(config, text)
    last = text.num_hidden_layers - (text.model_type not in LAST_IS_CAPTURED)
    if not 0 < min(boundaries) <= max(boundaries) <= last:
        yield Fault("layers_outside", f"states are those before layers {boundaries}, the target has {text.num_hidden_layers} layers")


def rope_faults(config: Mapping[str, Any], text: PretrainedConfig) -> Iterator[Fault]:
    """A rotary embedding that is not that of the target's `text` part."""
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 10000.0)}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta != text.rope_parameters["rope_theta"]:
        yield Fault("rope_differs", f"rope_theta is {theta}, the target's {text.rope_parameters['rope_theta']}")
    ours, theirs = (
        {key: value for key, value in one.items() if key not in (*UNREAD_ROPE_KEYS, "rope_theta", "type")} | {"rope_type": kind(one)}
        for one in (rope, text.rope_parameters)
    )
    if ours["rope_type"] != theirs["rope_type"] or (theirs["rope_type"] != "default" and ours != theirs):
        yield Fault("rope_differs", f"rotary scaling is {ours}, the target's {theirs}")


def kind(rope: Mapping[str, Any]) -> str:
    """The kind of scaling in rotary settings, under either name that configs use."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def boundaries_of(config: Mapping[str, Any], text: PretrainedConfig) -> list[int]:
    """The boundaries that SGLang 0.5.23 captures for the drafter in a target with the `text` part.

    Its classes read an explicit list in three ways. Source: `set_eagle3_layers_to_capture` of each.
    """
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return default_boundaries(text.num_hidden_layers)
    as_they_are = ids[0] != 1 if text.model_type in BOUNDARIES_UNLESS_ONE else max(ids) == text.num_hidden_layers
    as_they_are &= text.model_type in BOUNDARIES_UNLESS_ONE | LAST_IS_CAPTURED
    return list(ids) if as_they_are else from_sglang(ids)


def notes(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """What is unusual and does no harm."""
    names = [name for path in sorted(folder.glob("*.safetensors")) for name in stored_names(path)]
    renamed = sorted(name for name in names if engine_name(name) != name)
    if renamed:
        yield f"{len(renamed)} tensors have other names than midlayer.*, such as {renamed[0]}: SGLang 0.5.11 and later load them"
    if EMBEDDING in tensors and "target_hidden_size" not in config:
        yield f"{EMBEDDING} is there: the target's replaces it"
    stored = {tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point() and name != EMBEDDING} - {torch.bfloat16}
    if stored:
        yield f"weights are stored as {', '.join(sorted(map(str, stored)))}: engines round them to torch_dtype"
    unknown = sorted(tensors.keys() - known_names(config) - {*TABLES})
    if unknown:
        yield f"{unknown} mean nothing to an engine and are skipped"
    if not (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        yield "no layer ids under eagle_config: engines take the default layers"


def stored_names(path: Path) -> list[str]:
    """Names of the tensors in the file at `path`."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
