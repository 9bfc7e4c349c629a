"""Muon beside AdamW: who moves what, that a stopped run goes on bit for bit, and what it cannot be had with."""

from dataclasses import replace

import pytest
import torch

from benchmarks.train_rows import SHAPES
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.training.build import train
from scripts.lib.training.memory import Load, estimate
from scripts.lib.training.optimizers import move, optimizers
from tests.test_eagle3_depth import deeper
from tests.test_train import curve
from tests.test_train_cases import stopped
from tests.test_train_memory import sizes_of
from tests.test_train_packed import drafter  # noqa: F401
from tests.train_case import job

pytest_plugins = ["tests.train_parts"]


def test_muon_moves_the_matrices_inside_and_adamw_the_rest(drafter):  # noqa: F811
    drafter = deeper(drafter, 2)
    muon, adamw = optimizers(drafter, "muon")
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    inner, rest = ([names[id(weight)] for group in part.param_groups for weight in group["params"]] for part in (muon, adamw))
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert sorted(inner + rest) == sorted(names.values())
    assert "lm_head.weight" in rest and all(name == "lm_head.weight" or "norm" in name for name in rest)
    assert {"fc.weight", "midlayer.mlp.down_proj.weight", "layers.1.self_attn.q_proj.weight"} <= set(inner)


def test_a_step_of_muon_is_as_long_as_one_of_adamw_and_turns_all_directions_alike(drafter):  # noqa: F811
    """The step of a matrix has nearly equal singular values, and the root mean square of its numbers is about 0.2 of the learning rate."""
    generator = torch.Generator().manual_seed(5)
    before = drafter.fc.weight.detach().clone()
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    move(optimizers(drafter, "muon"), 0.01, forget=True)
    step = drafter.fc.weight.detach() - before
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.5 * values.max()
    assert step.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.3)


def test_a_run_with_muon_that_was_stopped_goes_on_bit_for_bit(case, trained, tmp_path, monkeypatch):
    run(job(case, tmp_path / "whole", optimizer="muon"), train)
    stopped(job(case, tmp_path / "stopped", optimizer="muon"), 5, monkeypatch)
    run(job(case, tmp_path / "stopped", optimizer="muon"), train)
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == resumed
    assert (trained / "model.safetensors").read_bytes() != whole
    losses = [row["loss_0"] for row in curve(tmp_path / "whole")]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_muon_is_refused_where_ranks_share_the_weights(case, tmp_path):
    wanted = replace(job(case, tmp_path / "out", optimizer="muon"), runtime={"device": "cpu", "threads": 1, "ranks": 2, "shard": True})
    with pytest.raises(StageError, match=r"drafters\.eagle3\.optimizer is muon.*shard: false"):
        run(wanted, train)


def test_muon_keeps_one_moment_of_the_matrices_inside():
    sizes, load = sizes_of(SHAPES["llama-8b"]), Load(8192, 10240, 7, 2)
    plain, muon = estimate(sizes, load), estimate(sizes, replace(load, muon=True))
    inner = sizes.weights - sizes.hidden * sizes.draft_vocabulary
    assert plain.optimizer - muon.optimizer == 4 * inner and replace(plain, optimizer=muon.optimizer) == muon
