"""The exported folder replayed with transformers' own modules: what its config and weights say, and nothing of ours."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from tests.tiny import tiny_config

IDS = torch.arange(1, 200, 2)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def exported(folder: Path, rope: dict, layers: int) -> Path:
    """A drafter of so many layers with random weights for a tiny target of this rotary embedding."""
    target = LlamaConfig(**{**tiny_config().to_dict(), "rope_parameters": rope})
    t2d = torch.zeros(272, dtype=torch.bool).index_fill(0, IDS, True)
    config = replace(DrafterConfig.from_target(target, len(IDS), (2, 4, 5)), num_hidden_layers=layers)
    drafter = Drafter(config, IDS - torch.arange(len(IDS)), t2d)
    initialise(drafter, 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    save_drafter(drafter, folder)
    return folder


@torch.no_grad()
def replay(folder: Path, embeds: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
    """Target ids i64[T] that the drafter in `folder` drafts behind each token, and its scores [T, D].

    `embeds` [T, H] are the embedded next tokens, `aux` [T, 3H] the target's states.
    """
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    size, eps = config.hidden_size, config.rms_norm_eps

    def norm(states: Tensor, name: str) -> Tensor:
        module = LlamaRMSNorm(size, eps)
        module.load_state_dict({"weight": weights[f"{name}.weight"]})
        return module(states)

    def filled(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        for name in "qkv":
            if hasattr(module, f"{name}_proj"):
                width, heads = weights[f"{prefix}{name}_proj.weight"].shape[::-1]
                setattr(module, f"{name}_proj", torch.nn.Linear(width, heads, bias=False))
        module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)})
        return module

    hidden, length = aux @ weights["fc.weight"].T, len(embeds)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    turn = LlamaRotaryEmbedding(config)(hidden, torch.arange(length)[None])
    for number in range(config.num_hidden_layers):
        layer = f"layers.{number}" if number else "midlayer"
        inputs = norm(hidden, f"{layer}.hidden_norm")
        inputs = inputs if number else torch.cat([norm(embeds, f"{layer}.input_layernorm"), inputs], -1)
        attention = filled(LlamaAttention(config, layer_idx=number), f"{layer}.self_attn.")
        hidden = hidden + attention(inputs[None], position_embeddings=turn, attention_mask=mask)[0][0]
        hidden = hidden + filled(LlamaMLP(config), f"{layer}.mlp.")(norm(hidden, f"{layer}.post_attention_layernorm"))
    scores = norm(hidden, "norm") @ weights["lm_head.weight"].T
    chosen = scores.argmax(-1)
    return chosen + weights["d2t"][chosen], scores


@pytest.mark.parametrize(("rope", "layers"), [(PLAIN, 1), (LLAMA3, 1), (PLAIN, 3)], ids=["plain", "llama3", "three layers"])
def test_transformers_modules_draft_what_our_drafter_drafts(tmp_path, rope, layers):
    folder = exported(tmp_path, rope, layers)
    drafter = load_drafter(folder, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(2)
    embeds, aux = torch.randn(90, 64, generator=generator), torch.randn(90, 192, generator=generator)
    wanted = drafter.logits(drafter.decode(embeds, drafter.fuse(aux), torch.arange(90), DraftCache()))
    ids, scores = replay(folder, embeds, aux)
    torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(ids, drafter.target_ids[wanted.argmax(-1)])
