"""The page and the table of what is at work."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from scripts.lib.watching.found import find
from scripts.lib.watching.page import curve, page, serving
from scripts.lib.watching.screen import table

REPO = Path(__file__).parents[1]
GENERATE = {
    "done": 4_321, "total": 83_288, "unit": "turns", "seconds": 3_600.0, "rate": 1.12, "tokens": 1_287_658, "tokens_per_second": 612.4,
    "running": 150, "mean_tokens": 298.0, "mean_tokens_recent": 341.0, "mean_tokens_to_come": 640.0, "tokens_left": 5e7,
    "eta_seconds": 125_000.0, "eta_low_seconds": 90_000.0, "eta_high_seconds": 190_000.0, "eta_naive_seconds": 65_785.0,
    "finish_reasons": {"length": 21, "stop": 4_300}, "retries": {"timeout": 3}, "state": {"lengths": "long"},
    "history": {"seconds": [1, 2, 3], "rate": [1, 1, 1], "tokens_per_second": [500, 640, 612.4], "mean_tokens_recent": [217, 298, 341]},
}  # fmt: skip
TRAIN = {
    "done": 7_000, "total": 20_000, "unit": "trained tokens", "seconds": 70.0, "rate": 100.0, "tokens": 0, "tokens_per_second": None,
    "eta_seconds": 130.0, "note": "loss <3.1>", "history": {"seconds": [5, 70], "rate": [90.0, 100.0], "tokens_per_second": [None, None]},
}  # fmt: skip


def put(results: Path, stage: str, fingerprint: str, output: str | None, figures: dict, **who: object) -> Path:
    """Leave the progress.json of a job."""
    path = results / "work" / stage / fingerprint / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**figures, "output": output, "pid": os.getpid(), "updated_at": time.time(), **who}))
    return path


@pytest.fixture
def results(tmp_path):
    """Two jobs at work in one run, a stopped one in another."""
    put(tmp_path, "generate", "aa", "results/demo/responses/chat/manifest.json", GENERATE)
    put(tmp_path, "train", "bb", "results/demo/drafters/eagle3/manifest.json", TRAIN)
    put(tmp_path, "hidden", "cc", "results/other/hidden/manifest.json", TRAIN, pid=2**22 + 1)
    return tmp_path


def test_jobs_are_found_with_run_label_and_condition(results):
    found = [(job.run, job.label, job.figures["condition"]) for job in find(results)]
    assert found == [("demo", "generate/chat", "running"), ("demo", "train/eagle3", "running"), ("other", "hidden", "stopped")]
    assert [job.label for job in find(results, "other")] == ["hidden"]


def test_a_job_without_news_says_so(tmp_path):
    put(tmp_path, "train", "bb", None, TRAIN, updated_at=time.time() - 125)
    (job,) = find(tmp_path)
    assert (job.label, job.figures["condition"]) == ("train/bb", "no news for 0:02:05")


def test_the_page_shows_every_job_and_escapes_what_it_shows(results):
    text = page(find(results))
    assert "2 jobs at work, 1 stopped" in text and 'http-equiv="refresh"' in text
    assert "25:00:00 to 52:46:40" in text and "at the rate so far 18:16:25" in text
    assert "loss &lt;3.1&gt;" in text and "loss <3.1>" not in text
    assert text.count("<polyline") == 4  # two of generate, one each of the others
    assert "src=" not in text and "href=" not in text  # nothing from elsewhere


def test_an_empty_page_says_that_nothing_is_at_work(tmp_path):
    assert "0 jobs at work" in page(find(tmp_path))


def test_a_curve_needs_two_points_and_holds_all():
    assert curve("x", [1.0]) == "" and curve("x", None) == ""
    assert 'points="0.0,40.0 110.0,0.0 220.0,40.0"' in curve("x", [None, 1.0, 2.0, 1.0])
    assert 'points="0.0,40.0 220.0,40.0"' in curve("x", [3.0, 3.0])


def test_the_table_has_a_line_a_job(results):
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table([(job.label, job.figures) for job in find(results)]))
    lines = shown.get().splitlines()
    assert len(lines) == 4
    assert "4,321 / 83,288 turns" in lines[1] and "5.2%" in lines[1] and "341 +14%" in lines[1] and "25:00:00 to 52:46:40" in lines[1]
    assert "0:02:10" in lines[2]


def test_the_server_answers_page_and_figures(results):
    server = serving(lambda: find(results), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert b"generate/chat" in urllib.request.urlopen(url + "/").read()
        figures = json.load(urllib.request.urlopen(url + "/progress.json"))
        assert [job["job"] for job in figures] == ["generate/chat", "train/eagle3", "hidden"]
        assert "state" not in figures[0] and figures[0]["eta_high_seconds"] == 190_000.0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + "/../etc/passwd")
    finally:
        server.shutdown()
        server.server_close()


def test_once_prints_the_table_and_ends(results):
    command = [sys.executable, "-m", "scripts.monitor", "--results", str(results), "--run", "demo", "--once"]
    done = subprocess.run(command, check=False, cwd=REPO, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, timeout=60)
    assert done.returncode == 0 and "demo: generate/chat" in done.stdout and "other" not in done.stdout


def test_a_port_in_use_is_one_sentence(results):
    server = serving(lambda: [], 0)
    command = [sys.executable, "-m", "scripts.monitor", "--results", str(results), "--port", str(server.server_port)]
    done = subprocess.run(command, check=False, cwd=REPO, capture_output=True, text=True, timeout=60)
    server.server_close()
    assert done.returncode == 1 and "choose another with --port" in done.stderr.splitlines()[-1]
