"""The start without training is the linear drafter that it claims to be."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.closed_form import Sample, closed_form_start, low_rank
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from tests.tiny import tiny_config


@pytest.fixture
def drafter() -> Drafter:
    ids = torch.arange(100)
    drafter = Drafter(DrafterConfig.from_target(tiny_config(), 100, (2, 4, 5)), ids - ids, torch.arange(272) < 100)
    initialise(drafter, 2)
    with torch.no_grad():
        drafter.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
    return drafter


def linear_samples(drafter: Drafter, embedding: torch.Tensor, rows: int) -> list[Sample]:
    """Rows of 50 slots whose next state is linear: states of uneven size, and a part of rank 8 from the embedding."""
    generator = torch.Generator().manual_seed(4)
    fuse = torch.randn(192, 64, generator=generator) * 0.1
    read = torch.randn(64, 8, generator=generator) @ torch.randn(8, 64, generator=generator) * 0.05
    sizes = torch.rand(192, generator=generator) * 20 + 0.1
    samples = []
    for _ in range(rows):
        states, tokens = torch.randn(50, 192, generator=generator), torch.randint(0, 272, (50,), generator=generator)
        normed = functional.rms_norm(embedding[tokens], (64,), eps=drafter.config.rms_norm_eps)
        goal = functional.rms_norm(states @ fuse + normed @ read, (64,), eps=1e-6) * drafter.norm.weight.detach()
        samples.append(Sample((states * sizes).view(-1, 3, 64), tokens, goal))
    return samples


def test_linear_target_is_found_and_written_into_fc_and_own_token_heads(drafter):
    embedding = torch.randn(272, 64, generator=torch.Generator().manual_seed(5)) * 0.1
    samples = linear_samples(drafter, embedding, 60)
    closed_form_start(drafter, embedding, samples[:-1])
    unseen = samples[-1]
    with torch.no_grad():
        alone = [
            drafter.decode(embedding[token][None], drafter.fuse(aux[None]), torch.tensor([3]), DraftCache())
            for aux, token in zip(unseen.aux, unseen.next_tokens, strict=True)
        ]
        likeness = functional.cosine_similarity(drafter.norm(torch.cat(alone)), unseen.final)
        without_token = functional.cosine_similarity(drafter.norm(drafter.fuse(unseen.aux)), unseen.final)
    assert likeness.mean() > 0.98
    assert without_token.mean() < 0.9


def test_further_layers_are_silent_at_first_and_keep_what_they_read_with(drafter):
    """A target's layer behind the best linear drafter would take it away from there."""
    deep = Drafter(replace(drafter.config, num_hidden_layers=2), drafter.d2t, drafter.t2d)
    initialise(deep, 2)
    deep.load_state_dict(drafter.state_dict(), strict=False)
    embedding = torch.randn(272, 64, generator=torch.Generator().manual_seed(5)) * 0.1
    samples = linear_samples(drafter, embedding, 20)
    for one in (drafter, deep):
        closed_form_start(one, embedding, samples)
    tokens, aux = samples[0].next_tokens, samples[0].aux
    with torch.no_grad():
        wanted, found = (one.decode(embedding[tokens], one.fuse(aux), torch.arange(len(tokens)), DraftCache()) for one in (drafter, deep))
    assert torch.equal(found, wanted)
    further = deep.decoder[1]
    assert all(projection.weight.abs().sum() > 0 for projection in (further.self_attn.v_proj, further.mlp.gate_proj))


def test_own_token_gets_most_of_the_attention():
    """Head size 64 as in real targets: eight tokens before it, one of them the same, hardly change what a slot reads."""
    config = tiny_config()
    config.head_dim, config.hidden_size = 64, 256
    drafter = Drafter(DrafterConfig.from_target(config, 100, (2, 4, 5)), torch.zeros(100, dtype=torch.int64), torch.arange(272) < 100)
    initialise(drafter, 2)
    generator = torch.Generator().manual_seed(6)
    embedding = torch.randn(272, 256, generator=generator)
    samples = [
        Sample(
            torch.randn(50, 3, 256, generator=generator),
            torch.randint(0, 272, (50,), generator=generator),
            torch.randn(50, 256, generator=generator),
        )
    ]
    closed_form_start(drafter, embedding, samples)
    tokens, hidden = torch.tensor([9, 4, 30, 7, 100, 200, 31, 8, 4]), torch.randn(9, 256, generator=generator)
    with torch.no_grad():
        together = drafter.decode(embedding[tokens], hidden, torch.arange(9), DraftCache())[-1] - hidden[-1]
        alone = drafter.decode(embedding[tokens[-1:]], hidden[-1:], torch.tensor([8]), DraftCache())[0] - hidden[-1]
    assert alone.norm() > 0
    assert functional.cosine_similarity(together, alone, 0) > 0.9


def test_low_rank_is_exact_when_the_rank_suffices_and_best_on_the_inputs_that_occur():
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(12, 4, generator=generator) @ torch.randn(4, 12, generator=generator)
    read, write = low_rank(weights, torch.eye(12), 4)
    torch.testing.assert_close(read @ write, weights, rtol=1e-3, atol=1e-3)
    inputs = torch.randn(500, 12, generator=generator) * torch.tensor([5.0] * 2 + [0.1] * 10)
    read, write = low_rank(weights, inputs.T @ inputs / 500, 2)
    assert (inputs @ read @ write - inputs @ weights).norm() < 0.1 * (inputs @ weights).norm()
