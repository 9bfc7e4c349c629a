"""Packed batches on fixed shapes give the losses and gradients of the rows alone; kernels' plain forms are checked here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.training.batches import TrainingRow, collate
from scripts.lib.training.distil import Goal, PlainHead, chunks, distil, plain_epilogue, shares
from scripts.lib.training.loss import Board, Lesson, Teacher, learn
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import BLOCK, Capacity, collate_packed, everywhere
from scripts.lib.training.packed_unroll import plain_kernels, unroll_packed
from scripts.lib.training.products import Operands
from scripts.lib.training.replayed import Recorded, Replayed, pays
from scripts.lib.training.row_attention import block_first_keys, block_mask, dense_first_keys
from scripts.lib.training.slots import trained_slots
from scripts.lib.training.stepping import Recipe
from scripts.lib.training.unroll import unroll
from tests.tiny import tiny_config

STEPS, DECAY = 4, 0.8
SPANS = ([(5, 12), (15, 23)], [(3, 6)], [(0, 8), (8, 9), (12, 14)], [(40, 190)], [(2, 40), (60, 61), (100, 160)])


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return drafter_for(torch.arange(1, 200, 2))


def drafter_for(ids: Tensor) -> Drafter:
    """A drafter of the target's tokens `ids`, with weights large enough to matter."""
    t2d = torch.zeros(272, dtype=torch.bool).index_fill(0, ids, True)
    drafter = Drafter(DrafterConfig.from_target(tiny_config(layers=2), len(ids), (1, 2, 3)), ids - torch.arange(len(ids)), t2d)
    initialise(drafter, 5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.1)
    return drafter


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(272, 64, generator=generator) * 0.3
    return Teacher(embedding, torch.randn(100, 64, generator=generator) * 0.3)


@pytest.fixture(scope="module")
def rows() -> list[TrainingRow]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, spans in enumerate(SPANS):
        slots, remaining = trained_slots(spans)
        length, count = int(slots[-1]) + 1, len(slots)
        made.append(
            TrainingRow(
                id=f"row{number}",
                tokens=torch.randint(0, 272, (length + 1,), generator=generator).int(),
                aux=torch.randn(length, 3, 64, generator=generator).bfloat16(),
                slots=slots,
                remaining=remaining,
                final=torch.randn(count, 64, generator=generator).bfloat16(),
                argmax=torch.randint(0, 272, (count,), generator=generator).int(),
            )
        )
    return made


def packed(
    drafter: Drafter, teacher: Teacher, rows: list[TrainingRow], dtype: torch.dtype, extra: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the packed path; `extra` blocks of filler."""
    needed = Capacity.of(rows)
    batch = collate_packed(rows, Capacity(needed.positions + extra * BLOCK, needed.slots + extra * BLOCK), dtype)
    drafter = drafter.to(dtype)
    drafter.zero_grad()
    states = unroll_packed(drafter, teacher.embedding, batch, STEPS, plain_kernels())
    counts = [int((batch.remaining > step).sum()) for step in range(STEPS)]
    share = shares(batch.remaining, torch.tensor([DECAY**step / max(count, 1) for step, count in enumerate(counts)]))
    goal = Goal(batch.final, teacher.head.to(dtype), share)
    head = PlainHead(plain_epilogue(soft_cross_entropy_), drafter.lm_head.weight.detach())
    head.teachers = 64
    found = distil([state.detach() for state in states], head, goal)
    torch.autograd.backward(states, found.states)
    gradients = {name: parameter.grad.float() for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    drafter.float()
    return (found.losses * share).sum(), gradients | {"lm_head.weight": found.head}


def alone(drafter: Drafter, teacher: Teacher, rows: list[TrainingRow]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the row-by-row path, which the plain reference holds."""
    drafter.zero_grad()
    batch = collate(rows, torch.float32, "cpu")
    operands = Operands(drafter, torch.float32)
    unrolled = unroll(operands, teacher.embedding, batch, STEPS)
    weights = [DECAY**number / len(step.active) for number, step in enumerate(unrolled)]
    sums = learn(operands, unrolled, Lesson(batch.final, teacher.head, weights, soft_cross_entropy_), Board())
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    return sums @ torch.tensor(weights), gradients


@pytest.mark.parametrize("extra", [0, 2])
def test_packed_batch_has_the_loss_and_gradients_of_its_rows(drafter, teacher, rows, extra):
    loss, gradients = packed(drafter, teacher, rows, torch.float32, extra)
    wanted, expected = alone(drafter, teacher, rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_packed_batches_know_eagle_3_1(drafter, teacher, rows):
    newer = Drafter(replace(drafter.config, fc_norm=True, norm_output=True), drafter.d2t, drafter.t2d)
    newer.load_state_dict(drafter.state_dict(), strict=False)
    loss, gradients = packed(newer, teacher, rows, torch.float32)
    wanted, expected = alone(newer, teacher, rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_bf16_stays_within_two_percent(drafter, teacher, rows):
    """Weights, states and matrix products in bf16: 8 bits of mantissa; softmax and sums in float32."""
    loss, gradients = packed(drafter, teacher, rows, torch.bfloat16)
    initialised = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    assert all(parameter.bfloat16().float().equal(parameter) for parameter in initialised.values())  # rounded by the cast above
    wanted, expected = alone(drafter, teacher, rows)
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 0.03 * gradient.norm(), name


def test_block_mask_covers_what_slots_see(rows):
    batch = collate_packed(rows, Capacity(640, 512), torch.float32)
    mask = block_mask(batch)
    wanted = create_block_mask(mask.mask_mod, None, None, 512, 640, device="cpu", BLOCK_SIZE=BLOCK)
    touched = mask.to_dense().bool()
    assert (touched | ~wanted.to_dense().bool()).all()
    needed = wanted.to_dense().sum()
    assert touched.sum() <= needed + 2


def test_block_mask_lists_the_blocks_of_slots_that_see_each_block_of_keys(rows):
    """The backward pass of the keys goes by these lists."""
    batch = collate_packed(rows, Capacity(640, 512), torch.float32)
    one_row = replace(batch, slots=torch.arange(100, 612), starts=torch.zeros(512, dtype=torch.int64))
    mask = block_mask(one_row)
    wanted = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK, mask.mask_mod, (512, 640)
    )
    for count, index in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        counts = getattr(mask, count)
        assert torch.equal(counts, getattr(wanted, count))
        for block, number in enumerate(counts[0, 0].tolist()):
            assert torch.equal(getattr(mask, index)[0, 0, block, :number], getattr(wanted, index)[0, 0, block, :number])
    assert mask.full_q_num_blocks.sum() > 0
    for index in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices):
        assert index.is_contiguous()  # kernels take a step of one from block to block without looking


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_positions_see_their_row_up_to_themselves_by_blocks_as_by_the_whole_matrix(rows):
    """Filler sees itself, so that nothing is divided by zero. Without gradients, which FlexAttention has on a GPU alone."""
    batch = everywhere(collate_packed(rows, Capacity(640, 512), torch.float32))
    generator = torch.Generator().manual_seed(3)
    queries, keys, values = (torch.randn(640, heads, 16, generator=generator) for heads in (4, 2, 2))
    blocks, whole = (first_keys(batch)(queries, keys, values) for first_keys in (block_first_keys, dense_first_keys))
    torch.testing.assert_close(blocks, whole)
    filled = sum(len(row.aux) for row in rows)
    assert filled < 640
    torch.testing.assert_close(whole[0][filled:], values[filled:].repeat_interleave(2, 1))
    torch.testing.assert_close(whole[0][:1], values[:1].repeat_interleave(2, 1))


def test_filler_has_no_teacher_and_repeats_a_real_slot(rows):
    batch = collate_packed(rows[:2], Capacity(256, 256), torch.float32)
    assert batch.trained == sum(len(row.slots) for row in rows[:2])
    assert (batch.remaining[batch.trained :] == 0).all()
    assert (batch.slots[batch.trained :] == batch.slots[batch.trained - 1]).all()
    assert (batch.starts <= batch.slots).all()


def test_batches_of_small_drafters_are_recorded_where_a_gpu_has_all_weights(drafter):
    recipe = Recipe(torch.bfloat16, "cuda", DECAY, 1.0, soft_cross_entropy_)
    assert pays(drafter, recipe, 8192) and not pays(drafter, recipe, 10**9)
    assert not pays(drafter, replace(recipe, shard=True), 8192) and not pays(drafter, replace(recipe, device="cpu"), 8192)


def test_the_second_batch_with_a_number_of_draft_steps_is_recorded_and_another_number_begins_anew(monkeypatch):
    """What was recorded is made up here: `tests/test_train_cuda.py` has real ones."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(Recorded, "of", lambda compute, batch, weights: done.append("recorded") or SimpleNamespace(replay=replay))

    def replay(batch, weights):
        done.append(f"replayed {batch} {len(weights)}")

    replayed = Replayed(lambda batch, weights: done.append(f"computed {batch} {len(weights)}"))
    for batch, steps in (("a", 1), ("b", 1), ("c", 1), ("d", 3), ("e", 3)):
        replayed(batch, torch.ones(steps))
    assert done == ["computed a 1", "recorded", "replayed b 1", "replayed c 1", "waited", "computed d 3", "recorded", "replayed e 3"]


@pytest.mark.parametrize("count", [0, 1, 16, 1152, 1153, 8448, 8449, 73856])
def test_chunks_are_few_and_about_equal(count):
    found = chunks(count, 1152)
    assert len(found) == -(-count // 1152)
    assert [index for part in found for index in range(count)[part]] == list(range(count))
    sizes = [part.stop - part.start for part in found]
    assert all(size % 16 == 0 for size in sizes[:-1]) and all(0 < size <= 1152 for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 2 * 16
