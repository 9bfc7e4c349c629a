"""progress.json, its history, and the observer of stage generate that writes it."""

import itertools
import json
import logging

import pytest

from scripts.lib.ground.progress import MOST_POINTS, History, Progress, clock, output
from scripts.lib.watching.observed import Plan
from scripts.lib.watching.watcher import Watcher


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def writes(monkeypatch):
    """What was written to progress.json, in order, with the time of the test's clock."""
    written = []
    monkeypatch.setattr("scripts.lib.watching.watcher.write_progress", lambda path, figures: written.append(dict(figures)))
    return written


def run_through(watcher: Watcher, time: Clock, rows: range, seconds: float = 0.25, slots: int = 4) -> None:
    """Answer `rows`, `slots` at once, one every `seconds`, each of 100 tokens and more."""
    waiting = list(rows)
    flying = [(row, time.now) for row in waiting[:slots]]
    for row, _ in flying:
        watcher.on_start(str(row))
    waiting = waiting[slots:]
    while flying:
        time.now += seconds
        row, since = flying.pop(0)
        watcher.on_done(str(row), 100 + row % 50, "stop", time.now - since)
        if waiting:
            flying.append((waiting[0], time.now))
            watcher.on_start(str(waiting.pop(0)))


def test_a_history_spans_the_whole_run_in_few_points():
    history = History()
    for second in range(10_000):
        history.add({"seconds": float(second), "rate": None})
    seconds = history.columns["seconds"]
    assert MOST_POINTS // 2 <= len(seconds) <= MOST_POINTS
    assert seconds[0] == 0 and seconds[-1] > 9_800
    assert len({b - a for a, b in itertools.pairwise(seconds)}) == 1


def test_progress_json_of_every_stage_has_what_the_page_needs(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        Progress(tmp_path, total=4, unit="rows").add(2, tokens=10, note="dealing")
    figures = json.loads((tmp_path / "progress.json").read_text())
    assert (figures["done"], figures["total"], figures["unit"], figures["note"]) == (2, 4, "rows", "dealing")
    assert figures["history"]["rate"] and figures["updated_at"] > 0 and figures["pid"] > 0
    assert "2 of 4 rows, " in caplog.text and " rows/s, " in caplog.text and caplog.text.rstrip().endswith("dealing")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_nothing_done_is_an_unknown_end_and_valid_json(tmp_path):
    Progress(tmp_path, total=4, unit="rows").add(0)
    text = (tmp_path / "progress.json").read_text()
    assert json.loads(text)["eta_seconds"] is None and "Infinity" not in text
    assert clock(None) == "unknown" and clock(3725) == "1:02:05"


def test_the_output_is_read_from_the_command_line():
    assert (
        output(["x", "--target", "t", "--output", "results/demo/responses/chat/manifest.json"])
        == "results/demo/responses/chat/manifest.json"
    )
    assert output(["pytest", "-q"]) is None


def test_progress_json_is_written_at_most_once_a_second_and_at_the_end(tmp_path, writes):
    time = Clock()
    with Watcher(tmp_path, "chat", Plan({0: 100}, 0, 512, 4), time) as watcher:
        run_through(watcher, time, range(100), seconds=0.25)
    assert len(writes) in (25, 26, 27)
    assert writes[-1]["done"] == 100 and writes[-1]["eta_seconds"] == pytest.approx(0, abs=0.1)
    gaps = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(writes[:-1])]
    assert min(gaps) >= 1.0


def test_the_observer_counts_what_it_hears(tmp_path, writes):
    time = Clock()
    watcher = Watcher(tmp_path, "chat", Plan({0: 42}, 0, 512, 4), time)
    watcher.on_start("x")
    time.now += 1
    watcher.on_retry("x", "timeout")
    watcher.on_start("x")
    watcher.on_start("y")
    time.now += 1
    watcher.on_done("x", 0, "refused", 1.0)
    watcher.on_done("y", 512, "length", 1.0)
    run_through(watcher, time, range(40))
    last = writes[-1]
    assert (last["done"], last["total"], last["running"]) == (42, 42, 0)
    assert last["finish_reasons"] == {"length": 1, "refused": 1, "stop": 40} and last["retries"] == {"timeout": 1}
    assert last["tokens"] == watcher.tokens == 512 + sum(100 + row for row in range(40))
    assert last["mean_tokens"] == pytest.approx(watcher.tokens / 41)


def test_lines_name_speed_lengths_and_the_interval(tmp_path, caplog):
    time = Clock()
    watcher = Watcher(tmp_path, "chat", Plan({0: 400}, 0, 512, 4), time)
    with caplog.at_level(logging.INFO):
        run_through(watcher, time, range(200))
    last = caplog.messages[-1]
    assert (
        "of 400 turns, " in last and " tokens/s, " in last and "mean 12" in last and " to 0:" in last and "at the rate so far 0:00:" in last
    )
    low, high = (json.loads((tmp_path / "progress.json").read_text())[f"eta_{side}_seconds"] for side in ("low", "high"))
    assert low < 200 * 0.25 < high


def test_a_resumed_run_knows_the_lengths_of_the_one_before(tmp_path):
    plan, time = Plan({0: 400}, 0, 512, 4), Clock()
    run_through(Watcher(tmp_path, "chat", plan, time), time, range(200))
    before = json.loads((tmp_path / "progress.json").read_text())
    resumed = Watcher(tmp_path, "chat", Plan({0: 400}, before["done"], 512, 4), time)
    assert resumed.observed.lengths.ended.sum() == before["done"] > 190
    run_through(resumed, time, range(before["done"], 400))
    after = json.loads((tmp_path / "progress.json").read_text())
    assert (after["done"], after["tokens_left"]) == (400, pytest.approx(0, abs=1))


def test_a_run_with_other_limits_starts_anew(tmp_path):
    time = Clock()
    run_through(Watcher(tmp_path, "chat", Plan({0: 40}, 0, 512, 4), time), time, range(40))
    assert Watcher(tmp_path, "chat", Plan({0: 40}, 10, 1024, 4), time).observed.lengths.ended.sum() == 0
