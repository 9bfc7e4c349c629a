"""What a benchmark cell asks of a server, asked of real SGLang on the CPU."""

import json
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.lib.benchmark.judging import judge, next_token
from scripts.lib.benchmark.load import Load
from scripts.lib.benchmark.prompts import first_turn
from scripts.lib.benchmark.served import flush
from scripts.lib.chat.template import ChatTemplate
from tests.cell_parts import prompt_row

pytest_plugins = ["tests.sglang_parts"]
pytestmark = pytest.mark.sglang


@pytest.fixture
def load(sglang_server):
    return Load(ChatTemplate.load(sglang_server.target), 12, 2, "all")


@pytest.fixture
def prompts(load):
    rows = [prompt_row(0), prompt_row(1), prompt_row(2, ["What is red?", "And blue?"])]
    return [first_turn(row, load.template) for row in rows]


def test_streamed_answers_are_whole_and_timed(sglang_server, load, prompts):
    flush(sglang_server.url)
    seconds, talks = load.run(sglang_server.url, prompts)
    assert [len(talk) for talk in talks] == [1, 1, 2]
    answers = [turn.answer for talk in talks for turn in talk]
    for answer in answers:
        # A server that is held up before it first sends puts several tokens into its first piece.
        later = sum(tokens for _, tokens in answer.events)
        assert 0 <= later < len(answer.ids) == 12 and all(tokens > 0 for _, tokens in answer.events)
        assert 0 < answer.prefill_seconds <= answer.seconds < seconds
        assert answer.steps is None, "a server without speculation counts no steps"
    # A client that was held up reads all pieces of an answer at once, but not of every one.
    assert any(answer.prefill_seconds < answer.seconds for answer in answers)
    first = talks[2][0]
    assert talks[2][1].prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


def test_the_cache_is_emptied_once_the_server_has_done_what_it_was_asked_before(sglang_server, prompts):
    """A busy server refuses to empty it; the last answer of a block may be read a moment before the server is idle."""
    body = {"input_ids": list(prompts[0].ids), "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}
    asked = urllib.request.Request(f"{sglang_server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        assert b"output_ids" in answer.readline()
        flush(sglang_server.url)
        *_, last, done = [line for line in answer.read().splitlines() if line]
    assert json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == 200 and done == b"data: [DONE]"


def test_the_target_tells_how_far_two_tokens_lie_apart(sglang_server, load, prompts):
    _, talks = load.run(sglang_server.url, prompts[:1])
    ids, plain = list(prompts[0].ids), list(talks[0][0].answer.ids)
    model = AutoModelForCausalLM.from_pretrained(sglang_server.target, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids + plain[:3]])).logits[0, -1].float()
    worst = int(logits.argmin())
    best, chances = next_token(sglang_server.url, [*ids, *plain[:3]], [plain[3], worst])
    assert best - chances[1] == pytest.approx(float(logits.max() - logits[worst]), abs=0.5)
    verdict = judge(sglang_server.url, ids, plain, [*plain[:3], worst], "bfloat16")
    assert (verdict.kind, verdict.first_difference) == ("different", 3)
    assert judge(sglang_server.url, ids, plain, plain, "bfloat16").kind == "identical"
