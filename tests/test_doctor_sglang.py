"""The doctor on the real SGLang: a server as meant is sound, and one that was started as EAGLE is named twice over."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.lib.benchmark.judging import next_token
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.preflight import preflight
from scripts.lib.doctor.served import after_start, canary, ceiling_of
from scripts.lib.doctor.walking import questions
from scripts.lib.serving.server import server
from tests.broken_drafters import tiny_run

pytest_plugins = ["tests.sglang_parts"]
pytestmark = pytest.mark.sglang


def test_a_server_of_the_target_alone_reports_and_renders_as_the_target(sglang_server):
    assert after_start(sglang_server.url, sglang_server.target, None, None) == []
    prompts = questions(ChatTemplate.load(sglang_server.target))[:1]
    assert [finding.name for finding in canary(sglang_server.url, prompts, 4)] == ["no_speculation"]


def test_eagle_for_eagle3_starts_without_a_word_and_is_named_before_and_after(sglang_settings, tmp_path):
    """sgl-project/sglang issue 21272: nothing but the accept length shows it."""
    run = tiny_run(tmp_path).with_flag("speculative-algorithm", "EAGLE")
    assert [finding.name for finding in preflight(run.target, run.drafter, "EAGLE3", run.flags)] == ["eagle_for_eagle3"]
    with server(sglang_settings, run.target, tmp_path / "server.log", run.flags) as running:
        (url,) = running.urls
        assert [finding.name for finding in after_start(url, run.target, run.drafter, "EAGLE3", run.flags)] == ["server_differs"]
        assert after_start(url, run.target, run.drafter, "EAGLE", run.flags) == []
        asked = questions(ChatTemplate.load(run.target))
        found = canary(url, asked, ceiling_of(url))
        best, chances = next_token(url, asked[0], [5, 9])
    assert [finding.name for finding in found] == ["accept_near_one"]
    logits = first_logits(run.target, asked[0])
    wanted = [float(logits.max() - logits[token]) for token in (5, 9)]
    assert [best - chance for chance in chances] == pytest.approx(wanted, abs=0.5), "prefill's token is the target's own"


@torch.no_grad()
def first_logits(target, ids):
    """What the target alone thinks of the token after `ids`."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()(torch.tensor([ids])).logits[0, -1].float()
