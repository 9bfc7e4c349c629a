"""Stage `train` on a tiny target: what it publishes, what it refuses, and that a killed run goes on bit for bit."""

import csv
import json
import multiprocessing
import os
import random
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from scripts.lib.eagle3.export import check_target, load_drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.states.format import write_shard
from scripts.lib.states.reader import read_shard
from scripts.lib.training.build import train
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.rows import load_rows, place, thinned
from scripts.lib.training.schedule import PlannedStep
from scripts.lib.training.trainer import Trainer
from tests.train_case import job, make_case, publish


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("case")
    make_case(root)
    return root


@pytest.fixture(scope="module")
def trained(case: Path) -> Path:
    """The folder of an uninterrupted run."""
    torch.set_num_threads(1)
    run(job(case, case / "once" / "eagle3"), train)
    return case / "once" / "eagle3"


PACKED = {"micro_tokens": 25, "precision": "bfloat16"}


@pytest.fixture(scope="module")
def packed_run(case: Path) -> Path:
    """The folder of an uninterrupted run on packed batches."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
        run(job(case, case / "packed" / "eagle3", **PACKED), train)
    return case / "packed" / "eagle3"


def copy_of(case: Path, to: Path) -> Path:
    for name in ("hidden", "vocab", "target"):
        shutil.copytree(case / name, to / name)
    return to


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


def test_untrained_random_drafter_accepts_next_to_nothing(case, tmp_path):
    run(job(case, tmp_path / "out", epochs=1, learning_rate=1e-9, warm_start=False), train)
    final = json.loads((tmp_path / "out" / "training.json").read_text())["final"]
    assert 1.0 <= final["accept_length_all"] < 1.15


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


def test_two_processes_train_what_one_does(case, trained, tmp_path):
    """Two ranks over gloo, some without a row in some steps: the same order of rows, and the same curve up to rounding."""
    two = job(case, tmp_path / "out", batch_tokens=60, patience=9, keep_best=True)
    run(Job(two.stage, two.output, two.inputs, two.settings, {**two.runtime, "ranks": 2}, two.work), train)
    for found, wanted in zip(curve(tmp_path / "out"), curve(trained), strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)
    assert load_drafter(tmp_path / "out" / "best", torch.float32, "cpu")


def test_an_error_in_one_process_ends_all_with_its_sentence(case, tmp_path):
    root = copy_of(case, tmp_path)
    rewrite_shards(root, lambda tensors: tensors["loss_spans"][:, 1].copy_(tensors["loss_spans"][:, 0] + 1))
    two = job(root, tmp_path / "out")
    with pytest.raises(StageError, match="none of 16 train rows has a trained position"):
        run(Job(two.stage, two.output, two.inputs, two.settings, {**two.runtime, "ranks": 2}, two.work), train)
