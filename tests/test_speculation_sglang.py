"""SGLang serves a drafter of the H200 run's recipe as it was trained: on a CPU in float32 it accepts just the drafts that we accept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.lib.benchmark.simulated import simulated_accept_length
from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.ground.stage import run
from scripts.lib.serving.asking import request
from scripts.lib.serving.server import server
from scripts.lib.speculation.decoding import decode_plain
from scripts.lib.speculation.limits import Limits
from scripts.lib.states.reader import read_shard
from scripts.lib.training.build import train
from tests.train_case import job, make_case

pytest_plugins = ["tests.sglang_parts"]
pytestmark = pytest.mark.sglang
STEPS, TOKENS = 3, 20


def prompts(root: Path) -> list[list[int]]:
    """The prompts of the training rows below `root`."""
    shard = read_shard(root / "hidden" / "train-00000.safetensors")
    starts = shard.row_offsets[:-1].tolist()
    return [shard.input_ids[start:first].tolist() for start, first in zip(starts, shard.loss_spans[:, 0].tolist(), strict=True)]


def without_second_layer(drafter: Path, folder: Path) -> Path:
    """A drafter whose second layer adds nothing."""
    silent = load_drafter(drafter, torch.float32, "cpu")
    for part in (silent.decoder[1].self_attn.o_proj, silent.decoder[1].mlp.down_proj):
        part.weight.zero_()
    folder.mkdir()
    save_drafter(silent, folder)
    return folder


def without_norm_of_output(drafter: Path, folder: Path) -> Path:
    """A drafter that gets its own states back as they are before the last norm."""
    other = load_drafter(drafter, torch.float32, "cpu")
    other.config = replace(other.config, norm_output=False)
    folder.mkdir()
    save_drafter(other, folder)
    return folder


def test_a_served_drafter_accepts_what_the_walk_accepts(sglang_settings, tmp_path):
    """Of two layers, with both norms of EAGLE-3.1, trained by Muon."""
    torch.set_num_threads(1)
    make_case(tmp_path)
    recipe = {"layers": 2, "fc_norm": True, "norm_output": True, "optimizer": "muon"}
    run(job(tmp_path, tmp_path / "drafter", **recipe, epochs=40, learning_rate=0.02, ttt_steps=STEPS), train)
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    model = load_target(target, torch.float32, "cpu")
    rows = [(prompt, decode_plain(model, prompt, Limits(frozenset(), TOKENS)).output_ids) for prompt in prompts(tmp_path)]
    others = (without_second_layer(drafter, tmp_path / "silent"), without_norm_of_output(drafter, tmp_path / "older"))
    simulated, *less = (simulated_accept_length(target, folder, rows, STEPS, "cpu") for folder in (drafter, *others))
    assert simulated and all(one and simulated > one + 0.05 for one in less), "these parts must matter for the rest to say something"
    options = {"algorithm": "EAGLE3", "draft-model-path": str(drafter), "num-steps": str(STEPS), "eagle-topk": "1"}
    flags = [word for name, value in options.items() for word in (f"--speculative-{name}", value)]
    flags += ["--speculative-num-draft-tokens", str(STEPS + 1), "--dtype", "float32"]
    with server(sglang_settings, target, tmp_path / "server.log", flags) as running:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        answers = [request(f"{running.urls[0]}/generate", {"input_ids": prompt, "sampling_params": sampling}) for prompt, _ in rows]
    assert [tuple(answer["output_ids"]) for answer in answers] == [output for _, output in rows]
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert sum(len(answer["output_ids"]) - 1 for answer in answers) / verified == pytest.approx(simulated, abs=1e-9)
