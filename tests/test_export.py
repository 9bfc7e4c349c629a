"""The exported folder: exactly what engines read, and every known way to get it wrong is refused by name."""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from scripts.export import main
from scripts.lib.eagle3.export import check_target, load_drafter, save_drafter
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.layers import checked_boundaries, default_boundaries, from_sglang, to_sglang, to_vllm
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.errors import StageError
from tests.tiny import tiny_config

IDS = torch.tensor([0, 2, 3, 7, 9, 40])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    t2d = torch.zeros(272, dtype=torch.bool)
    t2d[IDS] = True
    drafter = Drafter(DrafterConfig.from_target(tiny_config(), len(IDS), (2, 4, 5)), IDS - torch.arange(len(IDS)), t2d)
    initialise(drafter, 1)
    save_drafter(drafter, tmp_path)
    return tmp_path


@pytest.fixture
def deep(folder: Path) -> Path:
    """The folder of a drafter of two layers."""
    one = load_drafter(folder, torch.float32, "cpu")
    drafter = Drafter(replace(one.config, num_hidden_layers=2), one.d2t, one.t2d)
    initialise(drafter, 2)
    with torch.no_grad():
        drafter.decoder[1].hidden_norm.weight.uniform_(0.5, 1.5)
    save_drafter(drafter, folder)
    return folder


def edit(folder: Path, change) -> None:
    """Apply `change` to the dict of tensors in `folder` and write it back."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_weights_have_the_names_shapes_and_dtypes_that_sglang_loads(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "d2t": ((6,), torch.int64),
        "fc.weight": ((64, 192), torch.bfloat16),
        "lm_head.weight": ((6, 64), torch.bfloat16),
        "midlayer.hidden_norm.weight": ((64,), torch.bfloat16),
        "midlayer.input_layernorm.weight": ((64,), torch.bfloat16),
        "midlayer.mlp.down_proj.weight": ((64, 128), torch.bfloat16),
        "midlayer.mlp.gate_proj.weight": ((128, 64), torch.bfloat16),
        "midlayer.mlp.up_proj.weight": ((128, 64), torch.bfloat16),
        "midlayer.post_attention_layernorm.weight": ((64,), torch.bfloat16),
        "midlayer.self_attn.k_proj.weight": ((32, 128), torch.bfloat16),
        "midlayer.self_attn.o_proj.weight": ((64, 64), torch.bfloat16),
        "midlayer.self_attn.q_proj.weight": ((64, 128), torch.bfloat16),
        "midlayer.self_attn.v_proj.weight": ((32, 128), torch.bfloat16),
        "norm.weight": ((64,), torch.bfloat16),
        "t2d": ((272,), torch.bool),
    }


def test_config_names_architecture_sizes_rope_and_layers_for_both_engines(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": 1,
        "draft_vocab_size": 6,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 272,
    }


def test_scaled_rope_of_the_target_survives_in_both_spellings(tmp_path):
    """Public reports: sgl-project/SpecForge issues 265, 270 and 702, theta and scaling lost at export."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    target = LlamaConfig(**{**tiny_config().to_dict(), "rope_parameters": rope})
    drafter = Drafter(
        DrafterConfig.from_target(target, 6, (2, 4, 5)), IDS - torch.arange(6), torch.zeros(272, dtype=torch.bool).index_fill(0, IDS, True)
    )
    save_drafter(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope
    slow = drafter.midlayer.self_attn.rotary.frequencies
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert not torch.allclose(slow, plain)
    check_target(tmp_path, target)


def test_round_trip_keeps_weights_and_keeps_rope_exact_in_bfloat16(folder):
    loaded = load_drafter(folder, torch.float32, "cpu")
    saved = load_file(folder / "model.safetensors")
    assert all(
        torch.equal(tensor, saved[name].float() if saved[name].is_floating_point() else saved[name])
        for name, tensor in loaded.state_dict().items()
    )
    assert loaded.target_ids.tolist() == IDS.tolist()
    low = load_drafter(folder, torch.bfloat16, "cpu")
    assert low.fc.weight.dtype == torch.bfloat16
    assert low.midlayer.self_attn.rotary.frequencies.dtype == torch.float32


def test_a_further_layer_has_its_number_and_a_norm_under_the_names_of_both_engines(deep):
    """SGLang norms what it attends to by `hidden_norm`, vLLM by `input_layernorm`; its projections see no embedding."""
    tensors = load_file(deep / "model.safetensors")
    assert {name.removeprefix("layers.1."): tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("layers.")} == {
        **{f"{norm}.weight": (64,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "mlp.down_proj.weight": (64, 128),
        "mlp.gate_proj.weight": (128, 64),
        "mlp.up_proj.weight": (128, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.v_proj.weight": (32, 64),
    }
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert json.loads((deep / "config.json").read_text())["num_hidden_layers"] == 2
    loaded = load_drafter(deep, torch.float32, "cpu")
    assert all(torch.equal(tensor, tensors[name].to(tensor.dtype)) for name, tensor in loaded.state_dict().items())
    check_target(deep, tiny_config())


def test_a_low_drafter_of_two_layers_is_saved_with_both_names_of_its_norm(deep, tmp_path):
    """Its weights are written as they lie, and a file holds no tensor twice."""
    before = load_file(deep / "model.safetensors")
    save_drafter(load_drafter(deep, torch.bfloat16, "cpu"), tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(tmp_path / "model.safetensors").items())


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        (
            lambda t: t.update({"layers.1.input_layernorm.weight": torch.zeros(64).bfloat16()}),
            2,
            "input_layernorm.weight is not layers.1.hidden_norm",
        ),
        (lambda t: without(t, "layers.1.input_layernorm.weight"), 2, r"missing tensors \['layers.1.input_layernorm.weight'\]"),
        (dict, 1, r"unexpected tensors \['layers.1.hidden_norm.weight'"),
        (dict, 3, r"missing tensors \['layers.2.hidden_norm.weight'"),
        (dict, 0, "num_hidden_layers is 0"),
        (dict, "2", "not the config of an"),
    ],
)
def test_layers_that_an_engine_would_misread_in_silence_are_refused(deep, change, layers, message):
    edit(deep, change)
    edit_config(deep, num_hidden_layers=layers)
    with pytest.raises(StageError, match=message):
        load_drafter(deep, torch.float32, "cpu")


def renamed(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, r"missing tensors \['midlayer.hidden_norm.weight'.*unexpected tensors \['layers.0.hidden_norm.weight'"),
        (lambda t: without(t, "lm_head.weight"), r"missing tensors \['lm_head.weight'\], unexpected tensors \[\]"),
        (lambda t: t.update({"embed_tokens.weight": torch.randn(272, 64)}), r"unexpected tensors \['embed_tokens.weight'\]"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(20, 64, dtype=torch.bfloat16)}),
            r"lm_head.weight is \(20, 64\).*must be \(6, 64\)",
        ),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].half()}),
            r"fc.weight is \(64, 192\) torch.float16, must be \(64, 192\) torch.bfloat16",
        ),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :128].contiguous()}), r"fc.weight is \(64, 128\).*must be \(64, 192\)"),
        (lambda t: t.update({"norm.weight": t["norm.weight"] * float("nan")}), r"\['norm.weight'\] hold values that are not finite"),
        (lambda t: without(t, "d2t"), r"missing tensors \['d2t'\]"),
    ],
)
def test_weights_that_an_engine_would_misread_in_silence_are_refused(folder, change, message):
    """Public reports: lightseekorg/TorchSpec pulls 39 and 63, sgl-project/sglang pull 27908, vllm-project/vllm pull 28549."""
    edit(folder, change)
    with pytest.raises(StageError, match=message):
        load_drafter(folder, torch.float32, "cpu")


@pytest.mark.parametrize(("table", "first"), [(IDS, 1), (torch.arange(6), 2)], ids=["target ids", "arange"])
def test_tables_that_hold_ids_instead_of_offsets_are_refused(folder, table, first):
    """Public reports: verl-project/verl-SpeCo pull 67, SafeAILab/EAGLE issue 222."""
    edit(folder, lambda tensors: tensors.update({"d2t": table.clone()}))
    with pytest.raises(StageError, match=f"d2t and t2d disagree from draft id {first} on .* must hold offsets"):
        load_drafter(folder, torch.float32, "cpu")


def test_offsets_of_kept_ids_are_as_published(folder):
    """Kept target ids 3, 7, 9 have the offsets 3, 6, 7."""
    kept = torch.tensor([3, 7, 9])
    edit(folder, lambda t: t.update(d2t=kept - torch.arange(3), t2d=torch.zeros(12, dtype=torch.bool).index_fill(0, kept, True)))
    assert load_file(folder / "model.safetensors")["d2t"].tolist() == [3, 6, 7]
    edit(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:3].clone()}))
    edit_config(folder, draft_vocab_size=3, vocab_size=12)
    assert load_drafter(folder, torch.float32, "cpu").target_ids.tolist() == [3, 7, 9]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\], must be \['LlamaForCausalLMEagle3'\]"),
        ({"torch_dtype": "float16"}, "torch_dtype is 'float16', must be 'bfloat16'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, must be False"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0, must be 10000.0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, r"eagle_aux_hidden_state_layer_ids is \[1, 3, 4\], must be \[2, 4, 5\]"),
        ({"eagle_config": {}}, "key 'eagle_aux_hidden_state_layer_ids' is missing"),
    ],
)
def test_config_that_an_engine_would_misread_is_refused(folder, values, message):
    edit_config(folder, **values)
    with pytest.raises(StageError, match=message):
        load_drafter(folder, torch.float32, "cpu")


def test_drafter_for_another_target_is_refused(folder):
    other = LlamaConfig(**{**tiny_config(layers=4).to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})
    with pytest.raises(
        StageError, match=r"rope_parameters is .*10000.* the target's .*77.*boundaries are \[2, 4, 5\], the target has 4 layers"
    ):
        check_target(folder, other)


def test_cut_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StageError, match="not a readable safetensors file"):
        load_drafter(folder, torch.float32, "cpu")


def test_tool_says_what_is_wrong_in_its_last_line(folder, monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["export", "--check", str(folder)])
    caplog.set_level(logging.INFO)
    main()
    assert "sound" in caplog.messages[-1]
    edit_config(folder, torch_dtype="float16")
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "ERROR" in caplog.messages[-1]
    assert "torch_dtype is 'float16'" in caplog.messages[-1]


def test_layer_ids_of_both_engines():
    """A toy target of 36 layers where state k is k: aux are states 2, 18, 33, the outputs of layers 1, 17, 32.

    Public report: lightseekorg/TorchSpec issue 87.
    """
    assert default_boundaries(36) == [2, 18, 33]
    assert to_sglang([2, 18, 33]) == [1, 17, 32]
    assert from_sglang([1, 17, 32]) == to_vllm([2, 18, 33]) == [2, 18, 33]


@pytest.mark.parametrize("boundaries", [[2, 4], [4, 2, 5], [2, 2, 5], [0, 2, 5], [2, 4, 8]])
def test_boundaries_that_no_engine_captures_are_refused(boundaries):
    with pytest.raises(StageError, match="three ascending boundary ids from 1 to 7"):
        checked_boundaries(boundaries, 8)


def test_target_too_shallow_for_three_layers_is_refused():
    with pytest.raises(StageError, match="layers"):
        default_boundaries(5)
