"""Walks, loops, packing and schedules: small values by hand."""

import pytest
import torch

from scripts.lib.training.batches import TrainingRow, collate, epoch_order, pack
from scripts.lib.training.evaluation import Tally, accepted_drafts, walk_rows
from scripts.lib.training.repetition import ends_in_loop
from scripts.lib.training.schedule import learning_rate, plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.unroll import Step
from tests.train_case import SETTINGS


def batch_of(tokens: list[int], slots: list[int], remaining: list[int]):
    """A batch of one row whose states do not matter."""
    count = len(slots)
    row = TrainingRow(
        "row",
        torch.tensor(tokens),
        torch.zeros(len(tokens) - 1, 3, 2),
        torch.tensor(slots),
        torch.tensor(remaining),
        torch.zeros(count, 2),
        torch.zeros(count),
    )
    return collate([row], torch.float32, "cpu")


def test_walk_jumps_over_accepted_drafts_and_the_bonus_token():
    """Six slots; at the first two drafts hold, the cycle ends at the fourth, then none, then one: 3 cycles, 3 drafts.

    The mean over positions would say 1 + 8/6 = 2.33 where speculation gives 1 + 3/3 = 2.
    """
    tally = Tally.empty(2)
    walk_rows(batch_of(list(range(8)), [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]), [2, 2, 2, 0, 1, 1], tally)
    assert (tally.plain.cycles, tally.plain.accepted) == (3, 3)
    assert tally.plain.accept_length == 2.0
    assert tally.loops.accept_length is None


def test_walk_never_crosses_into_the_next_span():
    tally = Tally.empty(2)
    walk_rows(batch_of(list(range(9)), [1, 2, 5, 6], [2, 1, 2, 1]), [2, 1, 0, 1], tally)
    assert (tally.plain.cycles, tally.plain.accepted) == (3, 3)


def test_drafts_count_only_in_a_row_from_the_first():
    steps = [Step(torch.zeros(3, 1), torch.tensor([0, 1, 2])), Step(torch.zeros(2, 1), torch.tensor([0, 1]))]
    assert accepted_drafts([torch.tensor([True, False, True]), torch.tensor([True, True])], steps, 3) == [2, 0, 1]


def test_rows_that_end_in_a_loop_are_walked_apart():
    tokens = [1, 2] + [5, 6, 7] * 9
    tally = Tally.empty(1)
    count = len(tokens) - 2
    walk_rows(batch_of(tokens, list(range(1, count + 1)), list(range(count, 0, -1))), [0] * count, tally)
    assert tally.loops.cycles == count
    assert tally.plain.cycles == 0


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([1, 2, 3] * 8, True),
        ([9] * 24, True),
        ([9] * 23, False),
        (list(range(20)) * 2, False),
        (list(range(20)) * 3, True),
        ([*([9] * 30), 1], False),
    ],
)
def test_loops_need_three_repeats_and_a_long_tail(tokens, loop):
    assert ends_in_loop(tokens) is loop


def test_packs_hold_every_row_once_and_are_about_equal():
    lengths = [5, 9, 3, 7, 6, 4, 8, 2, 11, 1]
    order = epoch_order(len(lengths), 7, 0)
    packs = pack(lengths, order, 14)
    assert [index for indices in packs for index in indices] == order
    assert len(packs) == 4
    assert max(sum(lengths[index] for index in indices) for indices in packs) <= 14 + 11


def test_a_row_longer_than_a_batch_stays_whole():
    packs = pack([2, 100, 2], [0, 1, 2], 10)
    assert [index for indices in packs for index in indices] == [0, 1, 2]


def test_order_is_a_function_of_seed_and_epoch():
    assert epoch_order(20, 7, 1) == epoch_order(20, 7, 1)
    assert epoch_order(20, 7, 1) != epoch_order(20, 7, 2) != epoch_order(20, 8, 2)
    assert sorted(epoch_order(20, 7, 1)) == list(range(20))


def test_learning_rate_rises_then_falls_to_nearly_nothing():
    settings = TrainSettings.of(SETTINGS)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[9] == rates[10] == settings.learning_rate == max(rates)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001 * settings.learning_rate


def test_first_half_of_the_steps_drafts_one_step_only():
    row = TrainingRow(
        "row", torch.zeros(12), torch.zeros(11, 3, 2), torch.arange(10), torch.arange(10, 0, -1), torch.zeros(10, 2), torch.zeros(10)
    )
    settings = TrainSettings.of({**SETTINGS, "drafter": {**SETTINGS["drafter"], "epochs": 3, "batch_tokens": 20, "ttt_steps": 4}})
    steps = plan((row,) * 8, settings)
    assert [step.draft_steps for step in steps] == [1] * 6 + [4] * 6
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2] * 4
