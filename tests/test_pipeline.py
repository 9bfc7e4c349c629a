"""The whole pipeline on a toy: what it makes, and that kill -9 in any stage costs only work in flight."""

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scripts.lib.ground.files import sha256_file
from scripts.lib.ground.manifest import read_manifest
from tests.toy import command, edit_config, make_toy, snakemake, toy_config, write_config

COLUMNS = (
    "task,variant,drafter,concurrency,baseline_tok_s,tok_s,speedup,accept_length,ceiling,break_even_accept_length,"
    "identical,near_tie,prompts,completion_tokens,notes"
)
# What must not depend on interruptions: everything but times.
COMPARED = ("merged/*", "vocab/*", "hidden/*", "drafters/eagle3/*", "responses/*/*", "tokens/*/*")


def comparable(directory: Path) -> dict[str, str]:
    """Digest of every file that is the same in every run, by path."""
    root = directory / "results/toy"
    files = {path for pattern in COMPARED for path in root.glob(pattern)}
    return {str(path.relative_to(root)): sha256_file(path) for path in sorted(files) if path.name != "cost.json"}


def test_the_table_has_one_row_per_variant_and_task_and_one_of_the_target_alone(finished):
    text = (finished / "results/toy/report/benchmark.csv").read_text()
    assert text.startswith(f"{COLUMNS},")
    rows = list(csv.DictReader(text.splitlines()))
    table = [(task, variant) for task in ("task0", "task1") for variant in ("baseline", "chain2")]
    assert [(row["task"], row["variant"]) for row in rows] == table
    for row in rows[1::2]:
        assert (row["identical"], row["prompts"], row["ceiling"]) == ("3", "3", "3")


def test_every_stage_accounts_for_its_rows(finished):
    manifests = sorted((finished / "results/toy").rglob("manifest.json"))
    assert len(manifests) == 23
    for path in manifests:
        counts = json.loads(path.read_text())["counts"]
        assert counts["rows_in"] == counts["rows_out"] + sum(counts["rejected"].values()), path


def test_an_up_to_date_run_has_nothing_to_do(finished):
    assert "Nothing to be done" in snakemake(finished, "--dry-run")


def killed_in(directory: Path, stage: str) -> None:
    """Run until `stage` has put something into its work folder, then kill -9 the whole process group."""
    run = subprocess.Popen(command(), cwd=directory, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not any((directory / "results/work" / stage).glob("*/*")) and run.poll() is None:
        assert time.monotonic() < limit, f"{stage} never began"
        time.sleep(0.02)
    assert run.poll() is None, f"the run ended before {stage} could be killed"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def test_kill_9_in_generate_hidden_and_train_then_the_same_command(finished, tmp_path):
    directory = make_toy(tmp_path / "work")
    write_config(directory, toy_config(finished / "data"))
    for stage in ("generate", "hidden", "train"):
        killed_in(directory, stage)
        assert not (directory / "results/toy/report/manifest.json").exists()
    snakemake(directory)
    assert comparable(directory) == comparable(finished)


def failure(directory: Path) -> str:
    """The last line of the log of the only failing stage."""
    done = subprocess.run(command("--retries", "0"), cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    lines = {path.read_text().splitlines()[-1] for path in (directory / "results/toy/logs").rglob("*.log") if path.stat().st_size}
    (line,) = {line for line in lines if "ERROR" in line}
    return line


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        pytest.param(lambda c: c["vocab"].update(size=5000), "5000", id="draft vocabulary larger than the target's"),
        pytest.param(lambda c: c["datasets"]["set0"]["columns"].update(messages="turns"), "set0", id="every row rejected"),
        pytest.param(lambda c: c["target"].update(source="path:data/bare"), "chat template", id="no chat template"),
    ],
)
def test_bad_input_stops_its_stage_and_keeps_the_rest(workdir, edit, wanted):
    bare = workdir / "data/bare"
    bare.mkdir()
    for path in (workdir / "data/target").iterdir():
        if path.name != "chat_template.jinja":
            (bare / path.name).write_bytes(path.read_bytes())
    before = comparable(workdir)
    edit_config(workdir, edit)
    assert wanted in failure(workdir)
    assert comparable(workdir).items() >= {path: digest for path, digest in before.items() if path.startswith("tokens/set1")}.items()


def test_a_corrupt_shard_stops_the_stage_that_reads_it(workdir):
    shard = next((workdir / "results/toy/hidden").glob("train-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    edit_config(workdir, lambda c: c["drafters"]["eagle3"].update(learning_rate=2e-4))
    line = failure(workdir)
    assert shard.name in line and "sha256" in line and "delete" in line


def test_what_a_failed_job_did_not_make_anew_stays_stale(workdir):
    """Snakemake puts back what a failed job was to replace, as new as the moment, and forgets what had made it."""
    shard = next((workdir / "results/toy/hidden").glob("train-*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    edit_config(workdir, lambda c: c["drafters"]["eagle3"].update(learning_rate=2e-4))
    drafter = workdir / "results/toy/drafters/eagle3"
    before = (drafter / "model.safetensors").read_bytes()
    failure(workdir)
    assert (drafter / "model.safetensors").read_bytes() == before, "finished work stays"
    shard.write_bytes(data)
    snakemake(workdir, "results/toy/drafters/eagle3/manifest.json")
    assert read_manifest(drafter / "manifest.json", "train").settings["drafter"]["learning_rate"] == 2e-4


def test_a_failed_job_stays_stale_when_the_run_is_killed_before_it_ends(workdir):
    """The others go on after a failure, for hours maybe. What the failed one was to replace once counted as made meanwhile."""
    drafters = ("results/toy/drafters/eagle3/manifest.json", "results/toy/drafters/long/manifest.json")
    edit_config(workdir, lambda c: c["drafters"].update(long=c["drafters"]["eagle3"] | {"epochs": 10000}))
    edit_config(workdir, lambda c: c["drafters"]["eagle3"].update(learning_rate=1e30))
    with (workdir / "said").open("w") as said:
        words = command("--retries", "0", "--cores", "2", "--", *drafters)
        run = subprocess.Popen(words, cwd=workdir, start_new_session=True, stdout=said, stderr=said)
    limit = time.monotonic() + 120
    while "Restored previous version of results/toy/drafters/eagle3" not in (workdir / "said").read_text():
        assert time.monotonic() < limit and run.poll() is None, (workdir / "said").read_text()
        time.sleep(0.1)
    time.sleep(1)
    assert run.poll() is None, "the other one goes on"
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert read_manifest(workdir / drafters[0], "train").settings["drafter"]["learning_rate"] < 1
    assert "Nothing to be done" not in snakemake(workdir, "--dry-run", "--", drafters[0])
