"""Cells of the engine sglang, on a stub that answers as SGLang does; and the servers that they share."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from scripts.lib.benchmark.build import benchmark
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.serving import pool
from scripts.lib.serving.health import PROBE
from tests.cell_parts import cell_job, prompt_row, write_cell_inputs
from tests.serving_parts import eventually

STUB = Path(__file__).with_name("stub_speculation.py")
LINGER = 60.0  # a test ends its servers itself
VARIANT = {"drafter": "eagle3", "draft_steps": 2, "dtype": "float32", "engine": "sglang"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    rows = [prompt_row(number) for number in range(6)] + [prompt_row(6, ["What is red?", "And blue?"])]
    return write_cell_inputs(tmp_path_factory.mktemp("inputs"), rows)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as entered:
        yield entered


@pytest.fixture
def served(tmp_path, inputs, monkeypatch, stack):
    """A job of a served variant; its stub notes what it is asked in `tmp_path`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {STUB} "$@"\n')
    python.chmod(0o755)
    tokens = ChatTemplate.load(inputs["target"][0].parent).tokenize(PROBE)
    short = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # the paths of sockets must be
    monkeypatch.setattr(pool, "lock_folder", lambda: short)
    environment = {"STUB_FOLDER": str(tmp_path), "STUB_TOKENS": ",".join(map(str, tokens))}

    def job(concurrency=2, variant=None, environment_more=None, **settings):
        made = cell_job(tmp_path, inputs)
        changed = {"variant": VARIANT | (variant or {}), "concurrency": concurrency, "task": {"max_tokens": 40, "turns": "all"}}
        server = {"python": str(python), "environment": environment | (environment_more or {}), "linger": LINGER, "start_timeout": 20}
        output = tmp_path / f"results/toy/benchmark/task/v/c{concurrency}"
        return replace(made, settings={**made.settings, **changed, **settings}, runtime={**made.runtime, "server": server}, output=output)

    yield job
    for pid in keepers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not processes(tmp_path)), "a keeper that is killed takes its servers along"


def keepers(folder):
    """The keepers among them."""
    return [pid for pid in processes(folder) if b"serving.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def processes(folder):
    """Processes that were started for a test's stub."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def read_cell(job):
    return json.loads((job.output / "cell.json").read_text())


def asked(folder, way):
    return [json.loads(line) for line in (folder / way).read_text().splitlines()]


def test_a_served_cell(served, tmp_path):
    job = served(concurrency=1, repeats=2)
    run(job, benchmark)
    cell, outputs = read_cell(job), pl.read_parquet(job.output / "outputs.parquet")
    assert outputs["id"].to_list() == [*(f"row{number}" for number in range(7)), "row6"]
    assert outputs["turn"].to_list() == [0] * 7 + [1], "both turns of the conversation that has two"
    assert (cell["prompts"], cell["conversations"], cell["identical"]) == (8, 7, 8)
    written = sum(len(ids) for ids in outputs["speculative_ids"])
    assert (cell["completion_tokens"], cell["verify_steps"] + cell["accepted_drafts"]) == (written, written - 8)
    assert cell["accept_length"] == pytest.approx((written - 8) / cell["verify_steps"]) == pytest.approx(cell["server_accept_length"])
    assert sum(cell["accepted_histogram"]) == cell["verify_steps"] and len(cell["accepted_histogram"]) == cell["ceiling"] == 3
    low, high = cell["speedup_interval"]
    assert 0 < low <= cell["speedup"] <= high
    assert cell["speedup"] == pytest.approx(cell["tok_s"] / cell["baseline_tok_s"], rel=1e-3)
    assert min(cell["cycle_seconds"], cell["baseline_step_seconds"]) > 0
    for name in ("ttft_seconds", "itl_seconds", "baseline_ttft_seconds", "baseline_itl_seconds"):
        assert cell[name]["mean"] > 0 and 0 <= cell[name]["p50"] <= cell[name]["p95"] <= cell[name]["p99"]
    assert (cell["engine"], cell["concurrency"], cell["turns"], cell["draft_tokens"], len(cell["repeats"])) == ("sglang", 1, "all", 3, 2)
    assert (cell["server"]["version"], cell["versions"]["sglang"], cell["server_packages"]["torch"]) == ("0.5.17", "0.5.17", "2.11.0")
    assert 1.0 <= cell["simulated_accept_length"] <= 3.0


def test_both_servers_get_the_same_flags_but_the_speculative_ones(served, tmp_path):
    flags = ["--page-size", "1", "--speculative-attention-mode", "decode", "--context-length", "400"]
    job = served(variant={"flags": flags, "attention_backend": "triton", "prompts": 1})
    run(job, benchmark)
    server = read_cell(job)["server"]
    extra = [word for word in server["command"] if word not in server["baseline_command"]]
    assert [word for word in extra if word.startswith("--")] == [
        *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk"),
        *("--speculative-num-draft-tokens", "--speculative-attention-mode"),
    ]
    assert server["baseline_command"][-6:] == ["--attention-backend", "triton", "--page-size", "1", "--context-length", "400"]


def test_the_second_turn_stands_on_the_ways_own_first_answer(served, tmp_path):
    """Benchmarks that send first turns only measure short prompts (SpecForge 0.2.0, its `mt-bench`)."""
    run(served(environment_more={"STUB_FAULT": "differs"}), benchmark)
    longest = {way: max(asked(tmp_path, way), key=lambda body: len(body["input_ids"]))["input_ids"] for way in ("baseline", "variant")}
    assert longest["baseline"] != longest["variant"]


def test_no_prompt_comes_twice_in_a_pass_and_the_cache_is_flushed(served, tmp_path):
    """Prompts repeated to fill a number are read from the prefix cache (SpecForge 0.2.0 cycles through its data)."""
    run(served(), benchmark)
    streamed = [tuple(body["input_ids"]) for body in asked(tmp_path, "baseline") if body["sampling_params"]["max_new_tokens"] == 40]
    assert len(streamed) == len(set(streamed)) == 8


def test_cells_of_one_configuration_share_their_servers(served, tmp_path):
    for concurrency in (8, 2, 4):
        run(served(concurrency=concurrency, variant={"prompts": 4}), benchmark)
    assert (tmp_path / "starts").read_text() == "vb"
    run(served(variant={"prompts": 4, "draft_steps": 1, "draft_tokens": 2}, variant_name="shorter"), benchmark)
    assert (tmp_path / "starts").read_text() == "vbv", "the target alone stays, as its flags do"


def one_by_one(job):
    """The job with one server at a time."""
    return replace(job, runtime={**job.runtime, "server": {**job.runtime["server"], "side_by_side": False}})


def test_one_server_at_a_time(served, tmp_path):
    """Two copies of a large target do not fit beside each other; the next cell begins with the server that is up."""
    fault = {"STUB_FAULT": "differs"}
    together, apart = served(repeats=2, environment_more=fault), one_by_one(served(repeats=2, variant_name="apart", environment_more=fault))
    run(together, benchmark)
    whole = read_cell(together)
    run(apart, benchmark)
    cell = read_cell(apart)
    assert (tmp_path / "starts").read_text() == "vb" + "vb", "the one with drafts first: what is wrong with it shows before all is measured"
    assert (cell["server"]["side_by_side"], whole["server"]["side_by_side"]) == (False, True)
    assert [cell[name] for name in ("prompts", "completion_tokens", "verify_steps")] == [
        whole[name] for name in ("prompts", "completion_tokens", "verify_steps")
    ]
    assert (cell["near_tie"] + cell["different"], cell["uncompared"], len(cell["repeats"])) == (7, 1, 2)
    run(one_by_one(served(concurrency=4, environment_more=fault)), benchmark)
    assert (tmp_path / "starts").read_text() == "vb" + "vb" + "v", "the target alone was up still"


def test_one_server_at_a_time_is_not_started_again_by_a_resumed_cell(served, tmp_path, monkeypatch):
    job = one_by_one(served())
    with monkeypatch.context() as patched:
        patched.setattr("scripts.lib.benchmark.served.judged", lambda *_: (_ for _ in ()).throw(StageError("killed")))
        with pytest.raises(StageError, match="killed"):
            run(job, benchmark)
    before = [(tmp_path / way).read_text() for way in ("baseline", "variant")]
    run(job, benchmark)
    assert (tmp_path / "starts").read_text() == "vb"
    assert [(tmp_path / way).read_text() for way in ("baseline", "variant")] == before, "nothing is asked again"
    assert read_cell(job)["server"]["command"].count("--speculative-algorithm") == 1


def test_two_servers_that_do_not_fit_beside_each_other_say_what_to_do(served):
    with pytest.raises(StageError, match=r"ends with: RuntimeError: Not enough memory.*set runtime\.server\.side_by_side to false"):
        run(served(environment_more={"STUB_FAULT": "crowded"}), benchmark)
    with pytest.raises(StageError, match=r"ends with: RuntimeError: Not enough memory.*change algorithm, attention_backend or flags"):
        run(one_by_one(served(environment_more={"STUB_FAULT": "crowded"})), benchmark)


def test_an_algorithm_without_a_drafter_is_a_row_too(served, inputs, tmp_path):
    job = served(variant={"algorithm": "NGRAM", "drafter": None, "draft_steps": None, "draft_tokens": 4})
    run(replace(job, inputs={**inputs, "drafter": ()}), benchmark)
    cell = read_cell(job)
    assert (cell["algorithm"], cell["drafter"], cell["ceiling"], cell["simulated_accept_length"]) == ("NGRAM", None, 4, None)
    assert (cell["topk"], cell["cuda_graphs"], [found["name"] for found in cell["findings"]]) == (None, None, ["server_silent"])
    assert "--speculative-num-steps" not in cell["server"]["command"]


def test_a_foreign_drafter_is_served_from_its_folder(served, inputs, tmp_path):
    folder = inputs["drafter"][0].parent
    job = served(variant={"drafter": f"path:{folder}", "prompts": 2})
    run(replace(job, inputs={**inputs, "drafter": ()}), benchmark)
    assert str(folder) in read_cell(job)["server"]["command"]
    missing = served(variant={"drafter": f"path:{tmp_path}"}, variant_name="missing")
    with pytest.raises(StageError, match=r"variants\.missing\.drafter: .* holds no config\.json"):
        run(replace(missing, inputs={**inputs, "drafter": ()}), benchmark)


def test_an_idle_drafter_stops_before_anything_is_timed(served, tmp_path):
    """A wiring error shows as an accept length of exactly 1.00 and nothing else (sgl-project/sglang pull 21272)."""
    with pytest.raises(StageError, match=r"accept_near_one"):
        run(served(environment_more={"STUB_FAULT": "idle"}), benchmark)
    assert all(not body.get("stream") for body in asked(tmp_path, "variant"))


def test_a_server_that_counts_no_steps_stops_too(served):
    """A missing accept length is never 1.0 (SpecForge 0.2.0, `bench_eagle3`)."""
    with pytest.raises(StageError, match=r"no_speculation"):
        run(served(environment_more={"STUB_FAULT": "uncounted"}), benchmark)


def test_servers_that_differ_in_more_than_speculation_are_refused(served):
    """Flags such as CUDA graphs explain more of a speed than drafts do (sgl-project/sglang pull 4247)."""
    with pytest.raises(StageError, match=r"runs with dtype half, the target alone with float32"):
        run(served(environment_more={"STUB_FAULT": "slower"}), benchmark)


@pytest.mark.parametrize(("gap", "kind"), [(0.0005, "near_tie"), (2.0, "different")])
def test_a_difference_is_judged_by_the_target_alone(served, gap, kind):
    """Temperature 0 with and without speculation differs at near ties (vllm-project/vllm issue 7627)."""
    job = served(environment_more={"STUB_FAULT": "differs", "STUB_GAP": str(gap)})
    run(job, benchmark)
    cell, outputs = read_cell(job), pl.read_parquet(job.output / "outputs.parquet")
    assert (cell[kind], cell["uncompared"], cell["identical"]) == (7, 1, 0)
    assert outputs["first_difference"].to_list() == [2] * 7 + [None]
    assert outputs["gap"][0] == pytest.approx(gap)
    assert any(note.startswith("NOT LOSSLESS") for note in cell["notes"]) == (kind == "different")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", "died with code 3; .*illegal memory access was encountered; finished work is kept: start again"),
        ("aborts", "ended as abort"),
    ],
)
def test_what_was_measured_before_a_fault_is_kept(served, tmp_path, monkeypatch, fault, said):
    monkeypatch.setattr("scripts.lib.benchmark.blocks.BLOCK_PROMPTS", 2)
    monkeypatch.setattr("scripts.lib.benchmark.blocks.BLOCK_ROUNDS", 1)
    with pytest.raises(StageError, match=said):
        run(served(environment_more={"STUB_FAULT": fault, "STUB_REQUESTS": "11"}), benchmark)
    (work,) = (tmp_path / "work/benchmark").glob("*/partial")
    kept = {path.name: path.read_bytes() for path in work.glob("*.json")}
    assert kept, "the blocks before the fault"
    before = len(asked(tmp_path, "baseline"))
    job = served()
    run(job, benchmark)
    assert read_cell(job)["prompts"] == 8
    streamed = [body for body in asked(tmp_path, "baseline")[before:] if body["sampling_params"]["max_new_tokens"] == 40]
    assert len(streamed) < 8, "kept blocks are not asked again"


def test_a_server_that_does_not_start_says_why(served):
    with pytest.raises(StageError, match=r"servers/\w+\.log: the server died with code \d+ before it was healthy; its log ends with:"):
        run(served(variant={"flags": ["--host", "no.such.host.invalid"]}), benchmark)


def test_a_hub_drafter_is_served_from_the_cache(served, inputs, tmp_path, monkeypatch):
    """With a pinned revision no network is asked for what is there."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / f"hub/models--made--up/snapshots/{revision}"
    shutil.copytree(inputs["drafter"][0].parent, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = {"drafter": "hub:made/up", "revision": revision, "prompts": 2}
    job = served(variant=hub)
    run(replace(job, inputs={**inputs, "drafter": ()}), benchmark)
    cell = read_cell(job)
    assert cell["server"]["command"][cell["server"]["command"].index("--speculative-draft-model-path") + 1] == str(snapshot)
    assert (cell["drafter"], cell["simulated_accept_length"]) == ("hub:made/up", None)
    other = served(variant=hub | {"revision": revision[::-1]}, variant_name="other")
    with pytest.raises(StageError, match=r"drafter hub:made/up at 7654\w+: .*check the id, the revision and the network"):
        run(replace(other, inputs={**inputs, "drafter": ()}), benchmark)


def test_a_whole_model_drafts_where_its_vocabulary_is_the_targets(served, inputs, tmp_path):
    target = inputs["target"][0].parent
    standalone = {"algorithm": "STANDALONE", "drafter": f"path:{target}", "prompts": 2}
    job = served(variant=standalone)
    run(replace(job, inputs={**inputs, "drafter": ()}), benchmark)
    cell = read_cell(job)
    assert (cell["algorithm"], cell["ceiling"], cell["simulated_accept_length"]) == ("STANDALONE", 3, None)
    assert [found["name"] for found in cell["findings"]] == ["server_silent"], "it reads no states of the target"
    other = tmp_path / "other"
    shutil.copytree(target, other)
    (other / "config.json").write_text((target / "config.json").read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    wrong = served(variant=standalone | {"drafter": f"path:{other}"}, variant_name="other")
    with pytest.raises(StageError, match=r"other_target: vocab_size is \d+, the target's"):
        run(replace(wrong, inputs={**inputs, "drafter": ()}), benchmark)
