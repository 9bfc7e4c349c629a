"""The frame around the stages: work folders, manifests, provenance, and the last line of a log."""

import json
import logging
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

import pytest

from scripts.lib.ground import provenance
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import claimed, publish, write_bytes, write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard, read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.sources import Sources, kept_at
from scripts.lib.ground.stage import Job, Result, guarded, run


def manifest_of(stage="merge", **facts):
    return Manifest(stage=stage, settings={"a": 1}, inputs={}, counts=Counts(3, 2, {"empty": 1}), facts=facts)


def job_in(folder: Path, stage="merge", **settings) -> Job:
    return Job(stage=stage, output=folder / "results/run/merged", inputs={}, settings=settings, work=folder / "results/work")


def test_counts_must_add_up():
    with pytest.raises(StageError, match="1 rows have no reason"):
        Counts(rows_in=3, rows_out=1, rejected={"empty": 1})


def test_a_manifest_survives_the_round_trip(tmp_path):
    manifest_of(rows=2).write(tmp_path)
    assert read_manifest(tmp_path / "manifest.json", "merge").facts == {"rows": 2}


def test_a_manifest_of_another_stage_is_refused(tmp_path):
    manifest_of("vocab").write(tmp_path)
    with pytest.raises(StageError, match=r"written by stage vocab.*wanted stage merge.*delete it"):
        read_manifest(tmp_path / "manifest.json", "merge")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b"shor"), "4 bytes, the manifest says 5"),
        (lambda path: path.write_bytes(b"helly"), "sha256"),
    ],
)
def test_a_damaged_shard_is_refused_with_its_name_and_the_remedy(tmp_path, damage, message):
    path = tmp_path / "rows-00000.parquet"
    path.write_bytes(b"hello")
    shard = Shard.of(path, rows=1)
    assert checked_shard(tmp_path, shard) == path
    damage(path)
    with pytest.raises(StageError, match=rf"rows-00000.parquet: .*{message}.*delete .*manifest.json and run again"):
        checked_shard(tmp_path, shard)


def test_a_stage_publishes_manifest_and_cost_and_clears_its_work(tmp_path):
    def build(job, folder):
        (folder / "partial").mkdir()
        (folder / "rows").write_text("x")
        return Result(manifest_of(), cost={"rows_per_s": 1.0})

    run(job_in(tmp_path), build)
    output = tmp_path / "results/run/merged"
    assert sorted(path.name for path in output.iterdir()) == ["cost.json", "manifest.json", "rows"]
    assert json.loads((output / "cost.json").read_text())["rows_per_s"] == 1.0
    assert not any((tmp_path / "results/work/merge").iterdir())


def test_a_finished_work_folder_is_only_published(tmp_path):
    job = job_in(tmp_path)
    folder = job.work / job.stage / job.fingerprint()
    folder.mkdir(parents=True)
    manifest_of(made="before the kill").write(folder)
    run(job, lambda job, folder: pytest.fail("the work was finished"))
    assert read_manifest(job.output / "manifest.json", "merge").facts == {"made": "before the kill"}


def test_other_settings_have_another_work_folder(tmp_path):
    assert job_in(tmp_path, size=1).fingerprint() != job_in(tmp_path, size=2).fingerprint()


def test_runtime_settings_share_the_work_folder(tmp_path):
    job = job_in(tmp_path)
    other = Job(job.stage, job.output, job.inputs, job.settings, {"threads": 8}, job.work)
    assert job.fingerprint() == other.fingerprint()


def built(job: Job) -> int:
    """How often `run` builds."""
    calls = []

    def build(job: Job, folder: Path) -> Result:
        calls.append(folder)
        (folder / "rows.parquet").write_bytes(b"rows")
        return Result(manifest_of(job.stage))

    run(job, build)
    return len(calls)


def test_equal_work_that_is_published_is_not_done_again(tmp_path):
    """Snakemake starts every job below one that ran, also when that one gave equal bytes."""
    job = job_in(tmp_path, a=1)
    assert built(job) == 1
    rows, manifest = job.output / "rows.parquet", job.output / "manifest.json"
    for path in (rows, manifest):
        os.utime(path, (1, 1))
    assert built(job) == 0
    assert min(rows.stat().st_mtime, manifest.stat().st_mtime) > 1  # as new as its inputs, or it would be stale for ever
    rows.write_bytes(b"r")
    assert built(job) == 1
    manifest.unlink()
    assert built(job) == 1
    manifest.write_text(manifest.read_text().replace("merge", "other"))  # put back by Snakemake over what a failed job had published
    assert built(job) == 1
    assert built(job_in(tmp_path, a=2)) == 1
    assert built(job) == 1


def test_publish_replaces_what_was_there(tmp_path):
    for text in ("old", "new"):
        work = tmp_path / "work"
        work.mkdir()
        (work / text).write_text(text)
        publish(work, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_an_output_on_another_disk_is_refused_before_the_work(tmp_path):
    """A run's folder linked to a larger disk, say: the rename at the end of hours would fail."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        assert Path(elsewhere).stat().st_dev != tmp_path.stat().st_dev
        (tmp_path / "results").mkdir()
        (tmp_path / "results/run").symlink_to(elsewhere)
        with pytest.raises(StageError, match=r"results/run/merged would be .*on another disk.*keep results/ whole on one disk"):
            run(job_in(tmp_path), lambda *_: pytest.fail("the work had begun"))
        (tmp_path / "results/run").unlink()
        run(job_in(tmp_path), lambda job, folder: Result(manifest_of()))


def hold(folder: Path, ready) -> None:
    with claimed(folder):
        ready.set()
        time.sleep(60)


def test_a_folder_in_use_is_refused_and_free_again_after_kill_9(tmp_path):
    ready = multiprocessing.Event()
    holder = multiprocessing.Process(target=hold, args=(tmp_path / "w", ready))
    holder.start()
    assert ready.wait(30)
    with pytest.raises(StageError, match=f"process {holder.pid} still works here"), claimed(tmp_path / "w"):
        pass
    holder.kill()
    holder.join()
    with claimed(tmp_path / "w"):
        pass


def last_line(action, caplog) -> str:
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as exit_info:
        guarded("merge", action)
    assert exit_info.value.code == 1
    return caplog.records[-1].getMessage()


def test_the_last_line_of_a_failed_stage_is_the_error(caplog):
    def action():
        raise StageError("rows.jsonl: 0 rows,\n limit 1; set truncated: keep")

    assert last_line(action, caplog) == "ERROR rows.jsonl: 0 rows, limit 1; set truncated: keep"
    assert not any(record.exc_info for record in caplog.records)


def test_a_full_disk_ends_in_one_clear_line(caplog, tmp_path):
    def action():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        write_bytes(tmp_path / "big", bytes(5000))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        line = last_line(action, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line.startswith("ERROR the disk is full") and "start again, finished work is kept" in line
    assert not (tmp_path / "big").exists()


def test_a_bug_shows_its_traceback_before_the_last_line(caplog):
    assert last_line([].pop, caplog) == "ERROR IndexError: pop from empty list"
    assert any(record.exc_info for record in caplog.records)


def test_the_digest_of_code_ignores_comments_and_docstrings(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    texts = ['"""Doc."""\n\nx = 1  # note\n', "x = 1\n", "x = 2\n"]
    for index, text in enumerate(texts):
        (tmp_path / f"m{index}.py").write_text(text)
    digests = [provenance.digest(f"m{index}.py") for index in range(3)]
    assert digests[0] == digests[1] != digests[2]


def test_what_was_found_out_about_a_file_is_kept_by_its_bytes(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("from b import c  # note\n")
    first = Sources.below(tmp_path)
    found = first.imports("a.py"), first.digest("a.py")
    first.keep()
    (tmp_path / "moved.py").write_text("from b import c  # note\n")
    with monkeypatch.context() as patch:
        patch.setattr("ast.parse", None)
        later = Sources.below(tmp_path)
        assert found == (later.imports("moved.py"), later.digest("moved.py")) == (["b", "b.c"], found[1])
    (tmp_path / "a.py").write_text("from b import d\n")
    assert later.imports("a.py") == ["b", "b.d"] and later.digest("a.py") != found[1]
    kept_at(tmp_path).write_text('{"torn')
    assert Sources.below(tmp_path).digest("moved.py") == found[1]
    assert [path.name for path in kept_at(tmp_path).parent.iterdir()] == [kept_at(tmp_path).name]


def test_the_closure_follows_imports_inside_functions():
    assert "scripts/lib/ground/files.py" in provenance.closure("scripts/lib/ground/stage.py")
    assert "scripts/lib/__init__.py" in provenance.closure("scripts/lib/ground/stage.py")


def test_a_result_depends_on_no_code_that_decides_no_byte_of_it():
    """Else a better display of progress, or another way to end a server, would have drafters trained again."""
    rooms = {
        stage: {part for path in provenance.closure(f"scripts/{stage}.py") for part in path.split("/")[2:3]}
        for stage in ("generate", "train")
    }
    assert {"generation", "serving"} <= rooms["generate"] and "training" in rooms["train"]
    assert "watching" not in rooms["generate"] and not rooms["train"] & {"watching", "serving", "sharing"}


def test_progress_writes_rate_and_eta(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        progress = Progress(tmp_path, total=4, unit="rows", done=1)
        progress.add(1, tokens=10)
        progress.add(2, tokens=20)
    state = json.loads((tmp_path / "progress.json").read_text())
    assert (state["done"], state["total"], state["eta_seconds"]) == (4, 4, 0)
    assert "resume at 1 of 4 rows" in caplog.text and "ETA 0:00:00" in caplog.text


def test_files_are_whole_or_absent(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": [1]})
    assert (tmp_path / "a.json").read_text() == '{\n "a": [\n  1\n ],\n "b": 1\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]
