"""What a drafter takes from its target, in every layout in which targets are stored."""

import json

import pytest
import torch
from safetensors.torch import save_file

from scripts.lib.eagle3.target import TargetWeights
from scripts.lib.ground.errors import StageError
from tests.tiny import tiny_config

EMBEDDING, HEAD = torch.randn(272, 64), torch.randn(272, 64)


def saved(folder, tied: bool, prefix: str, sharded: bool) -> TargetWeights:
    config = tiny_config()
    config.tie_word_embeddings = tied
    config.save_pretrained(folder)
    tensors = {f"{prefix}embed_tokens.weight": EMBEDDING, f"{prefix}norm.weight": torch.ones(64)}
    if not tied:
        tensors["language_model.lm_head.weight" if prefix.startswith("language_model") else "lm_head.weight"] = HEAD
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return TargetWeights(folder)
    files = {name: f"model-{number:05d}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return TargetWeights(folder)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embedding_are_found_in_one_file_or_many_tied_or_not(tmp_path, tied, prefix, sharded):
    """Another trainer's reader wants an index file and an untied head, and fails without a hint on both."""
    target = saved(tmp_path, tied, prefix, sharded)
    assert torch.equal(target.embedding(), EMBEDDING)
    assert torch.equal(target.head(), EMBEDDING if tied else HEAD)
    assert target.find("layers.0.mlp.up_proj.weight") is None


def test_a_target_without_a_head_is_refused_by_name(tmp_path):
    target = saved(tmp_path, True, "model.", False)
    target.config.tie_word_embeddings = False
    with pytest.raises(StageError, match=r"has no tensor lm_head\.weight"):
        target.head()
