import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.reporting.build import report
from scripts.lib.reporting.table import Table, number, size
from tests.report_matrix import matrix
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


def csv_rows(folder):
    return list(csv.DictReader((folder / "benchmark.csv").read_text().splitlines()))


def test_the_csv_has_a_row_a_cell_and_one_a_target_alone(folder):
    """The columns of the table stand first and in order; others follow."""
    assert (folder / "benchmark.csv").read_text().startswith(f"{HEADER},speedup_low,speedup_high,")
    rows = csv_rows(folder)
    assert [(row["task"], row["variant"]) for row in rows] == [
        ("empty", "baseline float32"),
        ("empty", "chain4"),
        ("gsm", "baseline bfloat16"),
        ("gsm", "baseline float32"),
        ("gsm", "chain4"),
        ("gsm", "chain4_bf16"),
        ("mtbench", "baseline float32"),
        ("mtbench", "chain4"),
    ]
    chain, bfloat16 = rows[4:6]
    assert (chain["tok_s"], chain["speedup"], chain["accept_length"]) == ("30.12", "1.506", "2.414")
    assert bfloat16["notes"].endswith("NOT LOSSLESS | <b>; second")


def test_the_target_alone_is_a_row_of_its_own(folder):
    """With its speed, and without figures that it cannot have."""
    alone = csv_rows(folder)[3]
    assert (alone["tok_s"], alone["baseline_tok_s"], alone["speedup"], alone["dtype"]) == ("20.0", "20.0", "1.0", "float32")
    assert {alone[name] for name in ("drafter", "accept_length", "ceiling", "identical", "algorithm", "draft_steps", "verify_steps")} == {
        ""
    }


def test_the_target_alone_beside_several_variants_is_all_its_tokens_over_all_its_seconds(tmp_path):
    cells = [
        cell("a", "x", baseline_tok_s=10.0, baseline_completion_tokens=100),
        cell("a", "y", baseline_tok_s=30.0, baseline_completion_tokens=300),
    ]
    job = publish_run(tmp_path, cells)
    run(job, report)
    (alone,) = [row for row in csv_rows(job.output) if row["variant"] == "baseline"]
    assert (alone["tok_s"], alone["notes"]) == ("20.0", "measured beside 2 variants: 10.0 to 30.0 tok/s")


def test_a_missing_figure_is_missing_everywhere(folder):
    """A figure that nobody measured must not look like an accept length of 1."""
    row = csv_rows(folder)[1]
    assert [row[name] for name in UNKNOWN] == [""] * 5
    line = next(line for line in (folder / "benchmark.md").read_text().splitlines() if line.startswith("| empty | chain4"))
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


def test_the_plan_gives_no_rate_for_a_job_that_took_no_time(tmp_path):
    """Less than half a millisecond is written as none."""
    job = publish_run(tmp_path, [cell("a", "x")])
    for manifest in (job.input("merged"), job.input("vocab")):
        cost = manifest.with_name("cost.json")
        cost.write_text(json.dumps(json.loads(cost.read_text()) | {"seconds": 0.0, "resumed": False}))
    run(job, report)
    lines = [line for line in (job.output / "plan.md").read_text().splitlines() if line.startswith(("| merge |  | 1", "| vocab |  | 1"))]
    assert len(lines) == 2 and all("| 0.0 | – | – |" in line for line in lines)


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
    assert links.tags.count("svg") == len(list(folder.glob("*.svg")))
    assert "NOT LOSSLESS | &lt;b&gt;; second" in text
    assert "<b>; second" not in text


def test_the_page_says_how_it_was_made(folder):
    text = (folder / "benchmark.html").read_text()
    for needed in ("snakemake results/toy/report/benchmark.md", "Config, by stage", "Some CPU, 2 threads", "torch 2.13.0", "Greedy"):
        assert needed in text


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    job = publish_run(tmp_path_factory.mktemp("served"), matrix())
    run(job, report)
    return job.output


def test_a_served_matrix_has_every_plot_and_table(served):
    names = {path.stem for path in served.glob("*.svg")}
    assert names == {"speedup", "accept_length", "positions", "cycle", "steps", "throughput", "training", "rows"}
    text = (served / "benchmark.html").read_text()
    assert text.count('<table class="sortable">') == 6
    assert "sglang.launch_server --speculative-num-steps 5" in text
    assert "NVIDIA H200, driver 580.82.07, device cuda; torch 2.13.0; server: sglang 0.5.17, torch 2.11.0+cu130." in text
    rows = [row for row in csv_rows(served) if (row["task"], row["concurrency"]) == ("mtbench", "8")]
    assert [row["variant"] for row in rows] == ["baseline", "eagle3_3", "eagle3_5", "ngram", "other"]
    assert float(rows[1]["speedup_low"]) < float(rows[1]["speedup"]) < float(rows[1]["speedup_high"])
    assert (rows[0]["ttft_p50_ms"], rows[1]["baseline_ttft_p50_ms"], rows[1]["cuda_graphs"]) == ("25.0", "25.0", "true")


def test_the_page_says_what_was_measured_and_whether_by_turns(tmp_path):
    server = {"version": "0.5.23", "command": [], "baseline_command": []}
    named = {"target": {"source": "hub:org/model", "revision": "0123abc"}, "engine": "sglang"}
    cells = [cell("a", name, **named, server=server | more) for name, more in {"x": {"side_by_side": False}, "y": {}}.items()]
    job = publish_run(tmp_path, cells)
    run(job, report)
    text = (job.output / "benchmark.md").read_text()
    assert text.count("- target: revision 0123abc, source hub:org/model.\n") == 1
    assert "One server at a time (x): all prompts went to one of the two and later to the other" in text


@pytest.mark.parametrize(
    "figures",
    [
        UNKNOWN | {"concurrency": 8},
        {"algorithm": "NGRAM", "drafter": None, "draft_tokens": 8, "engine": "sglang", "accepted_histogram": [9, 1]},
        {"topk": 4, "draft_steps": 5, "draft_tokens": 16, "engine": "sglang"},
    ],
    ids=["nothing known", "n-grams alone", "a tree alone"],
)
def test_a_run_without_any_chain_of_drafts_has_a_page(tmp_path, figures):
    job = publish_run(tmp_path, [cell("a", "x", **figures), cell("a", "y", **UNKNOWN)])
    run(job, report)
    assert "<h2" in (job.output / "benchmark.html").read_text()
    assert len(csv_rows(job.output)) >= 3


def test_concurrencies_without_a_second_one_have_no_curve(folder):
    assert not (folder / "throughput.svg").exists()


def test_plots_are_valid_svg_and_equal_figures_give_equal_bytes(served, tmp_path):
    again = publish_run(tmp_path / "again", matrix())
    run(again, report)
    for path in served.glob("*.svg"):
        assert ElementTree.fromstring(path.read_bytes()).tag.endswith("svg")
        assert path.read_bytes() == (again.output / path.name).read_bytes()
    shards = [read_manifest(output / "manifest.json", "report").shards for output in (served, again.output)]
    assert shards[0] == shards[1]


def test_the_report_needs_no_slow_package():
    """New captions take seconds: neither torch nor a plotting library is loaded for them."""
    modules = ["torch", "transformers", "datasets", "polars", "pyarrow", "matplotlib", "pandas"]
    check = f"import sys, scripts.lib.reporting.build; print([name for name in {modules} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_cell_that_was_altered_stops_the_report(tmp_path):
    job = publish_run(tmp_path, CELLS[:1])
    path = tmp_path / "benchmark/mtbench/chain4/c1/cell.json"
    path.write_text(path.read_text().replace("1.5", "4.5"))
    with pytest.raises(StageError, match="sha256"):
        run(job, report)


def test_numbers_for_people():
    assert [number(None), number(1234.5, 1), number(0)] == ["–", "1,234.5", "0"]
    assert [size(None), size(1023), size(1536), size(3 * 2**40)] == ["–", "1,023 B", "1.5 KiB", "3.0 TiB"]


def test_a_table_keeps_bars_out_of_its_cells():
    assert Table(["a", "b"], [["x|y", "1"]], ("a",)).markdown() == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"
