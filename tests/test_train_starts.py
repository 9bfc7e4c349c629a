"""Stage `train`: what a drafter begins with, from its target or from another drafter."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from scripts.lib.eagle3.export import check_target, load_drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.training.build import train
from tests.train_case import job

pytest_plugins = ["tests.train_parts"]


def test_warm_start_takes_head_norm_and_last_layer(case, tmp_path):
    run(job(case, tmp_path / "out", epochs=1, learning_rate=1e-9), train)
    drafter, target = load_drafter(tmp_path / "out", torch.float32, "cpu"), load_file(case / "target" / "model.safetensors")
    wanted = {
        "lm_head.weight": target["model.embed_tokens.weight"][drafter.target_ids],
        "norm.weight": target["model.norm.weight"],
        "midlayer.mlp.up_proj.weight": target["model.layers.7.mlp.up_proj.weight"],
    }
    for name, tensor in wanted.items():
        torch.testing.assert_close(drafter.get_parameter(name).data, tensor.float(), rtol=0, atol=1e-6)
    free = drafter.get_parameter("midlayer.self_attn.k_proj.weight").data[16:, 64:]  # the first group looks at its own token
    torch.testing.assert_close(free, target["model.layers.7.self_attn.k_proj.weight"][16:].float(), rtol=0, atol=1e-6)


def test_a_wider_mlp_starts_as_the_targets_and_is_served_at_its_size(case, tmp_path):
    run(job(case, tmp_path / "wide", epochs=1, learning_rate=1e-9, intermediate_size=160), train)
    drafter, target = load_drafter(tmp_path / "wide", torch.float32, "cpu"), load_file(case / "target" / "model.safetensors")
    gate, down = target["model.layers.7.mlp.gate_proj.weight"], drafter.get_parameter("midlayer.mlp.down_proj.weight")
    torch.testing.assert_close(drafter.get_parameter("midlayer.mlp.gate_proj.weight")[-len(gate) :].data, gate.float(), rtol=0, atol=1e-6)
    assert down.shape[1] == 160 > len(gate) and not down[:, : -len(gate)].abs().gt(1e-6).any()
    check_target(tmp_path / "wide", AutoConfig.from_pretrained(case / "target"))


def test_several_layers_start_with_the_last_ones_of_the_target_and_add_nothing_yet(case, tmp_path):
    """So the drafter of three layers begins where that of one does: at the linear one."""
    begun = {"epochs": 1, "learning_rate": 1e-9}
    for layers in (1, 3):
        run(job(case, tmp_path / str(layers), layers=layers, **begun), train)
    one, three = (json.loads((tmp_path / layers / "training.json").read_text())["final"] for layers in "13")
    assert three["accept_length_all"] == one["accept_length_all"] and three["loss"] == pytest.approx(one["loss"], rel=1e-3)
    drafter, target = load_drafter(tmp_path / "3", torch.float32, "cpu"), load_file(case / "target" / "model.safetensors")
    for ours, theirs in (
        ("midlayer.mlp.up_proj", "5.mlp.up_proj"),
        ("layers.1.mlp.gate_proj", "6.mlp.gate_proj"),
        ("layers.2.self_attn.q_proj", "7.self_attn.q_proj"),
    ):
        wanted = target[f"model.layers.{theirs}.weight"].float()
        torch.testing.assert_close(drafter.get_parameter(f"{ours}.weight").data, wanted, rtol=0, atol=1e-6)
    silent = [drafter.get_parameter(f"layers.2.{name}.weight").data for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert all(weight.abs().max() < 1e-6 for weight in silent)
    check_target(tmp_path / "3", AutoConfig.from_pretrained(case / "target"))


def test_untrained_random_drafter_accepts_next_to_nothing(case, tmp_path):
    run(job(case, tmp_path / "out", epochs=1, learning_rate=1e-9, warm_start=False), train)
    final = json.loads((tmp_path / "out" / "training.json").read_text())["final"]
    assert 1.0 <= final["accept_length_all"] < 1.15


@pytest.mark.parametrize("prefix", ["midlayer.", "model.layers.0."])
def test_starts_from_another_drafter_whatever_its_names_and_vocabulary(case, trained, tmp_path, prefix):
    """Its head rows go where their tokens are; a token that it does not know gets the target's row."""
    tensors = load_file(trained / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    tensors |= {"d2t": tensors["d2t"][5:] + 5, "lm_head.weight": tensors["lm_head.weight"][5:].contiguous()}
    other = tmp_path / "other"
    other.mkdir()
    save_file({name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items() if name != "t2d"}, other / "model.safetensors")
    run(job(case, tmp_path / "out", epochs=1, learning_rate=1e-9, start_from=str(other)), train)
    found = load_drafter(tmp_path / "out", torch.float32, "cpu")
    torch.testing.assert_close(found.fc.weight.data, tensors["fc.weight"].float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.lm_head.weight.data[5:], tensors["lm_head.weight"].float(), rtol=0, atol=1e-6)
    embedding = load_file(case / "target" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(found.lm_head.weight.data[:5], embedding[ids[:5]].float(), rtol=0, atol=1e-6)


def test_a_drafter_of_other_sizes_is_no_start(case, trained, tmp_path):
    tensors = load_file(trained / "model.safetensors")
    save_file({**tensors, "fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=r"fc.weight is \[64, 128\], must be \[64, 192\].*--check"):
        run(job(case, tmp_path / "out", start_from=str(tmp_path)), train)


def test_a_drafter_of_two_layers_is_a_start_for_two_layers_alone(case, tmp_path):
    run(job(case, tmp_path / "two", layers=2, epochs=1), train)
    again = {"epochs": 1, "learning_rate": 1e-9, "start_from": str(tmp_path / "two")}
    run(job(case, tmp_path / "out", layers=2, **again), train)
    two, out = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "out"))
    for name, tensor in two.items():
        torch.testing.assert_close(out[name].float(), tensor.float(), rtol=0, atol=1e-6)
    for layers, message in ((1, "layers.1.hidden_norm.weight is there, must not be"), (3, "layers.2.hidden_norm.weight is missing")):
        with pytest.raises(StageError, match=message):
            run(job(case, tmp_path / "wrong", layers=layers, **again), train)
