"""Walks, loops, packing and schedules: small values by hand."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from scripts.lib.training.batches import TrainingRow, epoch_order, order_by_shard, shard_order
from scripts.lib.training.evaluation import Tally, accepted_drafts, spans_in_loops
from scripts.lib.training.packing import NEIGHBOURS, pack, split, spread, traded
from scripts.lib.training.repetition import ends_in_loop
from scripts.lib.training.rows import RowSet
from scripts.lib.training.schedule import learning_rate, plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.slots import trained_slots
from tests.train_case import SETTINGS


def walked(accepted: list[int], remaining: list[int], loops: list[bool]) -> Tally:
    tally = Tally(2)
    tally.walk(torch.tensor(accepted), torch.tensor(remaining), torch.tensor(loops))
    return tally


def test_walk_jumps_over_accepted_drafts_and_the_bonus_token():
    """Six slots; at the first two drafts hold, the cycle ends at the fourth, then none, then one: 3 cycles, 3 drafts.

    The mean over positions would say 1 + 8/6 = 2.33 where speculation gives 1 + 3/3 = 2.
    """
    tally = walked([2, 2, 2, 0, 1, 1], [6, 5, 4, 3, 2, 1], [False])
    assert tally.walks.tolist() == [[3, 3], [0, 0]]
    tally.slots += 1
    figures = tally.figures(0.8)
    assert figures["accept_length"] == 2.0
    assert figures["accept_length_loops"] is None


def test_walk_never_crosses_into_the_next_span_nor_into_filler():
    assert walked([2, 1, 0, 1, 0, 0], [2, 1, 2, 1, 0, 0], [False, False]).walks.tolist() == [[3, 3], [0, 0]]


def test_rows_that_end_in_a_loop_are_walked_apart():
    assert walked([1, 0, 0, 0, 0], [2, 1, 3, 2, 1], [False, True]).walks.tolist() == [[1, 1], [3, 0]]


def test_walks_are_those_of_a_loop_over_cycles():
    draw = random.Random(0)
    spans = [draw.randrange(1, 70) for _ in range(40)]
    remaining = [left for span in spans for left in range(span, 0, -1)]
    accepted = [min(draw.randrange(4), left) for left in remaining]
    cycles = drafts = first = 0
    for span in spans:
        place = first
        while place < first + span:
            cycles, drafts, place = cycles + 1, drafts + accepted[place], place + accepted[place] + 1
        first += span
    assert walked(accepted, remaining, [False] * len(spans)).walks.tolist() == [[cycles, drafts], [0, 0]]


def test_drafts_count_only_in_a_row_from_the_first():
    assert accepted_drafts(torch.tensor([[True, False, True], [True, True, False]])).tolist() == [2, 0, 1]


def test_spans_in_loops_are_found_by_their_own_tokens():
    tokens = torch.tensor([1, 2, 3, *range(10, 40), *([5, 6, 7] * 9)])
    slots, remaining = trained_slots([(3, 33), (33, 60)])
    row = TrainingRow("row", tokens, torch.zeros(len(tokens) - 1, 3, 2), slots, remaining, torch.zeros(0), torch.zeros(0))
    assert spans_in_loops(row).tolist() == [False, True]


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
    assert [sum(lengths[index] for index in indices) for indices in packs] == [14, 15, 9, 18]


def largest_of_any_cut(lengths, runs):
    """The least that the largest of so many runs of `lengths` holds, of all ways to cut them."""
    places = combinations(range(1, len(lengths)), runs - 1)
    return min(max(sum(lengths[a:b]) for a, b in pairwise((0, *cuts, len(lengths)))) for cuts in places)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_has_a_smaller_largest_pack(seed):
    """What a GPU computes, and keeps, is as much as the largest pack holds, for each of them."""
    draw = random.Random(seed)
    lengths = [draw.choice([1, 5, draw.randint(1, 60)]) for _ in range(draw.randint(1, 12))]
    order, tokens = draw.sample(range(len(lengths)), len(lengths)), draw.randint(1, 90)
    packs = pack(lengths, order, tokens)
    assert [index for indices in packs for index in indices] == order and all(packs)
    assert len(packs) == min(max(round(sum(min(length, tokens) for length in lengths) / tokens), 1), len(lengths))
    assert max(sum(lengths[index] for index in indices) for indices in packs) == largest_of_any_cut([lengths[i] for i in order], len(packs))


def test_the_last_pack_is_about_as_large_as_the_others():
    lengths = [random.Random(number).randint(20, 1000) for number in range(2000)]
    sizes = [sum(lengths[index] for index in indices) for indices in pack(lengths, range(2000), 8192)]
    assert max(sizes) < 8192 * 1.06 and min(sizes) > 8192 * 0.9


def test_a_row_longer_than_a_batch_stays_whole_and_counts_as_one():
    """Long rows once stood for as many steps as they would have filled, which short ones were cut into slivers for."""
    assert pack([2, 100, 2, 10, 9], [0, 1, 2, 3, 4], 10) == [[0], [1], [2, 3, 4]]
    assert [len(indices) for indices in pack([1000] + [1] * 100, range(101), 10)] == [1] + [10] * 10
    assert pack([], [], 10) == [] and pack([3], [0], 10) == [[0]]
    draw = random.Random(7)
    sizes = [(slots := draw.randint(8000, 32000) if draw.random() < 0.1 else draw.randint(50, 1500), slots + 100) for _ in range(3000)]
    for neighbours in (1, NEIGHBOURS):
        held = [sum(sizes[index][0] for index in indices) for indices in spread(sizes, range(3000), 8192, neighbours)]
        assert len(held) == pytest.approx(sum(min(slots, 8192) for slots, _ in sizes) / 8192, rel=0.02)
        assert sum(tokens < 2048 for tokens in held) < 0.02 * len(held)


def test_a_step_is_split_into_equal_batches_without_losing_a_row():
    sizes = [(length, length) for length in (5, 9, 3, 7, 6, 4, 8, 2, 11, 1, 900)]
    batches = split(sizes, range(10), 20)
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    assert [sum(sizes[index][0] for index in batch) for batch in batches] == [19, 19, 18]
    assert batches == [sorted(batch) for batch in batches]
    assert split(sizes, [3, 10, 1], 1000) == [[3, 10, 1]]
    assert split(sizes, [10], 20) == [[10]]


def test_sets_are_equal_in_positions_too():
    """Rows with long prompts and short answers once met in one batch, whose positions set the size of all others."""
    sizes = [(10, 100)] * 4 + [(10, 10)] * 4
    assert [sum(sizes[index][1] for index in indices) for indices in split(sizes, range(8), 20)] == [110] * 4


def test_rows_are_traded_until_the_largest_set_gets_no_smaller():
    """Dealt out one by one, rows of prompts and answers of any length once left a twentieth of each batch empty."""
    draw = random.Random(3)
    sizes = [(slots := draw.randint(20, 1000), slots + draw.randint(0, 600)) for _ in range(64)]
    for kind in (0, 1):
        held = [sum(sizes[index][kind] for index in indices) for indices in split(sizes, range(64), 8192)]
        assert len(held) == 4 and max(held) < 1.01 * sum(held) / len(held)


def test_a_long_row_alone_keeps_others_from_no_trade_and_a_row_may_be_given_for_none():
    sizes = [(900, 900), (40, 40), (30, 30), (30, 30), (30, 30), (30, 30), (20, 20), (20, 20)]
    found = split(sizes, range(8), 100)
    assert found[0] == [0] and sorted(sum(sizes[index][0] for index in indices) for indices in found[1:]) == [100, 100]
    shares = np.array([(0.25, 0.25)] * 4)
    assert sorted(len(indices) for indices in traded(shares, [0, 0, 0, 1], 2)) == [2, 2]
    assert traded(shares[:1], [0], 2) == [[0], []] and split([], [], 10) == []


def test_rows_change_places_with_near_ones_only():
    draw = random.Random(7)
    sizes = [(slots := draw.randint(20, 1000), slots + draw.randint(0, 600)) for _ in range(3000)]
    order = epoch_order(3000, 7, 0)
    sets = spread(sizes, order, 8192)
    assert sorted(index for indices in sets for index in indices) == list(range(3000))
    place = {index: number for number, index in enumerate(order)}
    moved = [abs(place[index] / 3000 - number / len(sets)) for number, indices in enumerate(sets) for index in indices]
    assert max(moved) < 1.2 * NEIGHBOURS / len(sets)
    for kind in (0, 1):
        held = [sum(sizes[index][kind] for index in indices) for indices in sets]
        assert sum(held) / len(held) > 0.95 * max(held)
    assert [index for indices in spread(sizes, order, 8192, 1) for index in indices] == order
    assert spread(sizes[:3], [2, 0, 1], 10**6) == [[2, 0, 1]] and spread([], [], 10) == []


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


def test_an_order_by_shards_reads_one_after_the_other_each_shuffled():
    """Every row once an epoch; another seed or epoch shuffles shards and rows anew."""
    shards = [0] * 6 + [1] * 9 + [3] * 5
    order = order_by_shard(shards, 7, 1)
    assert sorted(order) == list(range(20)) and order == order_by_shard(shards, 7, 1)
    read = [shards[row] for row in order]
    assert list(dict.fromkeys(read)) == shard_order(shards, 7, 1) and sum(a != b for a, b in pairwise(read)) == 2
    orders = [tuple(order_by_shard(shards, seed, epoch)) for seed, epoch in ((7, 1), (7, 2), (8, 1))]
    assert len(set(orders)) == 3 and any(list(one) != sorted(one) for one in (order[:5], order[-5:]))


def test_first_half_of_the_steps_drafts_one_step_only():
    row = TrainingRow(
        "row", torch.zeros(12), torch.zeros(11, 3, 2), torch.arange(10), torch.arange(10, 0, -1), torch.zeros(10, 2), torch.zeros(10)
    )
    settings = TrainSettings.of({**SETTINGS, "drafter": {**SETTINGS["drafter"], "epochs": 3, "batch_tokens": 20, "ttt_steps": 4}})
    steps = plan(RowSet.of([[row] * 8]), settings)
    assert [step.draft_steps for step in steps] == [1] * 6 + [4] * 6
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4 + [2] * 4
