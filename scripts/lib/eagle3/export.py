"""The folder that SGLang and vLLM load: `config.json` and `model.safetensors`, written and checked.

Engines skip unknown names and fill missing ones at random without a word, so reading is strict here.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PretrainedConfig

from scripts.lib.eagle3.layers import from_sglang, to_sglang, to_vllm
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_bytes, write_json

ARCHITECTURE = "LlamaForCausalLMEagle3"
DTYPE = torch.bfloat16
COPIED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "num_hidden_layers",
)
OWN = ("intermediate_size", "num_hidden_layers")  # of which a drafter may have others than its target
SWITCHES = ("fc_norm", "norm_output")  # of EAGLE-3.1, written where they are on


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write `drafter` in bfloat16 with its vocabulary tables to `folder`, which must exist; each file whole or not at all."""
    weights = drafter.state_dict()
    tensors = {name: exported(tensor) for name, tensor in weights.items()}
    tensors |= {twin: tensors[name].clone() for twin, name in twins(weights).items()}
    write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config_json(drafter.config))


def twins(names: Iterable[str]) -> dict[str, str]:
    """The second names of tensors among `names`, and the first ones.

    What a layer behind the first one attends to is normed by its `hidden_norm` in SGLang and by its `input_layernorm` in vLLM.
    """
    return {norm.replace("hidden_norm", "input_layernorm"): norm for norm in names if norm.startswith("layers.") and "hidden_norm" in norm}


def exported(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU; weights in bfloat16, tables as they are."""
    return tensor.detach().to("cpu", DTYPE if tensor.is_floating_point() else tensor.dtype).contiguous()


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """`config.json` in the words of both engines.

    Rotary settings stand twice: newer engines read `rope_parameters`, older ones `rope_theta` and `rope_scaling` and
    fall back to theta 10,000 without them.
    """
    rope = config.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    return {
        **{name: getattr(config, name) for name in COPIED},
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"} if scaled else None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": to_sglang(config.boundaries), "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": to_vllm(config.boundaries),
        **{name: True for name in SWITCHES if getattr(config, name)},
    }


def load_drafter(folder: Path, dtype: torch.dtype, device: str) -> Drafter:
    """The drafter in `folder` in `dtype` on `device`, in eval mode without gradients.

    Raises StageError for every config value or tensor that an engine would misread in silence.
    """
    config = load_config(folder / "config.json")
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StageError(f"{path}: not a readable safetensors file ({error}); export the drafter again") from error
    with torch.device("meta"):
        drafter = Drafter(config, torch.empty(config.draft_vocab_size, dtype=torch.int64), torch.empty(config.vocab_size, dtype=torch.bool))
    expected = {name: (tuple(tensor.shape), stored_dtype(tensor)) for name, tensor in drafter.state_dict().items()}
    doubles = twins(expected)
    check_tensors(path, tensors, expected | {twin: expected[name] for twin, name in doubles.items()})
    check_vocabulary(path, tensors["d2t"], tensors["t2d"])
    check_twins(path, tensors, doubles)
    drafter.load_state_dict({name: tensors[name] for name in expected}, assign=True)
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which `tensor` lies in the file."""
    return DTYPE if tensor.is_floating_point() else tensor.dtype


def load_config(path: Path) -> DrafterConfig:
    """The drafter's sizes from its `config.json`; StageError when a key is missing or says something else than we write."""
    try:
        data = json.loads(path.read_text())
        boundaries = from_sglang(data["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        switches = {name: data.get(name, False) for name in SWITCHES}
        config = DrafterConfig(**{name: data[name] for name in COPIED}, **switches, boundaries=tuple(boundaries))
        expected = config_json(config)
        if config.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else error
        raise StageError(f"{path}: not the config of an {ARCHITECTURE} drafter ({reason}); export the drafter again") from error
    wrong = [f"{key} is {data.get(key)!r}, must be {value!r}" for key, value in expected.items() if data.get(key) != value]
    if wrong:
        raise StageError(f"{path}: {'; '.join(wrong)}; export the drafter again")
    return config


def check_tensors(path: Path, tensors: dict[str, Tensor], expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Refuse a file whose names, shapes or dtypes are not exactly the `expected` ones."""
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise StageError(
            f"{path}: missing tensors {missing}, unexpected tensors {extra}; an engine would load it without a word: export again"
        )
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {shape} {dtype}, must be {expected[name][0]} {expected[name][1]}"
        for name, (shape, dtype) in sorted(found.items())
        if (shape, dtype) != expected[name]
    ]
    if wrong:
        raise StageError(f"{path}: {'; '.join(wrong)}; export the drafter again")
    broken = [name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise StageError(f"{path}: {broken} hold values that are not finite; train the drafter again")


def check_vocabulary(path: Path, d2t: Tensor, t2d: Tensor) -> None:
    """Refuse tables that disagree: `d2t` i64[D] holds offsets onto the ascending ids where `t2d` bool[V] is true."""
    kept = t2d.nonzero().flatten()
    mapped = torch.arange(len(d2t)) + d2t
    if not torch.equal(mapped, kept):
        wrong = next(
            (i for i, pair in enumerate(zip(mapped.tolist(), kept.tolist(), strict=False)) if pair[0] != pair[1]),
            min(len(mapped), len(kept)),
        )
        raise StageError(
            f"{path}: d2t and t2d disagree from draft id {wrong} on ({len(d2t)} draft ids, {len(kept)} kept target ids): "
            "d2t must hold offsets (target id minus draft id), not target ids; build the draft vocabulary again"
        )


def check_twins(path: Path, tensors: dict[str, Tensor], doubles: dict[str, str]) -> None:
    """Refuse a file in which the two names of a tensor, `doubles`, stand for different ones: each engine reads another."""
    wrong = [f"{twin} is not {name}" for twin, name in doubles.items() if not torch.equal(tensors[twin], tensors[name])]
    if wrong:
        raise StageError(f"{path}: {', '.join(wrong)}: SGLang and vLLM would compute different drafts; export the drafter again")


def check_target(folder: Path, target: PretrainedConfig) -> None:
    """Refuse the drafter in `folder` when sizes, rotary embedding or positions are not those of `target`."""
    config = load_config(folder / "config.json")
    like = DrafterConfig.from_target(target, config.draft_vocab_size, config.boundaries)
    expected = replace(like, **{name: getattr(config, name) for name in OWN})
    wrong = [
        f"{name} is {getattr(config, name)!r}, the target's {getattr(expected, name)!r}"
        for name in COPIED
        if getattr(config, name) != getattr(expected, name)
    ]
    layers = target.get_text_config().num_hidden_layers
    if max(config.boundaries) >= layers:
        wrong.append(f"boundaries are {list(config.boundaries)}, the target has {layers} layers")
    if wrong:
        raise StageError(f"{folder / 'config.json'}: {'; '.join(wrong)}; train a drafter for this target")
