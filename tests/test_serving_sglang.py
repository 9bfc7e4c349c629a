"""Real SGLang on the CPU: started, checked, asked by ids, killed, started again, ended."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.serving.health import request
from scripts.lib.serving.server import server
from scripts.lib.serving.settings import ServerSettings
from tests.tiny import save_tiny_target

pytest_plugins = ["tests.sglang_parts"]
pytestmark = pytest.mark.sglang
NEW_TOKENS = 32


def answer(url: str, ids: list[int], tokens: int = NEW_TOKENS) -> list[int]:
    """What the server writes after `ids`, greedy."""
    return request(f"{url}/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}})["output_ids"]


def margins(folder: Path, prompt: list[int], output: list[int]) -> list[float]:
    """By how much transformers' best logit exceeds that of each token of `output`, which follows `prompt`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    return (logits.max(-1).values - logits[range(len(output)), output]).tolist()


def test_greedy_answers_by_ids_are_the_targets_own(sglang_server):
    text = "<|im_start|>user\nCount to three.<|im_end|>\n<|im_start|>assistant\n"
    ids = ChatTemplate.load(sglang_server.target).tokenize(text)
    output = answer(sglang_server.url, ids)
    noise = 0.125  # four units in the last place of bf16 at the size of these logits
    assert len(output) == NEW_TOKENS
    assert max(margins(sglang_server.target, ids, output)) <= noise


def test_the_version_found_is_the_one_that_was_tried(sglang_server):
    assert sglang_server.running.version == "0.5.23"
    sglang_server.running.check()


def test_attaching_to_a_server_of_the_same_target_elsewhere(sglang_server, tmp_path, caplog):
    copy = save_tiny_target(tmp_path / "copy")
    with server(ServerSettings(urls=[sglang_server.url]), copy, tmp_path / "unused.log") as running:
        assert running.urls == (sglang_server.url,)
        assert len(answer(running.urls[0], [5, 6, 7], tokens=2)) == 2
    assert "weights cannot be compared" in caplog.text
    assert request(f"{sglang_server.url}/model_info"), "leaving the block must not end a server that was attached to"
