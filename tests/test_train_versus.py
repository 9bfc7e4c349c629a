"""The comparison with another trainer on one run's rows: what of it needs neither a GPU nor that trainer."""

import json
import sys
from pathlib import Path

import torch
import yaml
from torch import nn

from benchmarks.train_versus import export, main
from scripts.lib.eagle3.export import load_drafter
from scripts.lib.ground.config import config_errors, without_nulls
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.training.build import train
from scripts.lib.training.inputs import read_inputs
from scripts.lib.training.settings import TrainSettings
from tests.train_case import job, make_case

REPO = Path(__file__).parents[1]


def test_ours_is_trained_anew_on_the_runs_rows_and_both_are_named_for_the_pipeline(tmp_path, monkeypatch, capsys):
    torch.set_num_threads(1)
    make_case(tmp_path / "demo", train_rows=6, eval_rows=2)
    first = job(tmp_path / "demo", tmp_path / "demo/drafters/eagle3", epochs=1)
    run(first, train)
    words = ["--run", str(tmp_path / "demo"), "--folder", str(tmp_path / "versus"), "--device", "cpu", "--only", "ours"]
    monkeypatch.setattr(sys, "argv", ["train_versus", *words, "--passes", "2", "--ttt", "2", "--recipe", '{"learning_rate": 0.01}'])
    main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["ours"]
    once = sum(len(row.slots) for row in read_inputs(first, TrainSettings.of(first.settings)).train.rows)
    assert (figures["passes"], figures["trained_tokens"]) == (2, 2 * once)
    made = read_manifest(tmp_path / "versus/ours/manifest.json", "train").settings["drafter"]
    assert (made["ttt_steps"], made["learning_rate"], made["clip"]) == (2, 0.01, first.settings["drafter"]["clip"])
    added = yaml.safe_load((tmp_path / "versus/config.yaml").read_text())
    default = yaml.safe_load((REPO / "config.yaml").read_text())
    whole = default | {"benchmark": default["benchmark"] | added["benchmark"]}
    assert config_errors(without_nulls(whole), json.loads((REPO / "rules/config.schema.json").read_text())) == []
    assert without_nulls(added)["benchmark"]["variants"]["ours"]["drafter"] == f"path:{tmp_path / 'versus/ours'}"


def test_the_other_drafter_is_exported_without_its_embedding_and_with_the_targets_sizes(tmp_path):
    make_case(tmp_path, train_rows=2, eval_rows=2)
    inputs = read_inputs(job(tmp_path, tmp_path / "out"), TrainSettings.of(job(tmp_path, tmp_path / "out").settings))
    vocabulary = inputs.vocabulary
    export_again = tmp_path / "again"
    run(job(tmp_path, tmp_path / "out", epochs=1), train)
    other = load_drafter(tmp_path / "out", torch.float32, "cpu")
    other.embed_tokens = nn.Embedding(272, 64)
    export(other, inputs, export_again)
    assert (export_again / "model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert load_drafter(export_again, torch.float32, "cpu").target_ids.tolist() == vocabulary.target_ids.tolist()
