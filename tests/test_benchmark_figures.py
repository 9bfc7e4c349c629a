"""Each figure of a served cell by its definition, on answers that are written out."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from scripts.lib.benchmark.answers import Answer, Measured, Pair
from scripts.lib.benchmark.blocks import Blocks, cut
from scripts.lib.benchmark.cell import accepted, cell_figures, notes
from scripts.lib.benchmark.flags import baseline_flags, variant_flags
from scripts.lib.benchmark.latency import inter_token, plain_answer, speedup_interval
from scripts.lib.benchmark.load import Load, read_answer
from scripts.lib.benchmark.settings import Settings
from scripts.lib.benchmark.streaming import Streamed
from scripts.lib.ground.errors import StageError
from scripts.lib.speculation.verdict import Verdict

SETTINGS = Settings("mtbench", "steps3", "eagle3", 3, "bfloat16", max_tokens=64, repeats=1, engine="sglang")


def answer(tokens=11, steps=5, seconds=1.0, *, histogram=(), server_drafts=None, events=()):
    drafts = None if steps is None else tokens - 1 - steps
    return Answer((7,) * tokens, 0.1, seconds, steps, drafts, histogram, server_drafts, events)


def pair(chain, plain=None, name="x"):
    return Pair(name, plain or answer(steps=None, seconds=2.0), chain, Verdict("identical"))


def events(*pieces, cumulative=False, finish="stop", **meta):
    """What a server streams: (seconds, tokens) of each piece."""
    found, ids = Streamed(0.0, 200), []
    for seconds, tokens in pieces:
        new = list(range(len(ids), len(ids) + tokens))
        ids += new
        last = len(found.pieces) == len(pieces) - 1
        told = {"completion_tokens": len(ids), "finish_reason": {"type": finish} if last else None} | (meta if last else {})
        event = {"output_ids": list(ids) if cumulative else new, "meta_info": told}
        found.pieces.append((seconds, b"data: " + json.dumps(event).encode() + b"\n\n"))
    found.pieces.append((9.0, b"data: [DONE]\n\n"))
    return found


@pytest.mark.parametrize("cumulative", [False, True])
def test_tokens_are_counted_and_not_events(cumulative):
    """With speculation a piece of a stream holds several tokens (sgl-project/sglang pull 22063)."""
    found = read_answer("url", events((0.5, 3), (1.0, 1), (1.5, 4), cumulative=cumulative, spec_verify_ct=3))
    assert found.ids == tuple(range(8))
    assert (found.prefill_seconds, found.decode_seconds, found.events) == (0.5, 1.0, ((0.5, 1), (1.0, 4)))
    assert (found.steps, found.drafts) == (3, 4), "the first token is prefill's"


def test_an_event_that_comes_in_two_pieces_is_one():
    whole = events((0.5, 2), (1.0, 3))
    moment, data = whole.pieces[1]
    whole.pieces[1:2] = [(0.8, data[:20]), (moment, data[20:])]
    assert read_answer("url", whole).events == ((0.5, 3),)


def test_an_answer_that_lacks_tokens_is_an_error():
    broken = events((0.5, 2), (1.0, 3))
    del broken.pieces[0]
    with pytest.raises(StageError, match="sent 3 tokens of an answer of 5"):
        read_answer("url", broken)


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_answer_that_was_broken_off_is_an_error(finish):
    with pytest.raises(StageError, match=f"the answer ended as {finish}"):
        read_answer("url", events((0.5, 2), finish=finish))


def test_a_refusal_is_told_in_the_servers_words():
    with pytest.raises(StageError, match=r"status 400: .*longer than the context"):
        read_answer("url", Streamed(0.0, 400, [(0.1, b'{"error": "The input is longer than the context"}')]))


def test_accept_length_weighs_tokens_and_not_requests():
    """The mean of requests' own values is another figure (SpecForge 0.2.0, its benchmarks)."""
    found = accepted([answer(tokens=31, steps=10), answer(tokens=5, steps=4)], ceiling=4)
    assert found["accept_length"] == pytest.approx(1 + 20 / 14)
    assert (found["verify_steps"], found["accepted_drafts"]) == (14, 20)


def test_a_step_that_ends_an_answer_counts_what_it_wrote():
    """Drafts behind an end of turn were accepted and never written (vllm-project/vllm issue 56101).

    Three steps that accepted 2, 0 and 3 drafts, of which the last wrote 3 tokens, its end of turn among them.
    """
    found = accepted([answer(tokens=1 + 3 + 1 + 3, steps=3, histogram=(1, 0, 1, 1), server_drafts=5)], ceiling=4)
    assert found["accept_length"] == pytest.approx(7 / 3)
    assert found["server_accept_length"] == pytest.approx(8 / 3), "the server's own count goes on behind the end"
    assert found["accepted_histogram"] == [1, 0, 1, 1]


def test_a_missing_count_is_missing_and_not_one():
    """An accept length of 1.0 where the server says nothing looks like a useless drafter (SpecForge 0.2.0, `bench_eagle3`)."""
    found = accepted([answer(steps=None), answer()], ceiling=4)
    assert set(found.values()) == {None}
    cell = cell_figures(SETTINGS, Measured([[pair(answer(steps=None)), pair(answer())]], [(2.0, 1.0)]))
    assert (cell["accept_length"], cell["cycle_seconds"], cell["break_even_accept_length"]) == (None, None, None)
    assert cell["speedup"] == 2.0
    assert any("did not count" in note for note in notes(cell))


def test_an_answer_of_one_token_has_no_step():
    found = accepted([answer(tokens=1, steps=None), answer()], ceiling=4)
    assert (found["accept_length"], found["verify_steps"]) == (2.0, 5)


def test_speed_at_several_requests_at_once_is_that_of_the_clock():
    pairs = [pair(answer(), name=str(number)) for number in range(4)]
    cell = cell_figures(replace(SETTINGS, concurrency=4), Measured([pairs, pairs], [(4.0, 2.0), (4.4, 2.2)]))
    assert (cell["baseline_tok_s"], cell["tok_s"]) == (pytest.approx(88 / 8.4), pytest.approx(88 / 4.2))
    assert cell["repeats"] == [{"baseline_tok_s": 11.0, "tok_s": 22.0}, {"baseline_tok_s": 10.0, "tok_s": 20.0}]
    assert (cell["cycle_seconds"], cell["baseline_step_seconds"]) == (0.2, 0.2)
    assert (cell["decode_seconds"], cell["baseline_decode_seconds"]) == (4.0, 8.0), "of one pass"


def test_tokens_of_one_piece_share_its_time():
    found = inter_token([pair(answer(), answer(events=((0.4, 2), (1.0, 1))))], plain_answer)
    assert (found["mean"], found["p50"]) == (pytest.approx(1.0 / 3), pytest.approx(0.2))


def test_the_interval_of_the_speed_up():
    alike = [pair(answer(), name=str(number)) for number in range(8)]
    low, high = speedup_interval([alike], lambda a: a.decode_seconds, 1.7, seed=1)
    assert (low, high) == (pytest.approx(1.7), pytest.approx(1.7)), "no prompt differs, whatever the clock says"
    varied = [pair(answer(seconds=1.0 + number / 4), name=str(number)) for number in range(8)]
    low, high = speedup_interval([varied], lambda a: a.decode_seconds, 1.0, seed=1)
    assert 0.7 < low < 0.95 and 1.05 < high < 1.5
    assert speedup_interval([varied], lambda a: a.decode_seconds, 1.0, seed=1) == [low, high]
    assert speedup_interval([varied[:1]], lambda a: a.decode_seconds, 1.0, seed=1) is None


def test_a_server_is_warmed_up_at_every_power_of_two(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(Load, "run", lambda self, url, prompts: ran.append((self.concurrency, len(prompts))))
    Blocks(Load(None, 64, 8, "all"), [range(10), range(10)], 1, tmp_path).warm("http://server")
    assert ran == [(8, 16), (4, 8), (2, 4), (1, 2)]


@pytest.mark.parametrize(("count", "concurrency", "sizes"), [(80, 1, [8] * 10), (80, 32, [80]), (83, 8, [41, 42]), (3, 1, [3])])
def test_blocks_are_long_beside_their_ends(count, concurrency, sizes):
    blocks = cut(range(count), concurrency)
    assert [len(block) for block in blocks] == sizes
    assert all(a[-1] + 1 == b[0] for a, b in pairwise(blocks))


def test_a_tree_of_drafts_and_what_it_is_verified_with():
    tree = replace(SETTINGS, topk=4, draft_tokens=16, cuda_graphs=False, concurrency=64)
    assert (tree.ceiling, tree.verified) == (4, 16)
    flags = variant_flags(tree, on_cpu=False, drafter=None)
    assert flags[-6:] == ["--speculative-num-steps", "3", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16"]
    assert flags[: len(baseline_flags(tree, False))] == baseline_flags(tree, False), "the target alone runs without CUDA graphs too"
    assert "--disable-cuda-graph" in flags and flags[flags.index("--max-running-requests") + 1] == "64"
    assert "--disable-cuda-graph" not in baseline_flags(tree, on_cpu=True)


def test_ngram_drafts_as_far_as_its_tokens_go():
    ngram = replace(SETTINGS, algorithm="NGRAM", drafter=None, draft_steps=None)
    assert (ngram.ceiling, ngram.verified) == (12, 12)
    assert variant_flags(ngram, on_cpu=False, drafter=None)[3:] == [
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "12")
    ]


@pytest.mark.parametrize(
    ("algorithm", "remedy"), [("EAGLE3", "layers, d2t"), ("STANDALONE", "text like the target's"), ("NGRAM", "repeat")]
)
def test_drafts_that_are_never_accepted_are_noted_with_what_to_do(algorithm, remedy):
    settings = replace(SETTINGS, algorithm=algorithm, draft_steps=None if algorithm == "NGRAM" else 3)
    cell = cell_figures(settings, Measured([[pair(answer(tokens=11, steps=10))]], [(2.0, 1.0)]))
    assert (cell["accept_length"], cell["topk"]) == (1.0, None if algorithm == "NGRAM" else 1)
    assert any(remedy in note for note in notes(cell))
