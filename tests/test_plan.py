"""Which outputs a change makes stale. Every case asks `snakemake --summary` on a finished toy run."""

import os
from pathlib import Path

import pytest
import yaml

from tests.toy import PROMPTS, copy_project, edit_config, snakemake, stale, stale_files, write_config

REPORT = {"report"}
CELLS = REPORT | {"benchmark"}
TRAIN = CELLS | {"train"}
MERGE = TRAIN | {"merge", "vocab", "hidden"}
ENCODE = MERGE | {"encode"}
GENERATE = ENCODE | {"generate"}
PREPARE = GENERATE | {"prepare"}
EVERYTHING = PREPARE | {"fetch", "target"}


def folders(files: set[str]) -> set[str]:
    """Where outputs lie."""
    return {str(Path(file).parent) for file in files}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param(lambda c: None, set(), id="nothing"),
        pytest.param(lambda c: c["benchmark"].update(repeats=2), CELLS, id="benchmark option"),
        pytest.param(lambda c: c["drafters"]["eagle3"].update(learning_rate=2e-4), TRAIN, id="learning rate"),
        pytest.param(lambda c: c["generate"].update(temperature=1.0), GENERATE, id="temperature"),
        pytest.param(lambda c: c["generate"]["max_tokens"].update(short=10), GENERATE, id="max tokens"),
        pytest.param(lambda c: c["encode"].update(max_length=100), ENCODE, id="max length"),
        pytest.param(lambda c: c["merge"].update(eval_share=0.3), MERGE, id="eval share"),
        pytest.param(lambda c: c["vocab"].update(size=100), TRAIN | {"vocab"}, id="draft vocabulary"),
        pytest.param(lambda c: c["hidden"].update(layers=[2, 3, 5]), TRAIN | {"hidden"}, id="aux layers"),
        pytest.param(lambda c: c["datasets"].pop("set1"), MERGE, id="dataset removed"),
        pytest.param(lambda c: c["target"].update(source="path:elsewhere"), EVERYTHING - {"fetch"}, id="target"),
        pytest.param(
            lambda c: c["runtime"].update(device="cuda:1", ranks=2, threads=dict.fromkeys(c["runtime"]["threads"], 2)), set(), id="runtime"
        ),
        pytest.param(
            lambda c: c["runtime"].update(shard=True, recompute=True, launcher="torchrun --nproc-per-node=2"), set(), id="ways of training"
        ),
    ],
)
def test_config_change(workdir, edit, expected):
    edit_config(workdir, edit)
    assert stale(workdir) == expected


def test_order_comments_and_layout_of_the_config_are_no_change(workdir):
    path = workdir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["datasets"] = dict(reversed(config["datasets"].items()))
    path.write_text("# a comment\n" + yaml.safe_dump(config, sort_keys=True, indent=4))
    assert stale(workdir) == set()


def test_new_dataset_leaves_the_others_alone(workdir, finished):
    edit_config(workdir, lambda c: c["datasets"].update(set3=PROMPTS | {"source": f"path:{finished}/data/set3.jsonl"}))
    plan = stale_files(workdir)
    for rule, folder in (("fetch", "raw"), ("prepare", "prepared"), ("generate", "responses"), ("encode", "tokens")):
        assert folders(plan.pop(rule)) == {f"results/toy/{folder}/set3"}
    assert set(plan) == MERGE


def test_a_weight_changes_the_mix_and_nothing_before_it(workdir):
    edit_config(workdir, lambda c: c["datasets"]["set1"].update(weight=0.5))
    assert stale(workdir) == MERGE


def test_one_dataset_regenerated_leaves_the_others_alone(workdir):
    edit_config(workdir, lambda c: c["datasets"]["set2"].update(kind="prompts"))
    plan = stale_files(workdir)
    made = {folder for rule in ("prepare", "generate", "encode") for folder in folders(plan.pop(rule))}
    assert made == {f"results/toy/{folder}/set2" for folder in ("prepared", "responses", "tokens")}
    assert set(plan) == MERGE


def test_one_tasks_option_touches_only_its_cells(workdir):
    edit_config(workdir, lambda c: c["benchmark"]["tasks"]["task0"].update(max_tokens=6))
    plan = stale_files(workdir)
    assert {file.split("/")[3] for file in plan.pop("benchmark")} == {"task0"}
    assert set(plan) == REPORT


def test_new_task_and_variant_touch_only_their_cells(workdir, finished):
    def edit(config):
        task = config["benchmark"]["tasks"]["task0"]
        config["benchmark"]["tasks"]["task2"] = task | {"source": f"path:{finished}/data/task2.jsonl"}
        config["benchmark"]["variants"]["chain1"] = config["benchmark"]["variants"]["chain2"] | {"draft_steps": 1}

    edit_config(workdir, edit)
    plan = stale_files(workdir)
    assert plan.pop("fetch") == {"results/toy/raw/task2/manifest.json"}
    assert folders(plan.pop("prepare")) == {"results/toy/prepared/task2"}
    assert not set(plan) & {"generate", "encode"}
    cell = "results/toy/benchmark/task0/chain2/c1/cell.json"
    made = [workdir / cell, *sorted((workdir / "results/toy/drafters").glob("*/model.safetensors"))]
    before = [path.stat().st_ino for path in made]
    snakemake(workdir, cell)  # merge looks for the new prompts, finds none, and gives equal bytes: nothing below is done again
    assert len(made) > 1 and [path.stat().st_ino for path in made] == before
    plan = stale_files(workdir)
    cells = {tuple(file.split("/")[3:5]) for file in plan.pop("benchmark")}
    assert cells == {("task2", "chain2"), ("task2", "chain1"), ("task0", "chain1"), ("task1", "chain1")}
    assert set(plan) == REPORT


def test_each_number_of_requests_is_a_cell_of_served_variants_alone(workdir):
    def edit(config):
        config["benchmark"]["concurrencies"] = [1, 3]
        config["benchmark"]["variants"]["served"] = config["benchmark"]["variants"]["chain2"] | {"engine": "sglang"}

    edit_config(workdir, edit)
    plan = stale_files(workdir)
    assert {tuple(file.split("/")[4:6]) for file in plan.pop("benchmark")} == {("served", "c1"), ("served", "c3")}
    assert set(plan) == REPORT


def test_new_drafter_leaves_the_first_alone(workdir):
    edit_config(workdir, lambda c: c["drafters"].update(wide=c["drafters"]["eagle3"] | {"ttt_steps": 1}))
    plan = stale_files(workdir)
    assert all("/wide/" in file for file in plan.pop("train"))
    assert set(plan) == REPORT


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("scripts/lib/targets", EVERYTHING - {"fetch"}),
        ("scripts/lib/formats", PREPARE),
        ("scripts/lib/generation", GENERATE),
        ("scripts/lib/mixing", MERGE),
        ("scripts/lib/training", TRAIN),
        ("scripts/lib/speculation", CELLS),
        ("scripts/lib/benchmark", CELLS),
        ("scripts/lib/reporting", REPORT),
    ],
)
def test_a_rooms_code_makes_its_stage_and_those_below_stale(workdir, path, expected):
    for file in (workdir / path).rglob("*.py"):
        file.write_text(file.read_text() + "\nADDED = 1\n")
    assert stale(workdir) == expected


def test_the_plan_names_the_file_that_changed(workdir):
    file = next(file for file in sorted((workdir / "scripts/lib/mixing").glob("*.py")) if file.name != "__init__.py")
    file.write_text(file.read_text() + "\nADDED = 1\n")
    assert f"scripts/lib/mixing/{file.name}@" in snakemake(workdir, "--dry-run")


def test_comments_and_docstrings_are_no_change(workdir):
    for file in (workdir / "scripts").rglob("*.py"):
        file.write_text("# a comment\n" + file.read_text())
    assert stale(workdir) == set()


def test_new_import_in_a_stage_is_a_change(workdir):
    path = workdir / "scripts/train.py"
    path.write_text(path.read_text().replace("from scripts", "import scripts.lib.ground.config\nfrom scripts", 1))
    assert stale(workdir) == TRAIN


def test_touching_and_cloning_again_is_no_change(workdir):
    config = yaml.safe_load((workdir / "config.yaml").read_text())
    copy_project(workdir)
    write_config(workdir, config)
    for path in sorted(workdir.rglob("*")):
        if ".snakemake" not in path.parts:
            os.utime(path)
    assert stale(workdir) == set()


def test_equal_bytes_stop_the_chain(workdir):
    snakemake(workdir, "--forcerun", "merge", "--until", "merge")
    assert stale(workdir) == set()


def test_null_leaves_out_an_entry_of_the_default(workdir):
    override = workdir / "override.yaml"
    override.write_text("datasets: {set1: null}\n")
    plan = snakemake(workdir, "--dry-run", "--configfile", "override.yaml", "--quiet", "rules")
    assert "set1" not in plan


def test_results_lie_below_the_run(finished: Path):
    assert (finished / "results/toy/report/benchmark.md").is_file()
    assert not list((finished / "results/work").glob("*/*/manifest.json"))


def test_the_page_before_the_run_makes_nothing_stale(workdir):
    snakemake(workdir, "results/toy/plan.md")
    assert "36 rows are kept: 12 native and 24 prompts." in (workdir / "results/toy/plan.md").read_text()
    assert stale(workdir) == set()


def test_the_bytes_of_the_drafter_to_start_from_count_wherever_it_lies(workdir):
    """A folder outside is tracked by its weights; a drafter of the same run is an input, and trained before."""
    start = workdir / "start"
    start.mkdir()
    weights = start / "model.safetensors"
    weights.write_bytes((workdir / "results/toy/drafters/eagle3/model.safetensors").read_bytes())
    drafters = {"begun": {"start_from": str(start)}, "next": {"start_from": "results/toy/drafters/eagle3"}}
    edit_config(workdir, lambda c: c["drafters"].update({name: c["drafters"]["eagle3"] | more for name, more in drafters.items()}))
    snakemake(workdir, *(f"results/toy/drafters/{name}/manifest.json" for name in drafters))
    weights.touch()
    assert not stale_files(workdir).keys() & {"train"}
    weights.write_bytes(weights.read_bytes()[:-2] + b"\0\0")
    assert all("/begun/" in file for file in stale_files(workdir)["train"])
    edit_config(workdir, lambda c: c["drafters"]["eagle3"].update(learning_rate=1e-4))
    assert {file.split("/")[3] for file in stale_files(workdir)["train"]} == {"begun", "next", "eagle3"}
    assert "memory_mb=" in snakemake(workdir, "--dry-run"), "what a training will take"
