"""Stage `train`: inputs that are damaged, or do not belong together, stop it with a sentence that names them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.states.format import write_shard
from scripts.lib.states.reader import read_shard
from scripts.lib.training.build import train
from tests.train_case import job, publish

pytest_plugins = ["tests.train_parts"]


def copy_of(case: Path, to: Path) -> Path:
    for name in ("hidden", "vocab", "target"):
        shutil.copytree(case / name, to / name)
    return to


def rewrite_shards(case: Path, change) -> None:
    """Apply `change` to the tensors of both shards and write a manifest that fits them."""
    folder = case / "hidden"
    facts = read_manifest(folder / "manifest.json", "hidden").facts
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        content = read_shard(path)
        tensors = load_file(path)
        change(tensors)
        write_shard(path, type(content)(**tensors, ids=content.ids))
    publish(folder, "hidden", paths, facts)


def test_rows_without_a_trained_position_are_an_error(case, tmp_path):
    root = copy_of(case, tmp_path)
    rewrite_shards(root, lambda tensors: tensors["loss_spans"][:, 1].copy_(tensors["loss_spans"][:, 0] + 1))
    with pytest.raises(StageError, match="none of 16 train rows has a trained position"):
        run(job(root, tmp_path / "out"), train)


def test_loss_that_is_not_finite_names_the_rows(case, tmp_path, monkeypatch):
    root = copy_of(case, tmp_path)
    monkeypatch.setattr("scripts.lib.training.rows.check_finite", lambda path, shard: None)
    rewrite_shards(root, lambda tensors: tensors["aux"].fill_(float("nan")))
    with pytest.raises(StageError, match=r"loss nan .* on rows \['train\d+'.*not finite"):
        run(job(root, tmp_path / "out", warm_start=False), train)


def test_states_that_are_not_finite_are_refused_before_training(case, tmp_path):
    """Public report: vllm-project/speculators pull 615."""
    root = copy_of(case, tmp_path)
    rewrite_shards(root, lambda tensors: tensors["aux"][3, 1].fill_(float("inf")))
    with pytest.raises(StageError, match="rows of aux are not finite"):
        run(job(root, tmp_path / "out"), train)


def test_altered_shard_is_refused(case, tmp_path):
    root = copy_of(case, tmp_path)
    path = root / "hidden" / "train-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StageError, match=r"train-00000\.safetensors: sha256"):
        run(job(root, tmp_path / "out"), train)


def test_missing_teacher_names_the_token(case, tmp_path):
    root = copy_of(case, tmp_path)

    def drop(tensors):
        for name in ("final", "final_index", "argmax"):
            tensors[name] = tensors[name][:-1].clone()

    rewrite_shards(root, drop)
    with pytest.raises(StageError, match=r"has no final state for token \d+ of the shard"):
        run(job(root, tmp_path / "out"), train)


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        ("hidden_size", 32, "states have hidden size 32, the target 64"),
        ("num_layers", 12, "states have number of layers 12, the target 8"),
        ("final", "pre-norm", "states have final state pre-norm, the target post-norm"),
        ("boundaries", [2, 4, 8], "needs three ascending boundary ids from 1 to 7"),
    ],
)
def test_states_of_another_target_are_refused(case, tmp_path, fact, value, message):
    root = copy_of(case, tmp_path)
    manifest = json.loads((root / "hidden" / "manifest.json").read_text())
    manifest["facts"][fact] = value
    write_json(root / "hidden" / "manifest.json", manifest)
    with pytest.raises(StageError, match=message):
        run(job(root, tmp_path / "out"), train)


def test_vocabulary_of_another_target_is_refused(case, tmp_path):
    root = copy_of(case, tmp_path)
    path = root / "vocab" / "draft_vocab.safetensors"
    tensors = load_file(path)
    save_file({"d2t": tensors["d2t"], "t2d": torch.cat([tensors["t2d"], torch.zeros(8, dtype=torch.bool)])}, path)
    publish(root / "vocab", "vocab", [path], {})
    with pytest.raises(StageError, match="draft vocabulary is for 280 target tokens, the target has 272"):
        run(job(root, tmp_path / "out"), train)


def test_an_error_in_one_process_ends_all_with_its_sentence(case, tmp_path):
    root = copy_of(case, tmp_path)
    rewrite_shards(root, lambda tensors: tensors["loss_spans"][:, 1].copy_(tensors["loss_spans"][:, 0] + 1))
    two = job(root, tmp_path / "out")
    with pytest.raises(StageError, match="none of 16 train rows has a trained position"):
        run(Job(two.stage, two.output, two.inputs, two.settings, {**two.runtime, "ranks": 2}, two.work), train)
