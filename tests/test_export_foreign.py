"""`python -m scripts.export --check` on drafters of other trainers: what SGLang would pass over in silence is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.judging import Fault, boundaries_of, judge
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.errors import StageError
from tests.tiny import tiny_config

IDS = torch.tensor([0, 2, 3, 7, 9, 40])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    t2d = torch.zeros(272, dtype=torch.bool).index_fill(0, IDS, True)
    drafter = Drafter(DrafterConfig.from_target(tiny_config(), len(IDS), (2, 4, 5)), IDS - torch.arange(len(IDS)), t2d)
    initialise(drafter, 1)
    save_drafter(drafter, tmp_path)
    return tmp_path


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors")


def edit_config(folder: Path, **values) -> None:
    data = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value != "absent"}))


def test_our_own_drafter_is_sound_for_its_target_without_a_note(folder):
    verdict = judge(folder, tiny_config())
    assert verdict.faults == verdict.notes == ()


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_other_names_of_the_layer_are_sound(folder, prefix):
    edit(folder, lambda tensors: {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()})
    verdict = judge(folder, tiny_config())
    assert verdict.faults == ()
    assert "tensors have other names than midlayer" in verdict.notes[0]


def test_an_embedding_of_its_own_is_noted_and_its_mask_may_be_missing(folder):
    edit(folder, lambda t: {**{name: tensor for name, tensor in t.items() if name != "t2d"}, "embed_tokens.weight": torch.zeros(272, 64)})
    verdict = judge(folder, tiny_config())
    assert verdict.faults == ()
    assert verdict.notes == ("embed_tokens.weight is there: the target's replaces it",)


def test_weights_of_another_dtype_are_noted(folder):
    edit(folder, lambda tensors: {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()})
    verdict = judge(folder, tiny_config())
    assert verdict.faults == ()
    assert verdict.notes == ("weights are stored as torch.float16: engines round them to torch_dtype",)


def test_states_in_another_order_or_switched_off_are_named(folder):
    edit_config(
        folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 1, 4], "use_aux_hidden_state": False}, num_aux_hidden_states=2
    )
    faults = judge(folder, tiny_config()).faults
    assert [fault.name for fault in faults] == ["layers_unread", "fc_width", "layers_unread", "fc_width"]


@pytest.mark.parametrize(
    ("model_type", "ids", "boundaries"),
    [
        ("llama", [1, 3, 4], [2, 4, 5]),
        ("kimi_k2", [1, 3, 4], [2, 4, 5]),
        ("kimi_k2", [2, 4, 5], [2, 4, 5]),
        ("gpt_oss", [2, 4, 8], [2, 4, 8]),
        ("gpt_oss", [2, 4, 6], [3, 5, 7]),
        ("llama", None, [2, 4, 5]),
    ],
)
def test_targets_read_layer_ids_in_three_ways(model_type, ids, boundaries):
    """sgl-project/sglang pull 25454: one list means other layers in another target class."""
    text = tiny_config()
    text.model_type = model_type
    assert boundaries_of({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, text) == boundaries


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.fixture
def deep(folder: Path) -> Path:
    """The folder of a drafter of two layers."""
    one = load_drafter(folder, torch.float32, "cpu")
    drafter = Drafter(replace(one.config, num_hidden_layers=2), one.d2t, one.t2d)
    initialise(drafter, 2)
    save_drafter(drafter, folder)
    return folder


@pytest.mark.parametrize("prefix", ["midlayer.", "model.layers.0."])
def test_a_drafter_of_two_layers_is_sound_also_without_the_norm_that_sglang_does_not_use(deep, prefix):
    assert judge(deep, tiny_config()).faults == judge(deep, tiny_config()).notes == ()
    edit(
        deep,
        lambda t: {name.replace("midlayer.", prefix): tensor for name, tensor in t.items() if name != "layers.1.input_layernorm.weight"},
    )
    assert judge(deep, tiny_config()).faults == ()


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        (without("layers.1.hidden_norm.weight"), 2, "layers.1.hidden_norm.weight is missing: it would stay random"),
        (dict, 1, "layers.1 is there, but num_hidden_layers is 1: it would be skipped"),
        (dict, 3, "layers.2.self_attn.q_proj.weight is missing"),
        (dict, None, "num_hidden_layers is None, must be 1 or more"),
        (
            lambda t: t.update({"layers.1.self_attn.k_proj.weight": torch.zeros(32, 128)}),
            2,
            "layers.1.self_attn.k_proj.weight is [32, 128], must be [32, 64]",
        ),
    ],
)
def test_layers_that_an_engine_would_misread_are_named(deep, change, layers, message):
    edit(deep, change)
    edit_config(deep, num_hidden_layers=layers)
    assert [fault for fault in judge(deep, tiny_config()).faults if fault.text.startswith(message)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_head.weight"), "lm_head.weight is missing: it would stay random"),
        (without("fc.weight"), "fc.weight is missing: it would stay random"),
        (without("d2t"), "d2t is missing: draft ids would be taken for target ids"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :128].contiguous()}), r"fc.weight is [64, 128], must be [64, 192]"),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}),
            "midlayer.self_attn.q_proj.weight is [64, 64], must be [64, 128]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.zeros(5, 64)}), "lm_head.weight is [5, 64], must be [6, 64]"),
        (lambda t: t.update({"d2t": IDS.clone()}), "d2t holds target ids, must hold offsets"),
        (lambda t: t.update({"d2t": torch.zeros(6)}), "d2t is torch.float32, must be int64"),
        (lambda t: t.update({"d2t": t["d2t"] + 300}), "d2t leads to ids from 300 to 340"),
        (lambda t: t.update({"d2t": t["d2t"] + 1}), "d2t and t2d keep different tokens"),
        (lambda t: t.update({"norm.weight": t["norm.weight"] * float("nan")}), "['norm.weight'] hold values that are not finite"),
        (lambda t: t.update({"aux_norm_low.weight": torch.ones(64)}), "fc_norm.0.weight is there, but config.json does not say fc_norm"),
    ],
)
def test_weights_that_an_engine_would_misread_are_named(folder, change, message):
    """Public reports: lightseekorg/TorchSpec pulls 39 and 63, sgl-project/sglang pull 27908, SafeAILab/EAGLE issue 222."""
    edit(folder, change)
    assert [fault for fault in judge(folder, tiny_config()).faults if fault.text.startswith(message)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']"),
        ({"draft_vocab_size": "absent"}, "draft_vocab_size is missing: the drafter's head would be replaced"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"eagle_config": "absent"}, "eagle_aux_hidden_state_layer_ids [2, 4, 5] stand at the top level"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "rope_theta is missing: engines take 10000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 5.0, the target's 10000.0"),
        ({"target_hidden_size": 32}, "embed_tokens.weight is missing: it would stay random"),
        ({"max_position_embeddings": 128}, "max_position_embeddings is 128, the target's 512"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "states are those before layers [2, 4, 10], the target has 8"),
        ({"hidden_size": "absent"}, "config.json has no 'hidden_size'"),
    ],
)
def test_configs_that_an_engine_would_misread_are_named(folder, values, message):
    """Public reports: sgl-project/SpecForge issues 139, 265, 270 and 702."""
    edit_config(folder, **values)
    assert [fault for fault in judge(folder, tiny_config()).faults if fault.text.startswith(message)]


def test_a_target_of_another_width_or_vocabulary_is_named(folder):
    other = LlamaConfig(**{**tiny_config().to_dict(), "hidden_size": 128, "vocab_size": 300})
    assert judge(folder, other).faults[:2] == (
        Fault("other_target", "hidden size of the states is 64, the target's 128"),
        Fault("other_target", "vocab_size is 272, the target's 300"),
    )


def test_a_folder_without_weights_or_with_twins_cannot_be_judged(folder):
    edit(folder, lambda tensors: tensors.update({"model.fc.weight": tensors["fc.weight"].clone()}))
    with pytest.raises(StageError, match=r"fc\.weight is there twice"):
        judge(folder, None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StageError, match=r"no \*.safetensors"):
        judge(folder, None)
