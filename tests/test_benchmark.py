import json
from dataclasses import replace

import polars as pl
import pytest

from scripts.lib.benchmark import measure as measure_module
from scripts.lib.benchmark.answers import Answer, Measured, Pair
from scripts.lib.benchmark.build import benchmark
from scripts.lib.benchmark.cell import cell_figures, notes
from scripts.lib.benchmark.measure import Bench
from scripts.lib.benchmark.prompts import first_turn
from scripts.lib.benchmark.settings import Settings
from scripts.lib.chat.messages import Message, to_rows
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import run
from scripts.lib.speculation.figures import histogram
from scripts.lib.speculation.verdict import Verdict
from tests.cell_parts import TARGET, cell_job, prompt_row, write_cell_inputs, write_mix, write_task

SETTINGS = Settings("mtbench", "chain4", "eagle3", draft_steps=4, dtype="float32", max_tokens=64, repeats=1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_cell_inputs(tmp_path_factory.mktemp("inputs"), [prompt_row(number) for number in range(4)])


def read_cell(job):
    return json.loads((job.output / "cell.json").read_text())


def test_a_cell_measures_every_prompt_once_a_pass(tmp_path, inputs):
    job = cell_job(tmp_path, inputs, repeats=2)
    run(job, benchmark)
    cell = read_cell(job)
    outputs = pl.read_parquet(job.output / "outputs.parquet")
    assert outputs["id"].to_list() == ["row0", "row1", "row2", "row3"]
    assert (cell["prompts"], cell["identical"], cell["near_tie"], cell["different"]) == (4, 4, 0, 0)
    assert outputs["plain_ids"].to_list() == outputs["speculative_ids"].to_list()
    written = sum(len(ids) for ids in outputs["speculative_ids"])
    assert cell["completion_tokens"] == written
    assert cell["verify_steps"] + cell["accepted_drafts"] == written - 4
    assert sum(cell["accepted_histogram"]) == cell["verify_steps"]
    assert cell["accept_length"] == pytest.approx((written - 4) / cell["verify_steps"])
    assert cell["break_even_accept_length"] == pytest.approx(cell["accept_length"] / cell["speedup"])
    assert (cell["ceiling"], cell["concurrency"], len(cell["repeats"])) == (3, 1, 2)
    assert cell["target"] == TARGET
    manifest = read_manifest(job.output / "manifest.json", "benchmark")
    assert manifest.facts["turns_measured"] == "first"
    assert "cell.json" in [shard.name for shard in manifest.shards]


def test_a_variant_can_measure_fewer_prompts(tmp_path, inputs):
    job = cell_job(tmp_path, inputs)
    job = replace(job, settings=job.settings | {"variant": job.settings["variant"] | {"prompts": 3}})
    run(job, benchmark)
    counts = read_manifest(job.output / "manifest.json", "benchmark").counts
    assert (read_cell(job)["prompts"], counts.rows_out, counts.rejected) == (3, 3, {"over_variants_prompts": 1})


def test_half_precision_cells_are_lossless_up_to_near_ties(tmp_path, inputs):
    job = cell_job(tmp_path, inputs, dtype="bfloat16")
    run(job, benchmark)
    cell = read_cell(job)
    assert cell["identical"] + cell["near_tie"] == 4
    outputs = pl.read_parquet(job.output / "outputs.parquet").filter(verdict="near_tie")
    assert outputs["gap"].is_not_null().all()


def test_prompts_of_the_training_data_are_rejected(tmp_path, inputs):
    silent = prompt_row(2) | {"messages": to_rows([Message("system", "Be kind.")])}
    rows = [prompt_row(0), prompt_row(1), silent, prompt_row(0) | {"id": "again"}, prompt_row(5, ["A?", "B?"])]
    trained = write_mix(tmp_path / "merged", [rows[1]["prompt_hash"]], held_out=[rows[0]["prompt_hash"]])
    job = cell_job(tmp_path, inputs | {"prepared": (write_task(tmp_path / "task", rows),), "merged": (trained,)}, max_tokens=3)
    run(job, benchmark)
    manifest = read_manifest(job.output / "manifest.json", "benchmark")
    assert manifest.counts.rejected == {"duplicate": 1, "in_training_data": 1, "no_user_turn": 1}
    assert (manifest.counts.rows_in, manifest.counts.rows_out) == (5, 2)
    assert manifest.facts["rejected_ids"]["in_training_data"] == ["row1"]
    assert manifest.facts["prompts_with_more_turns"] == 1


@pytest.mark.parametrize(
    "ending",
    [[], [Message("assistant")], [Message("assistant", "An answer of another model.")], [Message("assistant"), Message("user", "And?")]],
)
def test_the_prompt_ends_before_the_first_answer_wherever_it_comes_from(inputs, ending):
    template = ChatTemplate.load(inputs["target"][0].parent)
    row = prompt_row(0) | {"messages": to_rows([Message("user", "Why?"), *ending])}
    prompt = first_turn(row, template)
    assert prompt.ids == tuple(template.prompt_ids([Message("user", "Why?")]))
    assert prompt.more_turns == (len(ending) == 2)


def test_a_task_that_is_all_training_data_stops_the_stage(tmp_path, inputs):
    trained = write_mix(tmp_path / "merged", [prompt_row(number)["prompt_hash"] for number in range(4)])
    with pytest.raises(StageError, match=r"no prompt is left to measure, rejected \{'in_training_data': 4\}"):
        run(cell_job(tmp_path, inputs | {"merged": (trained,)}), benchmark)


def test_a_resumed_cell_does_not_measure_again(tmp_path, inputs, monkeypatch):
    job = cell_job(tmp_path, inputs, max_tokens=3)
    calls = []
    measured = Bench.pairs

    def killed(self, prompt, chain_first):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(prompt.id)
        return measured(self, prompt, chain_first)

    monkeypatch.setattr(measure_module.Bench, "pairs", killed)
    with pytest.raises(KeyboardInterrupt):
        run(job, benchmark)
    assert calls == ["row0", "row0", "row1"]
    calls.clear()
    run(job, benchmark)
    assert calls == ["row0", "row2", "row3"]
    assert read_cell(job)["prompts"] == 4


def test_the_two_ways_take_turns(tmp_path, inputs, monkeypatch):
    order = []
    measured = Bench.pairs

    def watched(self, prompt, chain_first):
        order.append((prompt.id, chain_first))
        return measured(self, prompt, chain_first)

    monkeypatch.setattr(measure_module.Bench, "pairs", watched)
    run(cell_job(tmp_path, inputs, repeats=2, max_tokens=2), benchmark)
    assert [first for _, first in order[1:]] == [False, True, False, True, True, False, True, False]
    assert [id_ for id_, _ in order[1:5]] == [id_ for id_, _ in order[5:]] == ["row0", "row1", "row2", "row3"]


def pair(ids=(5,) * 11, accepted=(1,) * 5, plain_seconds=1.0, seconds=1.25, verdict=None):
    plain = Answer(tuple(ids), 0.2, plain_seconds)
    chain = Answer(tuple(ids), 0.3, seconds, len(accepted), sum(accepted), tuple(histogram(accepted, 4)))
    return Pair("x", plain, chain, verdict or Verdict("identical"))


def figures(*passes, settings=SETTINGS):
    return cell_figures(settings, Measured(passes))


def test_speed_is_tokens_after_the_first_over_decode_seconds():
    cell = figures([pair(), pair()])
    assert (cell["baseline_tok_s"], cell["tok_s"], cell["speedup"]) == (10.0, 8.0, 0.8)
    assert (cell["accept_length"], cell["break_even_accept_length"]) == (2.0, 2.5)
    assert (cell["baseline_prefill_seconds"], cell["prefill_seconds"]) == (0.2, 0.3)
    assert notes(cell) == [], "what the figures mean is the report's to say"


def test_an_idle_drafter_is_flagged():
    """A wiring error shows as an accept length of exactly 1.00 without any other sign (sgl-project/sglang pull 21272)."""
    cell = figures([pair(accepted=(0,) * 10, seconds=2.0)])
    assert cell["accept_length"] == 1.0
    assert "the drafter does nothing" in notes(cell)[0]
    assert not any("nothing" in note for note in notes(figures([pair(accepted=(1, 0) * 5)])))


def test_a_cell_without_verify_steps_has_no_accept_length():
    cell = figures([pair(ids=(2,), accepted=(), plain_seconds=0.0, seconds=0.0)])
    assert (cell["accept_length"], cell["speedup"], cell["tok_s"], cell["break_even_accept_length"]) == (None, None, None, None)
    assert notes(cell) == ["no verify step: every answer ended with its first token"]


def test_outputs_that_differ_are_counted_and_loud():
    verdicts = [Verdict("different", 2, 3.0, 0.5), Verdict("near_tie", 4, 0.1, 0.5), Verdict("identical")]
    cell = figures([pair(verdict=verdict) for verdict in verdicts])
    assert (cell["identical"], cell["near_tie"], cell["different"]) == (1, 1, 1)
    assert notes(cell)[0].startswith("NOT LOSSLESS: 1 of 3 outputs")


def test_repeats_that_differ_are_noted():
    slow = [replace(pair(), plain=replace(pair().plain, decode_seconds=2.0))]
    assert any("repeats differ by 50%" in note for note in notes(figures([pair()], slow)))


def test_both_turns_are_measured_where_the_task_says_so(tmp_path, inputs):
    rows = [prompt_row(0), prompt_row(1, ["What is red?", "And blue?"])]
    job = cell_job(tmp_path, inputs | {"prepared": (write_task(tmp_path / "task", rows),)}, max_tokens=4)
    run(replace(job, settings=job.settings | {"task": {"max_tokens": 4, "turns": "all"}}), benchmark)
    outputs, cell = pl.read_parquet(job.output / "outputs.parquet"), read_cell(job)
    assert outputs.select("id", "turn").rows() == [("row0", 0), ("row1", 0), ("row1", 1)]
    assert (cell["prompts"], cell["conversations"], cell["identical"], cell["turns"]) == (3, 2, 3, "all")


def test_a_later_turn_stands_on_the_answers_of_its_own_way(inputs):
    template = ChatTemplate.load(inputs["target"][0].parent)
    prompt = first_turn(prompt_row(1, ["What is red?", "And blue?"]), template)
    said = template.tokenize("A colour.<|im_end|>")
    turns = [Message("user", "What is red?"), Message("assistant", "A colour."), Message("user", "And blue?")]
    assert prompt.ids_after([said], template) == template.prompt_ids(turns)
