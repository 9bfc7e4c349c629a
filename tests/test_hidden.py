"""Stage hidden: shards of the merged rows, what is left out, and that a killed run ends with the same bytes."""

import errno
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from scripts.lib.engines.protocol import StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.states import hidden as stage
from scripts.lib.states import writer
from scripts.lib.states.encoded import decoded
from scripts.lib.states.hidden import hidden
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import plan_shards
from scripts.lib.states.storing import Storing, every_storing
from scripts.lib.training.rows import load_rows
from tests.stage_inputs import (
    data_files,
    finish,
    hidden_job,
    kill_when,
    publish_merged,
    publish_target,
    some_token_rows,
    token_row,
)

POISON = 258


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return load_target(target.parent, torch.float32, "cpu")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = some_token_rows(20)
    train.insert(3, token_row("one", [5, 6, 7], [(2, 3)]))
    train.insert(0, token_row("endless", [7] * 513, [(2, 513)]))
    return publish_merged(tmp_path_factory.mktemp("published") / "merged", train, some_token_rows(3, "e"))


def test_shards_hold_every_row_in_order_with_the_states_of_transformers(
    target: Path, merged: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    job = hidden_job(tmp_path, merged, target)
    run(job, hidden)
    manifest = read_manifest(job.output / "manifest.json", "hidden")
    assert manifest.counts.rejected == {"context_full": 1, "no_trained_position": 1} and manifest.counts.rows_in == 25
    assert {key: manifest.facts[key] for key in ("boundaries", "num_layers", "hidden_size", "final")} == {
        "boundaries": [2, 4, 5],
        "num_layers": 8,
        "hidden_size": 64,
        "final": "post-norm",
    }
    shards = [read_shard(job.output / shard.name) for shard in manifest.shards]
    assert [shard.name for shard in manifest.shards][-1] == "eval-00000.safetensors" and len(shards) > 3
    assert all(shard.tokens <= 150 and shard.tokens == record.tokens for shard, record in zip(shards, manifest.shards, strict=True))
    assert [name for shard in shards for name in shard.ids] == [f"r{number:02d}" for number in range(20)] + ["e00", "e01", "e02"]
    shard = shards[0]
    for row, (start_, end) in enumerate(zip(shard.row_offsets[:-1].tolist(), shard.row_offsets[1:].tolist(), strict=True)):
        output = model(shard.input_ids[None, start_:end].long(), output_hidden_states=True)
        wanted = torch.stack([output.hidden_states[boundary][0] for boundary in (2, 4, 5)], dim=1)
        assert torch.allclose(decoded(shard.aux[start_:end]).float(), wanted, rtol=2**-7, atol=1e-3), shard.ids[row]
        inside = (shard.final_index >= start_) & (shard.final_index < end)
        places = shard.final_index[inside] - start_
        assert torch.allclose(decoded(shard.final)[inside].float(), output.hidden_states[-1][0, places], rtol=2**-7, atol=1e-3)
        assert shard.argmax[inside].tolist() == output.logits[0, places].argmax(-1).tolist()


def test_the_estimate_is_the_size_of_the_files(target: Path, merged: Path, tmp_path: Path) -> None:
    job = hidden_job(tmp_path, merged, target)
    run(job, hidden)
    plans, _ = plan_shards(merged, 150, 512)
    for plan in plans:
        size = (job.output / plan.name).stat().st_size
        assert size <= plan.bytes(64, Storing()) <= size + 4096


def test_chosen_layers_are_checked(target: Path, merged: Path, tmp_path: Path) -> None:
    job = hidden_job(tmp_path, merged, target, layers=[1, 3, 7])
    run(job, hidden)
    assert read_manifest(job.output / "manifest.json", "hidden").facts["boundaries"] == [1, 3, 7]
    with pytest.raises(StageError, match=r"hidden\.layers"):
        run(hidden_job(tmp_path, merged, target, layers=[1, 3, 8]), hidden)


def poisoned(model: PreTrainedModel) -> TransformersEngine:
    """The engine whose embedding of token POISON is NaN."""
    engine = TransformersEngine(load_target(Path(model.config._name_or_path), torch.float32, "cpu"), frozenset())
    engine.model.model.embed_tokens.weight[POISON] = torch.nan
    return engine


def test_rows_that_are_not_finite_are_left_out_by_name_and_hurt_no_neighbour(
    target: Path, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = some_token_rows(6)
    clean = hidden_job(tmp_path, publish_merged(tmp_path / "clean", [train[0], *train[2:]], some_token_rows(1, "e")), target, "c")
    run(clean, hidden)
    bad = token_row("r01", [5, POISON, *train[1]["input_ids"][2:]], [(4, 16)])
    engine = poisoned(model)
    monkeypatch.setattr(stage, "open_engine", lambda *_: engine)
    job = hidden_job(tmp_path, publish_merged(tmp_path / "m", [train[0], bad, *train[2:]], some_token_rows(1, "e")), target)
    run(job, hidden)
    manifest = read_manifest(job.output / "manifest.json", "hidden")
    assert manifest.facts["quarantined"] == [["r01", "non_finite"]] and manifest.counts.rejected == {"non_finite": 1}
    left, right = (read_shard(path / "train-00000.safetensors") for path in (job.output, clean.output))
    assert left.ids == right.ids == ("r00", "r02", "r03", "r04", "r05")
    assert torch.allclose(decoded(left.aux).float(), decoded(right.aux).float(), rtol=2**-7, atol=1e-3)


def test_a_split_without_a_usable_row_is_an_error(
    target: Path, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = poisoned(model)
    monkeypatch.setattr(stage, "open_engine", lambda *_: engine)
    evil = [token_row("x", [5, POISON, 6, 7], [(1, 4)])]
    with pytest.raises(StageError, match=r"no row of split eval has usable states, rejected: \{'non_finite': 1\}"):
        run(hidden_job(tmp_path, publish_merged(tmp_path / "m", some_token_rows(4), evil), target), hidden)


def test_a_full_disk_is_said_before_any_forward_pass(target: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asked for the size before, and a dump of weeks ended at a full disk (SpecForge issue 426)."""
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(stage, "open_engine", lambda *_: pytest.fail("the engine must not be opened"))
    with pytest.raises(
        StageError, match=r"need [\d,]+ bytes, 1,000 are free; what would fit: about \d+ of the \d+ tokens .*; free some space"
    ):
        run(hidden_job(tmp_path, merged, target), hidden)


def test_the_budget_names_what_would_fit(target: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "open_engine", lambda *_: pytest.fail("the engine must not be opened"))
    plans, _ = plan_shards(merged, 150, 512)
    plain, _, fp8, smallest = (sum(plan.bytes(64, storing) for plan in plans) for storing in every_storing())
    assert smallest < fp8 < plain
    job = hidden_job(tmp_path, merged, target)
    tight = replace(job, runtime={**job.runtime, "max_bytes": fp8})
    with pytest.raises(StageError) as caught:
        run(tight, hidden)
    text = str(caught.value)
    assert f"all shards need {plain:,} bytes, hidden.max_bytes allows {fp8:,}; what would fit: hidden.stored: fp8" in text
    assert (
        f"hidden.stored: fp8 with hidden.compression: none ({fp8:,} bytes)" in text
        and "hidden.mode: rolling (" in text
        and "raise hidden.max_bytes" in text
    )
    assert tight.fingerprint() == job.fingerprint()  # raising the limit makes nothing stale


def test_states_that_come_and_go_need_room_for_two_shards(target: Path, merged: Path, tmp_path: Path) -> None:
    job = hidden_job(tmp_path, merged, target, mode="rolling")
    with pytest.raises(StageError, match=r"held-out rows and the two largest shards need [\d,]+ bytes, there is room for 150,000; lower"):
        run(replace(job, runtime={**job.runtime, "max_bytes": 150_000}), hidden)


@pytest.mark.parametrize("storing", list(every_storing())[1:], ids=str)
def test_states_stored_in_fewer_bytes_are_those_of_the_plain_run(target: Path, merged: Path, tmp_path: Path, storing: Storing) -> None:
    plain, small = (
        hidden_job(tmp_path, merged, target, name, **options)
        for name, options in (("plain", {}), ("small", {"stored": storing.dtype, "compression": storing.compression}))
    )
    for job in (plain, small):
        run(job, hidden)
    manifests = [read_manifest(job.output / "manifest.json", "hidden") for job in (plain, small)]
    assert manifests[0].counts == manifests[1].counts
    for shard in manifests[1].shards:
        one, other = (read_shard(job.output / shard.name) for job in (plain, small))
        wanted, got = decoded(one.aux).float(), decoded(other.aux).float()
        assert one.ids == other.ids and torch.equal(one.argmax, other.argmax)
        if storing.dtype == "bfloat16":
            assert torch.equal(wanted, got) and torch.equal(decoded(one.final), decoded(other.final))
        else:
            assert torch.allclose(wanted, got, rtol=0.07, atol=0.1)
            assert torch.allclose(decoded(one.final).float(), decoded(other.final).float(), rtol=0, atol=0.05)


def test_shards_do_not_depend_on_threads(target: Path, tmp_path: Path) -> None:
    """With other worker counts rows were lost, repeated or renamed (SpecForge, drop_last in capture)."""
    merged, outputs = publish_merged(tmp_path / "merged", some_token_rows(5), some_token_rows(1, "e")), []
    for name, threads in (("one", 1), ("two", 2)):
        job = hidden_job(tmp_path, merged, target, name)
        run(replace(job, runtime={**job.runtime, "threads": threads}), hidden)
        outputs.append(data_files(job.output))
    torch.set_num_threads(1)
    assert outputs[0] == outputs[1]
    names = [row for name in outputs[0] if name.endswith("safetensors") for row in read_shard(tmp_path / "one" / name).ids]
    assert sorted(names) == ["e00", "r00", "r01", "r02", "r03", "r04"]


def test_layers_that_are_spread_over_devices_give_the_same_states(target: Path, merged: Path, tmp_path: Path) -> None:
    """`device_map` decides no byte. Offloaded weights go through the same hooks of accelerate as those on other GPUs."""
    outputs = []
    for name, device_map in (("one", None), ("spread", "auto")):
        job = hidden_job(tmp_path, merged, target, name)
        run(replace(job, runtime={**job.runtime, "device_map": device_map}), hidden)
        outputs.append(data_files(job.output))
    assert outputs[0] == outputs[1]
    rows = [StateRequest(tuple(range(3, 3 + length)), (4, 5)) for length in (20, 12)]
    plain, spread = (TransformersEngine(load_target(target.parent, torch.float32, "cpu"), frozenset()) for _ in range(2))
    cpu_offload(spread.model, execution_device=torch.device("cpu"))
    assert spread.model.device.type == "meta" and spread.device.type == "cpu"
    for one, other in zip(plain.states(rows, [2, 4, 5]), spread.states(rows, [2, 4, 5]), strict=True):
        assert torch.equal(one.aux, other.aux) and torch.equal(one.final, other.final) and torch.equal(one.argmax, other.argmax)
    alone = [engine.reference(rows[0].input_ids, [2, 4, 5]) for engine in (plain, spread)]
    assert all(torch.equal(*pair) for pair in zip(*alone, strict=True))


def test_the_manifest_says_of_which_target_the_states_are(merged: Path, tmp_path: Path) -> None:
    """Peers' files name neither layers nor target, and differ by a layer in silence."""
    folder = publish_target(tmp_path / "target").parent
    files = [Shard.of(folder / name, 0) for name in ("tokenizer.json", "tokenizer_config.json")]
    known = {"source": "hub:org/model", "revision": "abc", "chat_template_sha256": "0" * 64, "eos_ids": [2]}
    Manifest("target", {}, {}, Counts(0, 0), files, known).write(folder)
    job = hidden_job(tmp_path, merged, folder / "manifest.json")
    run(job, hidden)
    facts = read_manifest(job.output / "manifest.json", "hidden").facts
    named = {f"{file.name}_sha256": file.sha256 for file in files}
    assert facts["target"] == {"source": "hub:org/model", "revision": "abc", "chat_template_sha256": "0" * 64} | named
    assert facts["engine"] == "transformers" and set(facts["versions"]) == {"torch", "transformers"} and facts["mode"] == "dumped"


def test_a_stray_file_is_no_shard(target: Path, merged: Path, tmp_path: Path) -> None:
    """A file of another kind in the folder was counted as a sample (SpecForge, `vocab_mapping.ckpt`)."""
    job = hidden_job(tmp_path, merged, target)
    run(job, hidden)
    shutil.copy(job.output / "train-00000.safetensors", job.output / "train-99999.safetensors")
    manifest = read_manifest(job.output / "manifest.json", "hidden")
    assert len(load_rows(job.output, manifest, "train").rows) == sum(s.rows for s in manifest.shards if s.name.startswith("train"))


def test_answers_that_the_target_would_not_write_stop_the_stage(target: Path, merged: Path, tmp_path: Path) -> None:
    job = hidden_job(tmp_path, merged, target)
    with pytest.raises(StageError, match=r"of \d+ tokens of greedy answers are not what the target would write.* of toy"):
        run(replace(job, settings={**job.settings, "greedy": ["toy"]}), hidden)


def test_a_full_disk_in_mid_dump_loses_no_finished_shard(
    target: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, whole = (hidden_job(tmp_path / name, merged, target) for name in ("full", "whole"))
    run(whole, hidden)
    made: list[str] = []
    write = writer.write_rows

    def full(path: Path, *rest: Any) -> str:
        if len(made) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        made.append(path.name)
        return write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rows", full)
        with pytest.raises(OSError, match="No space left"):
            run(job, hidden)
    kept = {path.name: path.stat().st_mtime_ns for path in job.work.glob("hidden/*/*.safetensors")}
    assert sorted(kept) == sorted(made) and not job.output.exists()
    run(job, hidden)
    assert data_files(job.output) == data_files(whole.output)
    assert all((job.output / name).stat().st_mtime_ns == moment for name, moment in kept.items())


def test_a_write_that_fails_keeps_finished_shards_and_says_where(target: Path, merged: Path, tmp_path: Path) -> None:
    """A dump into a full disk once left half a file under its final name (Model-Optimizer pull 2080)."""
    job = hidden_job(tmp_path, merged, target)
    code, log = finish(job, tmp_path / "log", file_limit=70_000)
    last = log.strip().splitlines()[-1]
    assert code == 1 and "Traceback" not in log
    assert "ERROR the disk is full while writing" in last and "train-00000.safetensors" in last and f"Errno {errno.EFBIG}" in last
    assert not job.output.exists() and not list(job.work.glob("hidden/*/train-*.safetensors"))


def test_finished_shards_are_kept_and_torn_ones_made_again(
    target: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = hidden_job(tmp_path, merged, target), tmp_path / "folder"
    folder.mkdir()
    hidden(job, folder)
    shards = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    (folder / "train-00001.safetensors").unlink()
    (folder / "partial" / "train-00002.safetensors.json").unlink()
    (folder / "train-00002.safetensors").write_bytes(shards["train-00002.safetensors"][:500])
    (folder / ".train-00003.safetensors.part").write_bytes(b"left over")
    made: list[str] = []
    write = writer.write_rows

    def noted(path: Path, *rest: Any) -> str:
        made.append(path.name)
        return write(path, *rest)

    monkeypatch.setattr(writer, "write_rows", noted)
    hidden(job, folder)
    assert made == ["train-00001.safetensors", "train-00002.safetensors"]
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == shards


def test_a_finished_shard_that_cannot_be_read_is_refused(target: Path, merged: Path, tmp_path: Path) -> None:
    job, folder = hidden_job(tmp_path, merged, target), tmp_path / "folder"
    folder.mkdir()
    hidden(job, folder)
    path = folder / "train-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StageError, match=r"train-00001\.safetensors: not a readable shard.*delete"):
        hidden(job, folder)


def test_killed_runs_end_with_the_bytes_of_an_uninterrupted_one(target: Path, tmp_path: Path) -> None:
    merged = publish_merged(tmp_path / "merged", some_token_rows(60), some_token_rows(4, "e"))
    options: dict[str, Any] = {"tokens_per_shard": 60, "batch_tokens": 64}
    whole = hidden_job(tmp_path / "whole", merged, target, **options)
    run(whole, hidden)
    killed = hidden_job(tmp_path / "killed", merged, target, **options)
    moments = random.Random(4)
    for shards, pattern in ((1, "*.safetensors"), (4, "partial/*.json"), (9, "*.safetensors")):
        kill_when(killed, shards, pattern, moments.uniform(0, 0.1), tmp_path / "log")
        assert not killed.output.exists()
    code, log = finish(killed, tmp_path / "log")
    assert code == 0 and "resume at" in log, log
    assert data_files(killed.output) == data_files(whole.output)
    assert pl.DataFrame(json.loads((killed.output / "manifest.json").read_text())["shards"])["rows"].sum() == 64
