"""Stage `train` on a tiny target: what it publishes, what it refuses, and that a killed run goes on bit for bit."""

import csv
import json
import multiprocessing
import os
import random
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from scripts.lib.eagle3.export import load_drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.training.build import train
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.rows import load_rows, place, thinned
from scripts.lib.training.schedule import PlannedStep
from scripts.lib.training.trainer import Trainer
from tests.train_case import job

pytest_plugins = ["tests.train_parts"]


PACKED = {"micro_tokens": 25, "precision": "bfloat16"}


@pytest.fixture(scope="module")
def packed_run(case: Path) -> Path:
    """The folder of an uninterrupted run on packed batches."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
        run(job(case, case / "packed" / "eagle3", **PACKED), train)
    return case / "packed" / "eagle3"


def test_publishes_the_folder_that_engines_load(trained):
    assert sorted(path.name for path in trained.iterdir()) == [
        "config.json",
        "cost.json",
        "curves.csv",
        "events.out.tfevents.curve",
        "manifest.json",
        "model.safetensors",
        "training.json",
    ]
    drafter = load_drafter(trained, torch.float32, "cpu")
    assert drafter.config.boundaries == (2, 4, 5)


def test_curve_has_a_row_a_step_and_evaluations_every_few_steps(trained):
    rows = list(csv.DictReader((trained / "curves.csv").open()))
    figures = json.loads((trained / "training.json").read_text())
    assert [int(row["step"]) for row in rows] == list(range(1, figures["steps"] + 1))
    evaluated = [int(row["step"]) for row in rows if row["eval_loss"]]
    assert evaluated == [step for step in range(1, len(rows) + 1) if step % 4 == 0 or step == len(rows)]
    assert float(rows[-1]["eval_loss"]) == figures["final"]["loss"]
    assert sum(int(row["trained_tokens"]) for row in rows) == 2 * figures["trained_tokens_per_epoch"]
    assert {row["epoch"] for row in rows} == {"1", "2"}


def test_loss_falls_below_the_start_when_trained_longer(case, tmp_path):
    run(job(case, tmp_path / "out", epochs=16, learning_rate=0.01, warm_start=False), train)
    losses = [float(row["loss_0"]) for row in csv.DictReader((tmp_path / "out" / "curves.csv").open())]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_manifest_counts_rows_and_describes_the_weights(trained):
    manifest = read_manifest(trained / "manifest.json", "train")
    assert (manifest.counts.rows_in, manifest.counts.rows_out) == (20, 20)
    assert manifest.shards[0].name == "model.safetensors"
    assert manifest.facts["boundaries"] == [2, 4, 5]


def test_fractions_are_nested_and_share_the_held_out_rows(case, tmp_path):
    whole = load_rows(case / "hidden", read_manifest(case / "hidden" / "manifest.json", "hidden"), "train")
    parts = [{row.id for row in thinned(whole, fraction, seed=7).rows} for fraction in (0.25, 0.5, 0.75, 1.0)]
    assert all(small < large for small, large in pairwise(parts))
    assert {row.id for row in thinned(whole, 0.5, seed=8).rows} != parts[1]
    run(job(case, tmp_path / "half", epochs=1, fraction=0.5), train)
    figures, manifest = json.loads((tmp_path / "half/training.json").read_text()), read_manifest(tmp_path / "half/manifest.json", "train")
    assert (figures["train_rows"], figures["heldout_rows"]) == (len(parts[1]), 4)
    assert figures["trained_tokens_per_epoch"] == sum(len(row.slots) for row in whole.rows if row.id in parts[1])
    assert manifest.counts.rejected == {"outside the fraction": 16 - len(parts[1])}


def test_turns_of_one_conversation_share_a_fraction_and_ten_thousand_of_them_are_spread_evenly():
    assert place("chat#7", 7) == place("chat#12", 7) == place("chat", 7) != place("chat#x", 7)
    places = sorted(place(f"row-{number}", 7) for number in range(10_000))
    assert max(abs(found - index / 10_000) for index, found in enumerate(places)) < 0.02


def test_a_fraction_that_leaves_nothing_is_refused(case, tmp_path):
    with pytest.raises(StageError, match="fraction 1e-09 leaves none of 16 train rows"):
        run(job(case, tmp_path / "out", fraction=1e-9), train)


def test_two_layers_learn_on_packed_batches_what_they_learn_on_rows(case, tmp_path, monkeypatch):
    """In float32 with several batches a step, evaluations included; every layer moves, and the loss falls below that of one layer."""
    longer = {"layers": 2, "epochs": 6, "learning_rate": 0.01}
    run(job(case, tmp_path / "rows", **longer), train)
    monkeypatch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
    run(job(case, tmp_path / "packed", micro_tokens=25, **longer), train)
    found, wanted = curve(tmp_path / "packed"), curve(tmp_path / "rows")
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)
    moved = load_drafter(tmp_path / "packed", torch.float32, "cpu").decoder[1]
    assert all(weight.abs().max() > 1e-3 for weight in (moved.self_attn.o_proj.weight, moved.mlp.down_proj.weight))


def curve(folder: Path) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader((folder / "curves.csv").open())]


def test_packed_batches_train_as_rows_do(case, trained, tmp_path, monkeypatch):
    """In float32 with several batches a step: the same curve up to rounding, evaluations included."""
    monkeypatch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
    run(job(case, tmp_path / "out", micro_tokens=25), train)
    for found, wanted in zip(curve(tmp_path / "out"), curve(trained), strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)


def test_smaller_batches_add_up_to_the_same_step(case, trained, tmp_path):
    run(job(case, tmp_path / "out", micro_tokens=25), train)
    for found, wanted in zip(curve(tmp_path / "out"), curve(trained), strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)


def killed_at(case_job: Job, step: int) -> None:
    """Run `case_job` and send this process SIGKILL in the middle of `step`."""
    torch.set_num_threads(1)
    original = Trainer.step
    done: list[PlannedStep] = []

    def dying(self, planned, batches, work):
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(planned)
        return original(self, planned, batches, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", dying)
        run(case_job, train)


@pytest.mark.parametrize("path", ["rows", "packed"])
def test_killed_run_goes_on_from_its_checkpoint_bit_for_bit(case, trained, packed_run, path, monkeypatch):
    """The packed path, which a GPU takes, computes several batches a step here; what it then publishes is complete."""
    trained = {"rows": trained, "packed": packed_run}[path]
    settings = {}
    if path == "packed":
        settings = PACKED
        monkeypatch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
    again = job(case, case / "killed" / path, **settings)
    steps = json.loads((trained / "training.json").read_text())["steps"]
    step = random.randrange(3, steps)
    child = multiprocessing.get_context("fork").Process(target=killed_at, args=(again, step))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not again.output.exists()
    seen, original = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, planned, *rest: (seen.append(planned), original(self, planned, *rest))[1])
    run(again, train)
    assert len(seen) == steps - step // 2 * 2, "checkpoints come every two steps"
    for name in ("curves.csv", "events.out.tfevents.curve", "model.safetensors", "training.json", "config.json"):
        assert (again.output / name).read_bytes() == (trained / name).read_bytes(), f"{name} after a kill at step {step}"
    assert json.loads((again.output / "cost.json").read_text())["resumed"]


def test_stops_when_the_held_out_rows_gain_nothing_and_keeps_the_best_weights(case, tmp_path):
    """A learning rate that wrecks the drafter: the first evaluation stays the best, so training stops two evaluations later."""
    run(job(case, tmp_path / "out", epochs=6, learning_rate=1.0, patience=2, keep_best=True, eval_every=2), train)
    figures = json.loads((tmp_path / "out" / "training.json").read_text())
    assert figures["steps"] == figures["best"]["step"] + 4
    assert figures["final"]["accept_length_all"] <= figures["best"]["accept_length_all"]
    best, last = (load_drafter(folder, torch.float32, "cpu") for folder in (tmp_path / "out" / "best", tmp_path / "out"))
    assert not torch.equal(best.fc.weight, last.fc.weight)
    names = [shard.name for shard in read_manifest(tmp_path / "out" / "manifest.json", "train").shards]
    assert names == ["model.safetensors", "best/model.safetensors"]


@pytest.mark.parametrize("loss", ["hard", "lk_alpha", "lk_lambda"])
def test_eagle_3_1_and_other_losses_train_and_export(case, tmp_path, loss):
    run(job(case, tmp_path / "out", epochs=8, learning_rate=0.01, warm_start=False, loss=loss, fc_norm=True, norm_output=True), train)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["fc_norm"] and config["norm_output"]
    drafter = load_drafter(tmp_path / "out", torch.float32, "cpu")
    assert {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"} <= drafter.state_dict().keys()
    losses = [row["loss_0"] for row in curve(tmp_path / "out")]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_other_seed_gives_another_order(case, trained, tmp_path):
    other = job(case, tmp_path / "out")
    run(Job(other.stage, other.output, other.inputs, {**other.settings, "seed": 8}, other.runtime, other.work), train)
    assert (tmp_path / "out" / "curves.csv").read_bytes() != (trained / "curves.csv").read_bytes()


def test_two_processes_train_what_one_does(case, trained, tmp_path):
    """Two ranks over gloo, some without a row in some steps: the same order of rows, and the same curve up to rounding."""
    two = job(case, tmp_path / "out", batch_tokens=60, patience=9, keep_best=True)
    run(Job(two.stage, two.output, two.inputs, two.settings, {**two.runtime, "ranks": 2}, two.work), train)
    for found, wanted in zip(curve(tmp_path / "out"), curve(trained), strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)
    assert load_drafter(tmp_path / "out" / "best", torch.float32, "cpu")
