"""Stage `deploy`: the folder to hand on, the setting it serves with, its scripts, and the check of a server."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.deploying import checking
from scripts.lib.deploying.build import deploy
from scripts.lib.deploying.checking import check_served
from scripts.lib.deploying.choosing import best_choice, verdict
from scripts.lib.deploying.serving import measured_flags, paired
from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.walking import QUESTIONS
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.reporting.cells import with_unknown
from tests.report_parts import cell, publish_run
from tests.tiny import save_tiny_target
from tests.toy import snakemake

COMMAND = [
    *("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/a/target", "--host", "127.0.0.1", "--port", "4711"),
    *("--mem-fraction-static", "0.4", "--dtype", "bfloat16", "--disable-overlap-schedule", "--speculative-algorithm", "EAGLE3"),
    *("--speculative-draft-model-path", "/a/drafters/fast", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4", "--json-model-override-args", '{"a": "b c"}'),
]
RECIPE = {"epochs": 3, "fraction": 0.5, "batch_tokens": 400, "learning_rate": 0.001, "ttt_steps": 5, "ttt_decay": 0.8}
FACTS = {
    "boundaries": [2, 4, 5],
    "steps": 12,
    "final": {"accept_length_all": 1.9, "accuracies": [0.5, 0.4]},
}


def served_cell(task, variant, speedup, **changes):
    """A cell of the engine sglang."""
    served = {"engine": "sglang", "drafter": "fast", "ceiling": 4, "draft_steps": 3, "speedup": speedup, "accept_length": 2.4}
    return cell(task, variant) | served | {"server": {"command": COMMAND}, "versions": {"sglang": "0.5.17"}} | changes


def publish_drafter(root: Path, name: str) -> Path:
    """A drafter's folder."""
    folder = root / "drafters" / name
    folder.mkdir(exist_ok=True, parents=True)
    for file in ("config.json", "model.safetensors", "training.json", "curves.csv"):
        (folder / file).write_text(f"{file} of {name}")
    weights = Shard.of(folder / "model.safetensors", 70, 9000)
    Manifest("train", {"drafter": RECIPE, "name": name, "seed": 7}, {}, Counts(70, 70), [weights], FACTS).write(folder)
    (folder / "cost.json").write_text(json.dumps({"seconds": 1.0, "resumed": False, "peak_memory_bytes": 1}))
    return folder / "manifest.json"


def publish_facts(root: Path) -> None:
    """What the page says of target and vocabulary."""
    target = {"source": "wheel:llm==1", "architecture": "LlamaForCausalLM", "hidden_size": 576, "chat_template_sha256": "ab" * 32}
    vocabulary = {"size": 8192, "target_size": 49152, "coverage": {"eval": 0.95}}
    for stage, facts in (("target", target), ("vocab", vocabulary)):
        Manifest(stage, {}, {}, Counts(1, 1), [], facts).write(root / stage)


@pytest.fixture
def deployed(tmp_path):
    """A published deployment of the faster of two drafters, beside a tiny target."""
    root = tmp_path / "results/toy"
    cells = [served_cell(task, variant, speedup) for task, variant, speedup in SPEEDS]
    cells += [served_cell("mtbench", "other", 0.9, drafter="slow"), cell("mtbench", "loop", drafter="fast", speedup=3.0)]
    job = publish_run(root, cells)
    publish_facts(root)
    drafters = [publish_drafter(root, name) for name in ("fast", "slow")]
    run(replace(job, stage="deploy", output=root / "deploy", inputs={**job.inputs, "drafters": drafters}), deploy)
    (root / "target").rename(root / "target-manifest")
    save_tiny_target(root / "target")
    return root / "deploy"


SPEEDS = [("mtbench", "short", 1.3), ("humaneval", "short", 1.2), ("mtbench", "long", 1.6), ("humaneval", "long", 0.9)]


def test_the_setting_that_is_fastest_over_all_tasks_in_sglang_is_served():
    cells = [with_unknown(served_cell(task, variant, speedup)) for task, variant, speedup in SPEEDS]
    cells += [with_unknown(cell("mtbench", "loop", drafter="fast", speedup=3.0))]
    cells += [with_unknown(served_cell("mtbench", "ngram", 5.0, algorithm="NGRAM", drafter=None))]
    chosen = best_choice(cells, ["fast"])
    assert (chosen.cell["variant"], chosen.pays) == ("short", True)
    assert "1.25 times the target alone at accept length 2.40 (humaneval, mtbench; Some CPU, sglang, concurrency 1)" in verdict(chosen)
    assert best_choice([cell for cell in cells if cell["engine"] != "sglang"], ["fast"]).cell["variant"] == "loop"
    with pytest.raises(StageError, match="none of 6 cells has a speed-up of one of nobody"):
        best_choice(cells, ["nobody"])


def test_flags_are_those_of_the_measured_server_without_what_belongs_to_its_place():
    flags = measured_flags(with_unknown(served_cell("mtbench", "short", 1.3)))
    assert flags == [
        *("--dtype", "bfloat16", "--disable-overlap-schedule", "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--json-model-override-args", '{"a": "b c"}'),
    ]
    unserved = measured_flags(with_unknown(cell("mtbench", "loop", ceiling=3)))
    assert unserved[-6:] == ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"]


def test_a_flag_that_is_set_again_is_served_once_as_the_server_took_it():
    flags = ["--graphs", "512", "--backend", "fa3", "--eager", "--graphs", "32", "--backend=triton", "--sizes", "1", "2"]
    assert paired(flags) == ["--eager", "--graphs 32", "--backend=triton", "--sizes 1 2"]


def test_the_folder_holds_the_drafter_without_a_second_copy_and_accounts_for_the_other(deployed):
    manifest = read_manifest(deployed / "manifest.json", "deploy")
    assert manifest.counts == Counts(2, 1, {"slower": 1})
    names = {shard.name for shard in manifest.shards}
    assert names == {
        "README.md",
        "check.sh",
        "config.json",
        "model.safetensors",
        "serve.sh",
        "served.json",
        "training-manifest.json",
        "training.json",
    }
    weights = [folder / "model.safetensors" for folder in (deployed, deployed.parent / "drafters/fast")]
    assert weights[0].samefile(weights[1])


def test_serve_starts_the_server_with_the_flags_and_whatever_is_added(deployed, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    plain, own = (
        subprocess.run([deployed / "serve.sh", *words], env=environment, capture_output=True, text=True, check=True)
        for words in ([], ["/my/target", "--port", "99"])
    )
    lines = plain.stdout.splitlines()
    assert lines[:6] == [
        *("-m", "sglang.launch_server", "--model-path", f"{deployed}/../target", "--speculative-draft-model-path", str(deployed))
    ]
    assert lines[-1] == '{"a": "b c"}'
    assert own.stdout.splitlines()[3] == "/my/target"
    assert own.stdout.splitlines()[-2:] == ["--port", "99"]
    assert plain.stderr == ""


def test_where_nothing_pays_the_page_and_the_script_say_so(tmp_path):
    root = tmp_path / "results/toy"
    job = publish_run(root, [served_cell("mtbench", "short", 0.8)])
    publish_facts(root)
    inputs = {**job.inputs, "drafters": [publish_drafter(root, "fast")]}
    run(replace(job, stage="deploy", output=root / "deploy", inputs=inputs), deploy)
    assert "No measured setting pays." in (root / "deploy/README.md").read_text()
    done = subprocess.run([root / "deploy/serve.sh"], env=os.environ | {"PYTHON": "true"}, capture_output=True, text=True, check=True)
    assert done.stderr == "no measured setting pays: 0.80 times the target alone, break-even at accept length 3.00\n"


def test_the_page_tells_data_licences_training_figures_and_limits(deployed):
    page = (deployed / "README.md").read_text()
    for words in (
        "# EAGLE-3 drafter `fast` for LlamaForCausalLM (wheel:llm==1)",
        "The fastest setting measured is `short`: 1.25 times the target alone",
        "50% of the training conversations of this mix.",
        "| chats | wheel:some==1 | 90 | 4,000 | 80.0% |",
        "- MIT: chats, prompts",
        "| held-out accept length, simulated | 1.900 |",
        "| mtbench | short | 1 | 12 | 20.0 | 15.0 | 1.30 | 2.40 |",
        "from the states that enter its layers 2, 4, 5.",
        "It drafts 8,192 of 49,152 tokens, 95.0% of those in held-out answers.",
    ):
        assert words in page
    assert "slow" not in page.split("## Measured")[1]


def test_the_check_asks_the_doctor_about_files_server_and_drafts(deployed, monkeypatch):
    asked = []
    fault = Finding("idle_drafter", "accept length 1.01", "train it on this target's states")
    monkeypatch.setattr(checking, "preflight", lambda *words: asked.append(words) or [Finding("old", "x", "y", fatal=False)])
    monkeypatch.setattr(checking, "after_start", lambda *words: asked.append(words) or [])
    monkeypatch.setattr(checking, "canary", lambda *words: asked.append(words) or [])
    check_served("http://h:1", deployed, None)
    before, after, drafts = asked
    assert before[:3] == (deployed / "../target", deployed, "EAGLE3")
    assert after[:4] == ("http://h:1", *before[:3])
    assert "--speculative-num-steps" in before[3]
    assert before[4] == deployed / "training-manifest.json"
    assert before[3][-2:] == ["--speculative-draft-model-path", str(deployed)]
    assert (drafts[0], len(drafts[1]), drafts[2]) == ("http://h:1", len(QUESTIONS), 4)
    monkeypatch.setattr(checking, "canary", lambda *words: [fault])
    with pytest.raises(StageError, match=r"http://h:1: idle_drafter: accept length 1.01, so train it on this target's states"):
        check_served("http://h:1", deployed, None)


def test_a_check_of_the_wrong_folders_says_which(deployed, tmp_path):
    with pytest.raises(StageError, match=r"served\.json: not readable"):
        check_served("http://h:1", tmp_path, None)
    with pytest.raises(StageError, match="no target there; give its folder with --target"):
        check_served("http://h:1", deployed, tmp_path / "nothing")


def test_snakemake_makes_the_folder_when_asked_for_once(workdir):
    page = "results/toy/deploy/README.md"
    snakemake(workdir, page)
    assert (workdir / page).read_text().startswith("# EAGLE-3 drafter `eagle3` for LlamaForCausalLM")
    assert "Nothing to be done" in snakemake(workdir, page, "--dry-run")
