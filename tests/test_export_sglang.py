"""The exported folder in the real SGLang's own loader: every parameter is filled, with our values."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from scripts.lib.eagle3.export import save_drafter
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.serving.launch import environment
from scripts.lib.serving.settings import ServerSettings
from tests.sglang_parts import sglang_python
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.sglang
IDS = torch.arange(1, 200, 2)
TOP = ("fc", "norm", "fc_norm.0", "fc_norm.1", "fc_norm.2")


def loaded(target: Path, drafter: Path, output: Path) -> dict[str, torch.Tensor]:
    """What SGLang makes of `drafter`, by the names of its own parameters."""
    settings = ServerSettings(python=str(sglang_python()), device="cpu")
    script = Path(__file__).with_name("sglang_load.py")
    command = [settings.interpreter(), script, target, drafter, output, output.with_suffix(".group")]
    done = subprocess.run(command, env=environment(settings, sglang_python(), ""), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output)


def joined(ours: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The weights of one of `ours` layers as SGLang names and joins them."""
    prefix = f"layers.{number}." if number else "midlayer."
    layer = {name.removeprefix(prefix): tensor for name, tensor in ours.items() if name.startswith(prefix)}
    projections = [layer.pop(f"self_attn.{name}_proj.weight") for name in "qkv"]
    layer |= {"self_attn.qkv_proj.weight": torch.cat(projections)}
    layer |= {"mlp.gate_up_proj.weight": torch.cat([layer.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up")])}
    return {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}


@pytest.mark.parametrize("layers", [1, 2])
def test_sglangs_loader_fills_every_parameter_with_our_weights(tmp_path, layers):
    """Also those of EAGLE-3.1 and of further layers. The embedding alone is left: it is the target's, which takes its place."""
    target = save_tiny_target(tmp_path / "target")
    config = LlamaForCausalLM.from_pretrained(target).config
    like = DrafterConfig.from_target(config, len(IDS), (2, 4, 5))
    drafter = Drafter(
        replace(like, num_hidden_layers=layers, fc_norm=True, norm_output=True),
        IDS - torch.arange(len(IDS)),
        torch.zeros(272, dtype=torch.bool).index_fill(0, IDS, True),
    )
    initialise(drafter, 1)
    (tmp_path / "drafter").mkdir()
    save_drafter(drafter, tmp_path / "drafter")
    ours, found = (
        load_file(tmp_path / "drafter" / "model.safetensors"),
        loaded(target, tmp_path / "drafter", tmp_path / "found.safetensors"),
    )
    wanted = {f"model.{name}": tensor for number in range(layers) for name, tensor in joined(ours, number).items()}
    wanted |= {f"model.{name}.weight": ours[f"{name}.weight"] for name in TOP} | {"hot_token_id": IDS}
    assert found.pop("model.embed_tokens.weight").isnan().all()
    assert torch.equal(found.pop("lm_head.weight")[: len(IDS)], ours["lm_head.weight"])  # filled up behind the draft vocabulary
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
