"""Stage plan: what plan.md says of prepared rows before anything was generated."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from scripts.lib.formats.tables import ROWS
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.reporting.forecast import Estimate, Limits, forecast, row_sizes
from scripts.lib.reporting.planning import plan_page
from scripts.lib.reporting.table import size
from scripts.lib.states.storing import Storing

SETTINGS = {
    "run": "r",
    "generate": {"turns": "all", "max_tokens": {"short": 50, "long": 100}},
    "encode": {"max_length": 1000},
    "hidden": {"stored": "bfloat16", "compression": "none", "max_bytes": None, "mode": "dumped", "tokens_per_shard": 100},
    "drafters": {"small": {"batch_tokens": 4096, "micro_tokens": 1024, "ttt_steps": 4, "precision": "bfloat16"}},
    "vocab": {"size": 100},
    "runtime": {"device": "cuda", "ranks": 2, "shard": True},
}
TARGET = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


def turn(role, content=None):
    return {"role": role, "content": content, "reasoning_content": None, "tool_calls": None}


def publish(folder: Path, kind: str, conversations: list[list[dict]], rejected: dict[str, int]) -> Path:
    """A prepared dataset of rows whose first prompt has ten tokens."""
    folder.mkdir()
    frame = pl.DataFrame({"messages": conversations, "prompt_tokens": [10] * len(conversations)})
    frame = frame.cast({"messages": ROWS["messages"], "prompt_tokens": pl.Int64})
    frame.write_parquet(folder / "rows-00000.parquet")
    counts = Counts(frame.height + sum(rejected.values()), frame.height, rejected)
    facts = {"kind": kind, "partition": "short", "licence": None}
    Manifest("prepare", {}, {}, counts, [Shard.of(folder / "rows-00000.parquet", frame.height)], facts).write(folder)
    return folder / "manifest.json"


@pytest.fixture
def run(tmp_path):
    answered = [turn("user", "u" * 40), turn("assistant", "a" * 80)]
    pending = [turn("user", "u" * 40)]
    prepared = [
        publish(tmp_path / "wild", "prompts", [answered, pending, pending], {"duplicate": 2, "not_sampled": 5}),
        publish(tmp_path / "own", "native", [answered, answered], {"empty": 1}),
    ]
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    Manifest("target", {}, {}, Counts(0, 0), (), {"hidden_size": 8}).write(target)
    return prepared, target / "manifest.json"


def line(page: str, start: str) -> list[str]:
    """The cells of the first table row that starts so."""
    return next(text for text in page.splitlines() if text.startswith(f"| {start} |")).strip("| ").split(" | ")


def test_rows_add_up(run):
    page = plan_page(*run, SETTINGS, free=10**12)
    assert "5 rows are kept: 2 native and 3 prompts." in page
    assert line(page, "wild") == ["wild", "prompts", "short", "not stated", "10", "2", "5", "3", "0", "3"]
    assert line(page, "all") == ["all", "", "", "", "13", "3", "5", "5", "2", "3"]
    assert "| wild | duplicate | 2 | 20.00% |" in page and "| own | empty | 1 | 33.33% |" in page


def test_tokens_are_expected_from_old_answers_and_bounded_by_the_limit(run):
    page = plan_page(*run, SETTINGS, free=10**12)
    tokens = page[page.index("## Tokens") :]
    # a quarter of a token a character: old answers of 20 tokens, at most 50; pending ones are as long as the known
    assert line(tokens, "wild") == ["wild", "3", "3", "30", "90", "60", "180", "150"]
    assert line(tokens, "own") == ["own", "2", "2", "20", "60", "40", "60", "40"]
    assert line(tokens, "all")[1:4] == ["5", "5", "50"]


def test_bytes_are_six_and_two_of_each_hidden_unit(run):
    page = plan_page(*run, SETTINGS, free=7000)
    assert Estimate(150, 100).state_bytes(8, Storing()) == 8 * (6 * 150 + 2 * 100)
    assert line(page, "expected") == ["expected", "150", "100", "8.6 KiB", "6.8 KiB"]
    assert "**They do not fit**" in page
    assert "They fit if answers are as long as expected" in plan_page(*run, SETTINGS, free=9000)
    assert "They fit, even at most." in plan_page(*run, SETTINGS, free=20_000)


def test_states_that_come_and_go_need_room_for_two_shards(run):
    rolling = {**SETTINGS, "hidden": {**SETTINGS["hidden"], "mode": "rolling"}}  # a shard: 8 * (6 * 100 + 2 * 67) bytes
    assert "**They do not fit**, although they come and go: two shards of 100 tokens are" in plan_page(*run, rolling, free=11_000)
    small = {**rolling, "hidden": {**rolling["hidden"], "tokens_per_shard": 20}}
    assert "About 4 of them are there at a time" in plan_page(*run, small, free=5_000)
    assert "All of them fit, and are dumped once." in plan_page(*run, rolling, free=12_000)


def test_memory_of_training_is_that_of_a_batch_and_a_share_of_the_weights(run):
    page = plan_page(*run, SETTINGS, free=20_000)
    weights = 3 * 8 * 8 + 2 * 8 * 2 * (4 + 2 + 2) + 8 * 8 + 3 * 8 * 16 + 8 * 100
    cells = line(page, "small")
    assert cells[:3] == ["small", f"{weights:,}", "1,024"]
    assert cells[3] == size(16 * weights / 2), "two ranks share masters, gradients and moments"
    assert cells[5] == size((300 + 100) * 8 * 2)


def test_a_row_is_never_longer_than_max_length(run, tmp_path):
    (wild, _), _ = run
    manifest = Manifest(**{**json.loads(wild.read_text()), "counts": Counts(3, 3), "shards": shards_of(wild)})
    assert forecast(manifest, wild.parent, Limits("all", 50, 25)).at_most == Estimate(75, pytest.approx(62.5))


def shards_of(manifest: Path) -> list[Shard]:
    return [Shard(**shard) for shard in json.loads(manifest.read_text())["shards"]]


@pytest.mark.parametrize(
    ("turns", "between", "answers"),
    [
        ("first", [], [3]),
        (1, [], [3]),
        (2, [4], [3, None]),
        (9, [4], [3, None]),
        ("all", [4], [3, None]),
        ("last", [4, 3], [None]),
    ],
)
def test_turns_decide_what_counts(turns, between, answers):
    sizes = row_sizes([turn("user", "q1"), turn("assistant", "abc"), turn("user", "more")], 7, turns)
    assert (sizes.prompt, sizes.between, sizes.answers) == (2, between, answers)


def test_the_command_writes_the_page(run, tmp_path):
    prepared, target = run
    output = tmp_path / "results/r/plan.md"
    command = [sys.executable, "-m", "scripts.plan", "--prepared", *map(str, prepared), "--target", str(target)]
    subprocess.run([*command, "--output", str(output), "--settings", json.dumps(SETTINGS)], check=True)
    assert output.read_text().startswith("# Plan of run r\n")
