"""The fast training path equals the plain reference in losses and gradients; decoding equals training-time states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.states.format import HiddenShard
from scripts.lib.training import loss, slot_attention
from scripts.lib.training.batches import collate
from scripts.lib.training.loss import Board, Lesson, learn
from scripts.lib.training.objectives import objective
from scripts.lib.training.products import Operands
from scripts.lib.training.rows import shard_rows
from scripts.lib.training.slots import trained_slots
from scripts.lib.training.unroll import unroll
from tests import reference_eagle3 as reference
from tests.tiny import tiny_config

STEPS, DECAY = 4, 0.8
LENGTHS = (23, 9, 14)
SPANS = ([(5, 12), (15, 23)], [(3, 6)], [(0, 8), (8, 9), (12, 14)])  # two turns; ends early; no prompt, one token, two tokens


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(tiny_config(layers=2)).eval()


@pytest.fixture(scope="module")
def drafter(target: LlamaForCausalLM) -> Drafter:
    ids = torch.arange(1, 200, 2)
    t2d = torch.zeros(272, dtype=torch.bool)
    t2d[ids] = True
    drafter = Drafter(DrafterConfig.from_target(target.config, len(ids), (1, 2, 3)), ids - torch.arange(len(ids)), t2d)
    initialise(drafter, 5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return drafter


@pytest.fixture(scope="module")
def rows() -> list[reference.ReferenceRow]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, spans in zip(LENGTHS, SPANS, strict=True):
        aux = torch.randn(length, 192, generator=generator).bfloat16().float()
        final = torch.randn(length, 64, generator=generator).bfloat16().float()
        made.append(reference.ReferenceRow(torch.randint(0, 272, (length,), generator=generator), aux, final, spans))
    return made


def shard(rows: list[reference.ReferenceRow]) -> HiddenShard:
    starts = torch.tensor([0, *(len(row.tokens) for row in rows)]).cumsum(0)
    teachers = [
        [start + place for first, last in row.spans for place in range(first, last - 1)]
        for row, start in zip(rows, starts.tolist(), strict=False)
    ]
    index = torch.tensor([place for places in teachers for place in places])
    final = torch.cat([row.final for row in rows]).bfloat16()[index]
    return HiddenShard(
        input_ids=torch.cat([row.tokens for row in rows]).int(),
        row_offsets=starts,
        aux=torch.cat([row.aux for row in rows]).view(-1, 3, 64).bfloat16(),
        final=final,
        final_index=index,
        argmax=torch.zeros(len(index), dtype=torch.int32),
        loss_spans=torch.tensor(
            [[start + first, start + last] for row, start in zip(rows, starts.tolist(), strict=False) for first, last in row.spans]
        ),
        ids=tuple(f"row{number}" for number in range(len(rows))),
    )


def fast(
    drafter: Drafter, target: LlamaForCausalLM, rows: list[reference.ReferenceRow], kind: str = "soft", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[float]]:
    """The loss and its mean at each step; the gradients are left in the drafter."""
    drafter.zero_grad()
    batch = collate([row for row in shard_rows(Path("x"), shard(rows)) if len(row.slots)], dtype, "cpu")
    operands = Operands(drafter, dtype)
    unrolled = unroll(operands, target.model.embed_tokens.weight.detach(), batch, STEPS)
    counts = [len(step.active) for step in unrolled]
    weights = [DECAY**number / count for number, count in enumerate(counts)]
    head = target.lm_head.weight[drafter.target_ids].detach().to(dtype)
    sums = learn(operands, unrolled, Lesson(batch.final, head, weights, objective(kind, 0.9, 2.0)), Board())
    return sums @ torch.tensor(weights), (sums / torch.tensor(counts)).tolist()


def slow(
    drafter: Drafter, target: LlamaForCausalLM, rows: list[reference.ReferenceRow], kind: str = "soft"
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    embedding, head = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    return reference.loss(
        plain(drafter), reference.ReferenceTarget(embedding, head, drafter.d2t, drafter.t2d), rows, STEPS, DECAY, kind=kind
    )


def plain(drafter: Drafter) -> reference.ReferenceDrafter:
    theta, eps = drafter.config.rope_parameters["rope_theta"], drafter.config.rms_norm_eps
    return reference.ReferenceDrafter(dict(drafter.named_parameters()), drafter.config.head_dim, theta, eps, drafter.config.norm_output)


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None}


def test_packed_batch_has_the_losses_and_gradients_of_the_reference(drafter, target, rows):
    total, means = fast(drafter, target, rows)
    wanted, wanted_means = slow(drafter, target, rows)
    assert len(means) == STEPS
    torch.testing.assert_close(torch.tensor(means), torch.stack(wanted_means), rtol=1e-4, atol=0)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=0)
    same_gradients(drafter, wanted)


@pytest.mark.parametrize("kind", ["hard", "lk_alpha", "lk_lambda"])
def test_other_objectives_have_the_losses_and_gradients_of_the_reference(drafter, target, rows, kind):
    _, means = fast(drafter, target, rows[1:], kind)
    wanted, wanted_means = slow(drafter, target, rows[1:], kind)
    torch.testing.assert_close(torch.tensor(means), torch.stack(wanted_means), rtol=1e-4, atol=1e-6)
    same_gradients(drafter, wanted)


def test_small_chunks_and_pieces_change_nothing(drafter, target, rows, monkeypatch):
    """Logits of five teachers at a time, judged two rows at a time; attention of three slots at a time."""
    whole, means = fast(drafter, target, rows)
    wanted = gradients(drafter)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 5 * STEPS * len(drafter.target_ids))
    monkeypatch.setattr(loss, "BLOCK_ROWS", 2)
    monkeypatch.setattr(slot_attention, "QUERIES", 3)
    total, parts = fast(drafter, target, rows)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts, means, rtol=1e-5, atol=0)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_products_in_bf16_stay_within_three_percent(drafter, target, rows):
    """8 bits of mantissa in the products; norms, softmax, losses and gradients of weights in float32."""
    whole, _ = fast(drafter, target, rows)
    wanted = gradients(drafter)
    total, _ = fast(drafter, target, rows, dtype=torch.bfloat16)
    torch.testing.assert_close(total, whole, rtol=5e-3, atol=0)
    for name, gradient in gradients(drafter).items():
        assert gradient.dtype == torch.float32, name
        assert (gradient - wanted[name]).norm() <= 0.03 * wanted[name].norm(), name


def same_gradients(drafter: Drafter, wanted: torch.Tensor) -> None:
    fast_ones = gradients(drafter)
    drafter.zero_grad()
    wanted.backward()
    expected = gradients(drafter)
    assert fast_ones.keys() == expected.keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (fast_ones[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_eagle_3_1_has_the_losses_and_gradients_of_the_reference(drafter, target, rows):
    """States normed before `fc`, and fed back behind the last norm."""
    newer = Drafter(replace(drafter.config, fc_norm=True, norm_output=True), drafter.d2t, drafter.t2d)
    newer.load_state_dict(drafter.state_dict(), strict=False)
    with torch.no_grad():
        for number, weight in enumerate(newer.fc_norm.parameters()):
            weight.add_(0.1 * (number + 1))
    total, _ = fast(newer, target, rows[1:])
    wanted, _ = slow(newer, target, rows[1:])
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=0)
    same_gradients(newer, wanted)
    plain_total, _ = fast(drafter, target, rows[1:])
    assert (total - plain_total).abs() > 1e-3


def test_packed_batch_is_its_rows_alone(drafter, target, rows):
    batch = collate([row for row in shard_rows(Path("x"), shard(rows)) if len(row.slots)], torch.float32, "cpu")
    operands, embedding = Operands(drafter, torch.float32), target.model.embed_tokens.weight
    together = unroll(operands, embedding, batch, STEPS)
    alone = [unroll(operands, embedding, collate(list(shard_rows(Path("x"), shard([row]))), torch.float32, "cpu"), STEPS) for row in rows]
    for step in range(STEPS):
        parts = [single[step].states for single in alone if step < len(single)]
        torch.testing.assert_close(together[step].states, torch.cat(parts), rtol=1e-5, atol=1e-5)


def test_tokens_outside_of_the_trained_part_have_no_influence(drafter, target, rows):
    changed = [reference.ReferenceRow(row.tokens.clone(), row.aux.clone(), row.final, row.spans) for row in rows]
    changed[0].tokens[:5] = 7  # a prompt reaches slot 4 only through its states
    changed[1].tokens[7:] = 7
    changed[1].aux[5:] = 9.0
    before, after = fast(drafter, target, rows[1:2])[0], fast(drafter, target, changed[1:2])[0]
    assert torch.equal(before, after)
    assert not torch.equal(fast(drafter, target, rows[:1])[0], fast(drafter, target, changed[:1])[0])


def test_slots_of_a_turn_start_at_the_last_prompt_token_and_end_before_its_last_target():
    """Public report: SafeAILab/EAGLE issue 317; slot 2 and 3 of [10, 11, 12 | 20, 21, 22] are trained, slots 0, 1, 4, 5 are not."""
    slots, remaining = trained_slots([(3, 6)])
    assert slots.tolist() == [2, 3]
    assert remaining.tolist() == [2, 1]
    row = reference.ReferenceRow(torch.tensor([10, 11, 12, 20, 21, 22]), torch.empty(0), torch.empty(0), [(3, 6)])
    assert [slot for slot in range(6) if row.trained(slot, 0)] == [2, 3]
    assert [slot for slot in range(6) if row.trained(slot, 1)] == [2]


@pytest.mark.parametrize(("spans", "slots"), [([(3, 4)], []), ([(3, 5)], [2]), ([(0, 3)], [0]), ([(2, 5), (5, 8)], [1, 2, 4, 5])])
def test_slots_need_two_tokens_of_one_span(spans, slots):
    assert trained_slots(spans)[0].tolist() == slots


def chains(drafter, target, row):
    """Decode at every slot of `row`: prefill, drafts from its own states, each compared with the reference, which are then forgotten.

    Yields the slot and the cache after each.
    """
    embedding, cache = target.model.embed_tokens.weight.detach(), DraftCache()
    wanted = reference.states(plain(drafter), embedding, row, STEPS)
    with torch.no_grad():
        fused = drafter.fuse(row.aux)
        assert sorted(wanted[0]) == [slot for slot in range(len(row.tokens) - 2) if row.trained(slot, 0)]
        for slot in sorted(wanted[0]):
            known = torch.arange(cache.length, slot + 1)
            hidden = drafter.decode(embedding[row.tokens[known + 1]], fused[known], known, cache)[-1:]
            for step in range(STEPS):
                if not row.trained(slot, step):
                    break
                if step:
                    token = row.tokens[slot + 1 + step : slot + 2 + step]
                    hidden = drafter.decode(embedding[token], hidden, torch.tensor([slot + step]), cache)
                torch.testing.assert_close(hidden[0], wanted[step][slot], rtol=1e-4, atol=1e-5)
            cache.crop(slot + 1)
            yield slot, cache


def test_decoding_a_chain_gives_the_states_of_training(drafter, target, rows):
    """At every slot of a turn: prefill, draft three more from its own states, then forget the drafts."""
    assert [slot for slot, _ in chains(drafter, target, rows[0])]
