"""Weights spread over ranks (FSDP2), draft steps computed again, ranks of a launcher: all train what one process trains."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.stage import Job, run
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.build import train
from scripts.lib.training.loss import Teacher
from scripts.lib.training.masters import Masters
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import Capacity, collate_packed
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.packed_unroll import again, once
from scripts.lib.training.sharded import ShardedMasters
from scripts.lib.training.stepping import Recipe
from scripts.lib.training.trainer import Trainer
from tests.test_eagle3_depth import deeper
from tests.test_train import curve
from tests.test_train_packed import DECAY, STEPS, drafter, rows, teacher  # noqa: F401
from tests.train_case import job, make_case

REPO = Path(__file__).parents[1]
SMALL_BATCHES = {"micro_tokens": 25}


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recipe(**ways: Any) -> Recipe:
    return Recipe(torch.float32, "cpu", DECAY, 0.5, soft_cross_entropy_, **ways)


def copy_of(drafter: Drafter) -> Drafter:  # noqa: F811
    made = Drafter(drafter.config, drafter.d2t.clone(), drafter.t2d.clone())
    made.load_state_dict(drafter.state_dict())
    return made


def trained(drafter: Drafter, teacher: Teacher, rows: list[TrainingRow], recipe: Recipe, state: Any = None) -> PackedStep:  # noqa: F811
    """The stepper after two steps of two batches each, from `state` if there is one."""
    capacity = Capacity.of(rows)
    stepper = PackedStep(copy_of(drafter), teacher, recipe, capacity)
    if state:
        stepper.weights.load(state)
    batches = [collate_packed(part, capacity, torch.float32) for part in (rows[:3], rows[3:])]
    counts = [sum(int((batch.remaining > step).sum()) for batch in batches) for step in range(STEPS)]
    for _ in range(2):
        stepper.train(batches, counts, 0.01)
    return stepper


def same(found: Any, wanted: Any) -> None:
    """All tensors of two checkpoints agree up to the order of sums."""
    torch.testing.assert_close(found["model"], wanted["model"], rtol=1e-4, atol=1e-5)
    moments = [{key: entry for key, entry in content["optimizers"][0]["state"].items()} for content in (found, wanted)]
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


def test_a_step_computed_again_has_the_same_bits_and_keeps_less(drafter, teacher, rows):  # noqa: F811
    kept, states = [], []
    for recompute in (False, True):
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            stepper = trained(drafter, teacher, rows, recipe(recompute=recompute))
        assert stepper.engine.kernels.run is (again if recompute else once)
        kept.append(sum(sizes))
        states.append(stepper.weights.state()["model"])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert kept[1] < kept[0] / 2


def test_several_layers_computed_again_and_spread_over_ranks_learn_the_same(one_rank, drafter, teacher, rows):  # noqa: F811
    deep = deeper(drafter, 2)
    plain, again, spread = (trained(deep, teacher, rows, recipe(**ways)) for ways in ({}, {"recompute": True}, {"shard": True}))
    states = [stepper.weights.state() for stepper in (plain, again, spread)]
    assert all(torch.equal(tensor, states[1]["model"][name]) for name, tensor in states[0]["model"].items())
    same(states[2], states[0])


def test_a_checkpoint_says_nothing_of_how_weights_lay(one_rank, drafter, teacher, rows):  # noqa: F811
    """Two steps whole and two spread, and the other way round, end where four of one kind end."""
    whole, spread = (trained(drafter, teacher, rows, recipe(shard=shard)) for shard in (False, True))
    assert isinstance(whole.weights, Masters) and isinstance(spread.weights, ShardedMasters)
    same(spread.weights.state(), whole.weights.state())
    states = {True: whole.weights.state(), False: spread.weights.state()}  # each taken over by the other kind
    same(*(trained(drafter, teacher, rows, recipe(shard=shard), state).weights.state() for shard, state in states.items()))
    exported = spread.weights.exported().state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in spread.weights.state()["model"].items())


def command(given: Job, work: Path) -> list[str]:
    """`given` as the ranks of torchrun start it."""
    manifests = {**given.inputs, **given.consulted}
    flags = [word for name, paths in manifests.items() for word in (f"--{name}", *map(str, paths))]
    said = ["--settings", json.dumps(given.settings), "--runtime", json.dumps(given.runtime), "--work", str(work)]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    return [*launcher, "-m", "scripts.train", *flags, "--output", str(given.output / "manifest.json"), *said]


def test_ranks_of_a_launcher_share_weights_and_go_on_where_one_process_stopped(tmp_path, monkeypatch):
    """Started by one process, which stops behind a checkpoint; ended by two ranks of torchrun that share all weights."""
    torch.set_num_threads(1)
    make_case(tmp_path, train_rows=12)
    whole = job(tmp_path, tmp_path / "whole", **SMALL_BATCHES)
    run(whole, train)
    begun = replace(whole, output=tmp_path / "shared", inputs={**whole.inputs, "base": ()}, consulted={"merged": ()})
    step, done = Trainer.step, []

    def stopping(*arguments: Any) -> Any:
        done.append(arguments)
        if len(done) == 4:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", stopping)
        run(begun, train)
    shared = replace(begun, runtime={**begun.runtime, "shard": True, "recompute": True})
    ended = subprocess.run(
        command(shared, begun.work), cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "resume at" in ended.stderr and ended.stderr.count("published") == 1
    assert json.loads((tmp_path / "shared" / "cost.json").read_text())["resumed"]
    for found, wanted in zip(curve(tmp_path / "shared"), curve(tmp_path / "whole"), strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)
