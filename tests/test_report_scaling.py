"""Accept length over trained tokens: the line, its interval, what goals take, and when nothing is said."""

import json
import random
from dataclasses import replace
from math import exp, log2
from pathlib import Path

import pytest
import yaml

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.reporting.cells import with_unknown
from scripts.lib.reporting.planning import expectations
from scripts.lib.reporting.published import Run
from scripts.lib.reporting.scaling import Growth, Point, fit
from scripts.lib.reporting.scaling_page import (
    goals_table,
    points_table,
    scaling_files,
    scaling_markdown,
    scaling_plot,
    scaling_section,
    sentences,
)
from scripts.lib.reporting.scaling_study import FREE, read_growths, scaling_study
from tests.report_parts import cell, publish_run

REPO = Path(__file__).parents[1]
STUDY_CONFIGS = ("configs/smollm2-h200.yaml", "configs/smollm2-h200-scaling.yaml")
EIGHTHS = (0.125, 0.25, 0.5, 1.0)


def curve(tokens, *, ceiling=4, level=-8.0, growth=0.4, repeats=0.0, epochs=1):
    """Accept length on a true line."""
    return 1 + (ceiling - 1) / (1 + exp(-(level + growth * log2(tokens) + repeats * log2(epochs))))


def points_on_a_line(fractions=EIGHTHS, noise=0.0, seed=0, **line):
    draw = random.Random(seed)
    amounts = [int(1_000_000 * fraction) for fraction in fractions]
    return [Point(f"d{tokens}", tokens, 3, curve(tokens, **line) + draw.gauss(0, noise)) for tokens in amounts]


def publish_scaling_run(root, lengths):
    """A published run whose drafters saw fractions of 4,000 rows with 1,000,000 trained tokens; `lengths` by fraction, held out."""
    job = publish_run(root, [])
    costs = {"responses/prompts": {"resumed": False, "generated_tokens": 2000, "seconds": 2.0}, "hidden": {"tokens_per_second": 3000}}
    for name, figures in costs.items():
        path = root / name / "cost.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | figures))
    shards = [
        Shard("train-00000.safetensors", 4000, 1_500_000, 5 * 10**9, "0"),
        Shard("eval-00000.safetensors", 40, 15_000, 5 * 10**7, "0"),
    ]
    Manifest("hidden", {}, {}, Counts(4040, 4040), shards).write(root / "hidden")
    paths = [publish_drafter(root, f"part{index}", *part) for index, part in enumerate(lengths.items())]
    return replace(job, inputs={**job.inputs, "drafters": paths})


def publish_drafter(root, name, fraction, accept_length):
    """One drafter of the study."""
    folder, rows = root / "drafters" / name, int(4000 * fraction)
    folder.mkdir()
    settings = {"drafter": {"epochs": 3, "fraction": fraction, "ttt_steps": 5, "eval_every": rows}, "name": name, "seed": 7}
    weights = [Shard(place, rows, 250 * rows, 10, "0") for place in ("best/model.safetensors", "model.safetensors")]
    facts = {"final": {"accept_length_all": accept_length}}
    Manifest("train", settings, {}, Counts(rows, rows), weights, facts).write(folder)
    (folder / "cost.json").write_text(json.dumps({"trained_tokens_per_second": 10_000.0, "resumed": False}))
    return folder / "manifest.json"


def test_points_on_a_line_give_it_back_and_the_tokens_of_any_goal():
    found = fit(points_on_a_line(), ceiling=4)
    assert (found.level, found.growth) == pytest.approx((-8.0, 0.4))
    for tokens in (50_000, 4_000_000):
        assert found.expected(tokens, 3).value == pytest.approx(curve(tokens))
        needed = found.needed(curve(tokens), 3)
        assert needed.value == pytest.approx(tokens)
        assert needed.low == pytest.approx(tokens, rel=1e-4) == needed.high


def test_epochs_are_a_second_slope_where_they_differ():
    points = [
        Point(f"d{tokens}x{epochs}", tokens, epochs, curve(tokens, repeats=0.2, epochs=epochs))
        for tokens in (10**5, 2 * 10**5, 8 * 10**5)
        for epochs in (1, 4)
    ]
    found = fit(points, ceiling=4)
    assert (found.growth, found.repeats) == pytest.approx((0.4, 0.2))
    assert found.needed(2.5, 4).value < found.needed(2.5, 1).value
    assert found.expected(10**6, 8).value == pytest.approx(curve(10**6, repeats=0.2, epochs=8))


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    hits = {"tau": 0, "tokens": 0}
    for seed in range(400):
        found = fit(points_on_a_line(noise=0.03, seed=seed), ceiling=4)
        expected, needed = found.expected(3_000_000, 3), found.needed(curve(3_000_000), 3)
        hits["tau"] += expected.low <= curve(3_000_000) <= expected.high
        hits["tokens"] += needed is not None and (needed.low or 0) <= 3_000_000 <= (needed.high or 1e300)
    assert 0.92 < hits["tau"] / 400 < 0.98
    assert 0.92 < hits["tokens"] / 400 < 0.98


def test_a_noisy_line_sets_no_upper_bound_instead_of_a_wrong_one():
    found = fit(points_on_a_line(fractions=(0.5, 0.7, 1.0), noise=0.1, seed=3), ceiling=4)
    needed = found.needed(3.0, 3)
    assert needed is None or needed.high is None or needed.high > 100 * needed.value


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (points_on_a_line((0.5, 1.0)), "a line needs 3 amounts of trained tokens, here are 2; add drafters with other `fraction`s"),
        ([*points_on_a_line((0.5, 1.0)), Point("again", 1_000_000, 9, 2.0)], "3 amounts of trained tokens, here are 2"),
        ([*points_on_a_line((0.25, 0.5)), Point("idle", 1_000_000, 3, 1.0)], "idle: accept length at an end of its range"),
        ([Point(f"d{n}", n * 10**5, n, 1.5 + n / 10) for n in (1, 2, 4)], "cannot tell tokens from epochs"),
    ],
)
def test_too_little_to_fit_is_refused_in_words(points, message):
    with pytest.raises(StageError, match=message):
        fit(points, ceiling=4)


def test_goals_at_the_ceiling_or_on_a_falling_line_are_out_of_reach():
    assert fit(points_on_a_line(), ceiling=4).needed(4.0, 3) is None
    assert fit(points_on_a_line(growth=-0.05, level=0.0), ceiling=4).needed(3.0, 3) is None
    assert fit(points_on_a_line(growth=0.01, level=-2.0), ceiling=4).needed(3.9, 3) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four fractions of one recipe, served in chains of three, beside a drafter of another recipe."""
    lengths = {fraction: curve(1_000_000 * fraction) for fraction in EIGHTHS}
    job = publish_scaling_run(tmp_path_factory.mktemp("run"), lengths)
    cells = [
        with_unknown(
            cell("mtbench", f"v{index}c{concurrency}", drafter=f"part{index}", concurrency=concurrency)
            | {"accept_length": tau, "ceiling": 4, "break_even_accept_length": 2.85}
        )
        for index, tau in enumerate(lengths.values())
        for concurrency in (1, 8)
    ]
    return Run.read(job), cells


def test_a_study_says_what_goals_take_at_the_runs_own_rates(run):
    study = scaling_study(*run)
    served, held_out = study.series
    assert (served.name, held_out.name) == ("mtbench, 3 drafts", "held-out rows, simulated, 5 drafts")
    assert [point.tokens for point in served.points] == [125_000, 250_000, 500_000, 1_000_000]
    two_and_a_half, break_even, three = served.goals
    assert (two_and_a_half.accept_length, break_even.accept_length, three.accept_length) == (2.5, 2.85, 3.0)
    assert curve(three.tokens.value) == pytest.approx(3.0)
    assert three.samples == pytest.approx(three.tokens.value / 250)  # 4,000 rows of 250 trained tokens
    assert three.bytes == pytest.approx(three.tokens.value * 5000)
    # 1,000 tokens/s written; 1.5 tokens of states a trained token at 3,000 a second; 3 epochs at 10,000
    assert three.hours == pytest.approx(three.tokens.value * (1 / 1000 + 1.5 / 3000 + 3 / 10_000) / 3600)


def test_its_words_table_and_plot(run):
    study = scaling_study(*run)
    words = sentences(study)[0]
    assert words.startswith("mtbench, 3 drafts: 2.5 needs about 4,200 samples (1,000,000 trained tokens, ")
    assert "0.52 hours of this machine and 4.9 GiB of hidden states" in words
    assert len(points_table(study).rows) == 8
    assert [row[1] for row in goals_table(study).rows] == ["2.5", "2.85", "3", "2.5", "3"]
    plot = scaling_plot(study)
    assert plot.count("part3: ") == 2
    assert plot == scaling_plot(study)


def test_the_file_of_a_study_gives_its_lines_back(run):
    study = scaling_study(*run)
    growths = read_growths(json.loads(json.dumps(study.json())))
    assert list(growths) == [series.name for series in study.series]
    assert isinstance(growths["mtbench, 3 drafts"], Growth)
    assert growths["mtbench, 3 drafts"] == study.series[0].growth


def test_two_fractions_are_told_and_one_is_no_study(tmp_path):
    two = Run.read(publish_scaling_run(tmp_path / "two", {0.5: 1.5, 1.0: 1.7}))
    assert "no line (a line needs 3 amounts of trained tokens, here are 2" in sentences(scaling_study(two, []))[0]
    assert scaling_study(Run.read(publish_scaling_run(tmp_path / "one", {1.0: 1.7})), []) is None


def test_the_report_holds_the_section_and_a_run_without_a_study_none(tmp_path):
    lengths = {fraction: curve(1_000_000 * fraction) for fraction in EIGHTHS}
    found = scaling_study(Run.read(publish_scaling_run(tmp_path / "run", lengths)), [])
    section, words = scaling_section(found)["Scaling"], scaling_markdown(found)
    for text in (section, words):
        assert "held-out rows, simulated, 5 drafts: 2.5 needs about 4,100 samples (1,000,000 trained tokens, 900,000 to" in text
    assert "<svg" in section
    assert sorted(scaling_files(found)) == ["scaling.json", "scaling.svg"]
    assert (scaling_section(None), scaling_markdown(None), scaling_files(None)) == ({}, "", {})


def test_the_plan_of_a_bigger_run_says_what_to_expect(run, tmp_path):
    path = tmp_path / "scaling.json"
    path.write_text(scaling_files(scaling_study(*run))["scaling.json"])
    title, text, table = expectations(str(path), 4_000_000)
    assert title == "## Accept length to expect"
    assert "4,000,000 trained tokens" in text
    assert f"| mtbench, 3 drafts | 3 | {curve(4_000_000):.2f} |" in table
    assert "| 1,000,000 | 3,500,000 |" in table
    assert expectations(None, 1) == []
    path.write_text("{}")
    with pytest.raises(StageError, match="is no scaling study"):
        expectations(str(path), 1)


def test_the_configs_of_a_study_share_one_recipe_with_the_run_that_they_extend():
    layers = [yaml.safe_load((REPO / name).read_text()) for name in ("config.yaml", *STUDY_CONFIGS)]
    base, run_config, study = (layer["drafters"] for layer in layers)
    recipes = [{**base["eagle3"], **run_config["eagle3"]}, *study.values()]
    assert len({json.dumps({key: value for key, value in recipe.items() if key not in FREE}, sort_keys=True) for recipe in recipes}) == 1
    assert [recipe["fraction"] for recipe in recipes] == [1.0, 0.5, 0.25, 0.125]
