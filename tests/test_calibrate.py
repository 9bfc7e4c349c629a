"""What a run will take, foretold from a few answers."""

import json

import numpy as np
import pytest

from scripts.lib.calibrating import calibrating
from scripts.lib.calibrating.calibrating import calibrate, sampled
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.watching.calibration import Sample, foretold, makespan
from tests.stage_inputs import GENERATE, RUNTIME, prepared_row, publish_prepared, publish_target, user


def drawn(rows: int, seed: int) -> list[int]:
    """Lengths of `rows` answers, heavy-tailed around 500 tokens, cut at 4096."""
    random = np.random.default_rng(seed)
    return np.clip(500 * np.exp(0.9 * random.standard_normal(rows) - 0.4), 1, 4096).astype(int).tolist()


def test_tokens_and_seconds_of_the_whole_lie_in_the_interval():
    inside, step, slots = 0, 0.02, 32
    for seed in range(20):
        whole, few = drawn(20_000, 100 + seed), drawn(128, seed)
        took = [step * (0.7 * makespan(lengths, slots) + 0.3 * sum(lengths) / slots) for lengths in (few, whole)]
        found = foretold(Sample(few, [length == 4096 for length in few], 4096, slots, took[0]), len(whole))
        inside += found.tokens[0] < sum(whole) < found.tokens[2] and found.seconds[0] < took[1] < found.seconds[2]
        assert found.tokens[2] < 2 * found.tokens[0]
    assert inside >= 18


def test_answers_cut_at_the_limit_count_as_that_long():
    found = foretold(Sample([100] * 64 + [1000] * 64, [False] * 64 + [True] * 64, 1000, 16, 60.0), 1000)
    assert found.tokens[0] < 550_000 < found.tokens[2]


def test_makespan_of_slots():
    assert makespan([5, 1, 1, 1, 1, 1], 2) == 5
    assert makespan([3, 4], 8) == 4


def job(tmp_path, rows: int) -> Job:
    """A calibration of `rows` prepared rows by the tiny target."""
    texts = [f"tell me about {number}" for number in range(rows)]
    prepared = publish_prepared(tmp_path / "prepared", [prepared_row(f"r{number}", user(text)) for number, text in enumerate(texts)])
    inputs = {"prepared": (prepared,), "target": (publish_target(tmp_path / "target"),)}
    settings = {"generate": GENERATE, "name": "toy", "seed": 7}
    return Job("calibrate", tmp_path / "out", inputs, settings, RUNTIME, tmp_path / "work")


def test_the_stage_answers_a_seeded_sample_and_publishes_intervals_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "ROWS", 8)
    asked = job(tmp_path, 40)
    run(asked, calibrate)
    manifest = read_manifest(asked.output / "manifest.json", "calibrate")
    low, middle, high = manifest.facts["tokens"]
    assert manifest.facts["turns"] == 40 and manifest.counts.rows_in == 8
    assert 40 <= low <= middle <= high <= 1.3 * 40 * 12  # what answers can have at most, and the error of the model
    hours = json.loads((asked.output / "cost.json").read_text())["hours"]
    assert len(hours) == 3 and hours == sorted(hours)
    assert sorted(path.name for path in asked.output.iterdir()) == ["cost.json", "manifest.json"]


def test_the_sample_is_stable_when_rows_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "ROWS", 8)
    few = [prepared_row(f"r{number}", user("x")) for number in range(30)]
    small = sampled(publish_prepared(tmp_path / "small", few), 7)["id"].to_list()
    large = sampled(publish_prepared(tmp_path / "large", [*few, prepared_row("r99", user("x"))]), 7)["id"].to_list()
    assert len(small) == 8 and len(set(small) & set(large)) >= 7
    assert small != sampled(tmp_path / "small/manifest.json", 8)["id"].to_list()


def test_no_rows_is_an_error(tmp_path):
    with pytest.raises(StageError, match="no rows to calibrate with"):
        sampled(publish_prepared(tmp_path / "none", []), 7)
