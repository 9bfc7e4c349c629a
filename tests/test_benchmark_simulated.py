"""The walk over answers against chain decoding itself: both must accept the same drafts."""

import random
from dataclasses import replace

import pytest
import torch

from scripts.lib.benchmark import simulated
from scripts.lib.benchmark.simulated import simulated_accept_length, walk
from scripts.lib.eagle3.closed_form import Sample, closed_form_start
from scripts.lib.eagle3.export import load_drafter, save_drafter
from scripts.lib.eagle3.initial import initialise, warm_start
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.eagle3.target import TargetWeights
from scripts.lib.engines.transformers_engine import forward_states, load_target
from scripts.lib.speculation.decoding import decode_chain, decode_plain
from scripts.lib.speculation.figures import accept_length
from scripts.lib.speculation.limits import Limits
from tests.scripted_drafter import BOUNDARIES
from tests.tiny import save_tiny_target

PROMPTS = [[1, *random.Random(number).choices(range(3, 250), k=3 + number % 9)] for number in range(10)]


@pytest.fixture(scope="module", params=[1, 2])
def case(request, tmp_path_factory):
    """A tiny target, a drafter of one or two layers that guesses some of its tokens, and answers of several lengths and ends."""
    folder = tmp_path_factory.mktemp("simulated")
    target, drafter = save_tiny_target(folder / "target"), folder / "drafter"
    drafter.mkdir()
    model = load_target(target, torch.float32, "cpu")
    limits = [Limits(frozenset({2, 60, 61, 62, 63, 64}), 6 + 5 * (number % 7)) for number in range(len(PROMPTS))]
    answers = [decode_plain(model, prompt, limit).output_ids for prompt, limit in zip(PROMPTS, limits, strict=True)]
    save_drafter(half_right(TargetWeights(target), [*zip(PROMPTS, answers, strict=True)], model, request.param), drafter)
    return model, target, drafter, limits, answers


def half_right(weights, rows, model, layers=1):
    """A drafter fitted in closed form on the very answers, so that it is right often and not always; further layers disturb it a little."""
    kept = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    kept[sorted({token for _, answer in rows for token in answer} | set(range(0, 272, 2)))] = True
    ids = kept.nonzero().flatten()
    config = replace(DrafterConfig.from_target(weights.config, len(ids), BOUNDARIES), num_hidden_layers=layers)
    drafter = Drafter(config, ids - torch.arange(len(ids)), kept).float()
    initialise(drafter, 0)
    warm_start(drafter, weights)
    samples = []
    for prompt, answer in rows:
        tokens = torch.tensor([*prompt, *answer])
        final, aux = forward_states(model, tokens[None], None, BOUNDARIES)
        samples.append(Sample(aux[:-1], tokens[1:], final[1:]))
    closed_form_start(drafter, weights.embedding(), samples)
    with torch.no_grad():
        for layer in drafter.decoder[1:]:
            layer.self_attn.o_proj.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
            layer.mlp.down_proj.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(2))
    return drafter


@pytest.mark.parametrize(("draft_steps", "pass_tokens"), [(1, 16384), (3, 16384), (5, 40)])
def test_the_walk_accepts_what_chain_decoding_accepts(case, monkeypatch, draft_steps, pass_tokens):
    model, target, folder, limits, answers = case
    monkeypatch.setattr(simulated, "PASS_TOKENS", pass_tokens)
    drafter = load_drafter(folder, torch.float32, "cpu")
    runs = [decode_chain(model, drafter, draft_steps, prompt, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    assert [run.output_ids for run in runs] == answers
    served = accept_length([drafts for run in runs for drafts in run.accepted])
    assert 1.1 < served < draft_steps + 1
    rows = list(zip(PROMPTS, answers, strict=True))
    assert simulated_accept_length(target, folder, rows, draft_steps, "cpu") == pytest.approx(served, abs=1e-9)


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_walk_in_bfloat16_is_nearly_that_in_float32(case, tmp_path, norm_output):
    """As in cells on a GPU. States that norm_output gives are float32, whatever the drafter's own arithmetic is."""
    _, target, folder, _, answers = case
    own = load_drafter(folder, torch.float32, "cpu")
    drafter = Drafter(replace(own.config, norm_output=norm_output), own.d2t, own.t2d)
    drafter.load_state_dict(own.state_dict())
    save_drafter(drafter, tmp_path)
    counted = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_target(target, dtype, "cpu")
        counted.append(walk(model, load_drafter(tmp_path, dtype, "cpu"), [*zip(PROMPTS, answers, strict=True)], 3).tolist())
    assert counted[0][0] > 50 and counted[1] == pytest.approx(counted[0], rel=0.1)


def test_answers_of_one_token_have_no_verify_step(case):
    _, target, folder, _, answers = case
    assert simulated_accept_length(target, folder, [(PROMPTS[0], answers[0][:1])], 3, "cpu") is None
    assert simulated_accept_length(target, folder, [], 3, "cpu") is None
