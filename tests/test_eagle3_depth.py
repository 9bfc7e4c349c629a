"""Drafters of several decoder layers: losses and gradients of the reference on both training paths, and its states when decoding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter
from scripts.lib.training import slot_attention
from scripts.lib.training.batches import Batch, collate
from scripts.lib.training.flops import PASSES, model_flops, shared_flops, work_of
from scripts.lib.training.products import Operands
from scripts.lib.training.rows import shard_rows
from scripts.lib.training.unroll import unroll
from tests import reference_eagle3 as reference
from tests import test_eagle3_reference, test_train_packed
from tests.test_eagle3_reference import STEPS, chains, fast, gradients, plain, rows, same_gradients, shard, slow, target  # noqa: F401
from tests.test_train_packed import alone, packed, teacher  # noqa: F401

packed_rows = test_train_packed.rows
one_layer = test_eagle3_reference.drafter


def deeper(drafter: Drafter, layers: int, **switches: Any) -> Drafter:
    """A drafter like `drafter` of so many layers, whose weights are large enough that each matters."""
    config = replace(drafter.config, num_hidden_layers=layers, **switches)
    made = Drafter(config, drafter.d2t, drafter.t2d)
    initialise(made, 5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return made


@pytest.fixture(scope="module")
def deep(one_layer: Drafter) -> Drafter:
    return deeper(one_layer, 2)


@pytest.mark.parametrize(
    ("layers", "switches"), [(2, {}), (3, {}), (2, {"fc_norm": True, "norm_output": True})], ids=["two", "three", "eagle-3.1"]
)
def test_several_layers_have_the_losses_and_gradients_of_the_reference(one_layer, target, rows, layers, switches):  # noqa: F811
    drafter, chosen = deeper(one_layer, layers, **switches), rows if layers == 2 and not switches else rows[1:]
    total, means = fast(drafter, target, chosen)
    wanted, wanted_means = slow(drafter, target, chosen)
    torch.testing.assert_close(torch.tensor(means), torch.stack(wanted_means), rtol=1e-4, atol=0)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=0)
    same_gradients(drafter, wanted)


def test_attention_of_three_positions_at_a_time_changes_nothing(deep, target, rows, monkeypatch):  # noqa: F811
    whole, _ = fast(deep, target, rows)
    wanted = gradients(deep)
    monkeypatch.setattr(slot_attention, "QUERIES", 3)
    parts, _ = fast(deep, target, rows)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=0)
    for name, gradient in gradients(deep).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_products_in_bf16_stay_within_three_percent(deep, target, rows):  # noqa: F811
    whole, _ = fast(deep, target, rows)
    wanted = gradients(deep)
    total, _ = fast(deep, target, rows, dtype=torch.bfloat16)
    torch.testing.assert_close(total, whole, rtol=5e-3, atol=0)
    for name, gradient in gradients(deep).items():
        assert (gradient - wanted[name]).norm() <= 0.03 * wanted[name].norm(), name


def test_a_batch_is_its_rows_alone(deep, target, rows):  # noqa: F811
    operands, embedding = Operands(deep, torch.float32), target.model.embed_tokens.weight

    def batch(some: list[reference.ReferenceRow]) -> Batch:
        return collate([row for row in shard_rows(Path("x"), shard(some)) if len(row.slots)], torch.float32, "cpu")

    together = unroll(operands, embedding, batch(rows), STEPS)
    single = [unroll(operands, embedding, batch([row]), STEPS) for row in rows]
    for step in range(STEPS):
        parts = [unrolled[step].states for unrolled in single if step < len(unrolled)]
        torch.testing.assert_close(together[step].states, torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layers", "extra"), [(2, 0), (2, 2), (3, 0)])
def test_packed_batches_have_the_loss_and_gradients_of_their_rows(one_layer, teacher, packed_rows, layers, extra):  # noqa: F811
    drafter = deeper(one_layer, layers)
    loss, found = packed(drafter, teacher, packed_rows, torch.float32, extra)
    wanted, expected = alone(drafter, teacher, packed_rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    assert found.keys() == expected.keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_packed_batches_in_bf16_stay_within_three_percent_of_their_rows(one_layer, teacher, packed_rows):  # noqa: F811
    drafter = deeper(one_layer, 2)
    loss, found = packed(drafter, teacher, packed_rows, torch.bfloat16)
    wanted, expected = alone(drafter, teacher, packed_rows)
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.03 * gradient.norm(), name


def test_decoding_a_chain_gives_the_states_of_training(deep, target, rows):  # noqa: F811
    """One cache holds both layers: prefill, three drafts more from its own states, then the drafts are forgotten in both."""
    lengths = [(slot + 1, {layer.length for layer in cache.layers.values()}) for slot, cache in chains(deep, target, rows[0])]
    assert lengths
    assert all(found == {length} for length, found in lengths)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_flops_are_those_of_the_products_that_run(one_layer, teacher, packed_rows, layers, monkeypatch):  # noqa: F811
    """Forward alone, without attention and head: what is executed, and what is not as steps share it."""
    drafter = deeper(one_layer, layers)
    monkeypatch.setattr("scripts.lib.training.unroll.attend", lambda parts, queries, first, own: queries)
    batch = collate(packed_rows, torch.float32, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unroll(Operands(drafter, torch.float32), teacher.embedding, batch, STEPS)
    config, work = replace(drafter.config, draft_vocab_size=0), work_of(packed_rows, STEPS)
    fuse = 2 * work.positions * 3 * 64 * 64
    asked = model_flops(config, replace(work, keys=0, other_keys=0)) - 2 * fuse
    assert counter.get_total_flops() == fuse + (asked - shared_flops(config, work)) / PASSES
    everywhere = sum(len(row.aux) * (len(row.aux) + 1) // 2 for row in packed_rows)
    assert work.other_keys == everywhere - sum(int((row.slots + 1).sum()) for row in packed_rows) > 0
