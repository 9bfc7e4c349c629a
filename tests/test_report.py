import csv
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.reporting.build import report
from scripts.lib.reporting.table import Table, number, size
from tests.report_parts import cell, publish_run

HEADER = (
    "task,variant,drafter,concurrency,baseline_tok_s,tok_s,speedup,accept_length,ceiling,break_even_accept_length,"
    "identical,near_tie,prompts,completion_tokens,notes"
)
UNKNOWN = {"tok_s": None, "baseline_tok_s": None, "speedup": None, "accept_length": None, "break_even_accept_length": None}
CELLS = [
    cell("mtbench", "chain4"),
    cell("gsm", "chain4_bf16", dtype="bfloat16", identical=9, near_tie=2, different=1, notes=["NOT LOSSLESS | <b>", "second"]),
    cell("gsm", "chain4", tok_s=30.123456, speedup=1.5061728, accept_length=2.4141, notes=[]),
    cell("empty", "chain4", **UNKNOWN, notes=["no verify step"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    job = publish_run(tmp_path_factory.mktemp("run"), CELLS)
    run(job, report)
    return job.output


def test_the_csv_has_one_sorted_row_a_cell_and_exactly_these_columns(folder):
    lines = (folder / "benchmark.csv").read_text().splitlines()
    assert lines[0] == HEADER
    rows = list(csv.DictReader(lines))
    assert [(row["task"], row["variant"]) for row in rows] == [
        ("empty", "chain4"),
        ("gsm", "chain4"),
        ("gsm", "chain4_bf16"),
        ("mtbench", "chain4"),
    ]
    assert (rows[1]["tok_s"], rows[1]["speedup"], rows[1]["accept_length"]) == ("30.12", "1.506", "2.414")
    assert rows[2]["notes"] == "NOT LOSSLESS | <b>; second"


def test_a_missing_figure_is_missing_everywhere(folder):
    """A figure that nobody measured must not look like an accept length of 1."""
    row = next(csv.DictReader((folder / "benchmark.csv").read_text().splitlines()))
    assert [row[name] for name in UNKNOWN] == [""] * 5
    line = next(line for line in (folder / "benchmark.md").read_text().splitlines() if line.startswith("| empty"))
    assert line == "| empty | chain4 | eagle3 | 1 | – | – | – | – | 5 | – | 12 | 0 | 12 | 600 | no verify step |"


def test_the_markdown_says_what_is_not_lossless_and_how_it_was_measured(folder):
    text = (folder / "benchmark.md").read_text()
    assert "bfloat16: 9 of 12 outputs identical, 2 first differ at a near tie, 1 DIFFER ELSEWHERE." in text
    assert "float32: 36 of 36 outputs identical, 0 first differ at a near tie, none elsewhere." in text
    assert "Some CPU, 2 threads, device cpu; torch 2.13.0." in text
    assert "NOT LOSSLESS \\| <b>; second" in text
    for column in HEADER.split(","):
        assert f"- `{column}`: " in text


def test_the_plan_follows_every_row(folder):
    text = (folder / "plan.md").read_text()
    assert "| chats | wheel:some==1 | MIT | 1,000 | 100 | – | 95 | 90 | 5 | 9,000 | 4,000 |" in text
    assert "| all |  |  | 1,060 | 160 | 55 | 150 | 140 | 8 | 14,000 | 5,000 |" in text
    assert "| prepare | chats | not_sampled | 880 | 1,000 |" in text
    assert "| generate | prompts | empty | 5 | 60 |" in text
    assert "| merge |  | duplicate | 10 | 150 |" in text


def test_the_plan_gives_no_rate_for_a_resumed_job(folder):
    text = (folder / "plan.md").read_text()
    assert "| generate | prompts | 60 | 55 | – | 0 B | 2.0 (resumed) | – | – | 3.0 GiB |" in text
    assert re.search(r"\| train \| eagle3 \| 140 \| 140 \| 8,000 \| [\d.]+ B \| 2\.0 \| 70\.0 \| 4,000\.0 \| 3\.0 GiB \|", text)


class Links(HTMLParser):
    """Collects what a page would load from elsewhere, and its tags."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and not value.startswith("#")]


def test_the_page_is_one_file_with_plots_and_escaped_text(folder):
    text = (folder / "benchmark.html").read_text()
    links = Links()
    links.feed(text)
    assert links.loads == []
    assert (links.tags.count("svg"), links.tags.count("table")) == (3, 5)
    assert "<b>gsm, chain4_bf16</b>: NOT LOSSLESS | &lt;b&gt;; second" in text
    assert "<?xml" not in text


def test_plots_are_valid_svg_and_equal_figures_give_equal_bytes(folder, tmp_path):
    again = publish_run(tmp_path / "again", CELLS)
    run(again, report)
    for name in ("accept_length", "training", "rows"):
        data = (folder / f"{name}.svg").read_bytes()
        assert ElementTree.fromstring(data).tag.endswith("svg")
        assert data == (again.output / f"{name}.svg").read_bytes()
    shards = [read_manifest(output / "manifest.json", "report").shards for output in (folder, again.output)]
    assert shards[0] == shards[1]


def test_a_cell_that_was_altered_stops_the_report(tmp_path):
    job = publish_run(tmp_path, CELLS[:1])
    path = tmp_path / "benchmark/mtbench/chain4/cell.json"
    path.write_text(path.read_text().replace("1.5", "4.5"))
    with pytest.raises(StageError, match="sha256"):
        run(job, report)


def test_numbers_for_people():
    assert [number(None), number(1234.5, 1), number(0)] == ["–", "1,234.5", "0"]
    assert [size(None), size(1023), size(1536), size(3 * 2**40)] == ["–", "1,023 B", "1.5 KiB", "3.0 TiB"]


def test_a_table_keeps_bars_out_of_its_cells():
    assert Table(["a", "b"], [["x|y", "1"]], ("a",)).markdown() == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"
