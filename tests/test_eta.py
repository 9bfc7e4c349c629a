"""The end of a generation run as an interval: replays of seeded runs, and the parts of the estimate."""

import numpy as np
import pytest

from benchmarks.eta import RUNS, replay
from scripts.lib.watching.lengths import Lengths
from scripts.lib.watching.observed import Observed, Plan
from scripts.lib.watching.rates import Block, Rates, step_share
from scripts.lib.watching.survival import cumulative, fit, mean_and_variance, survival
from scripts.lib.watching.trend import Seen, forecast

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
def test_from_a_tenth_on_the_true_end_lies_in_the_interval(make, seed):
    looks = list(replay(make(seed), SHARES))
    assert len(looks) >= 3
    assert [look.share for look in looks if not look.inside] == []


def test_with_growing_lengths_the_interval_is_better_than_the_naive_estimate_and_useful():
    (half,) = replay(RUNS[1](2), (0.5,))
    assert half.naive < 0.6 * half.left
    assert abs(half.middle / half.left - 1) < 0.15
    assert half.width < 0.8


def test_running_requests_count_as_longer_than_they_are_now():
    random = np.random.default_rng(0)
    lengths, true = Lengths.empty([4000]), np.round(random.exponential(800, 400))
    present = np.full(400, 500.0)
    for row, tokens in enumerate(true):
        if tokens <= present[row]:
            lengths.add(0, row, int(tokens), True)
    longer = np.flatnonzero(true > present)
    running = lengths.running(np.zeros(len(longer), np.int64), longer, present[longer])
    fitted = fit(lengths, running, np.zeros(1, np.int64))
    alive = survival(cumulative(fitted.edges, fitted.ended / np.maximum(fitted.exposure, 1e-9)), np.ones(()))
    at = np.interp(400, fitted.edges, alive)
    assert at == pytest.approx((true > 400).mean(), abs=0.03)
    assert (true[true <= 500].mean()) < 300  # what the finished ones alone would say


def test_answers_cut_at_the_cap_are_no_ends():
    lengths = Lengths.empty([1000])
    for row in range(300):
        lengths.add(0, row, *((1000, False) if row % 2 else (100, True)))
    fitted = fit(lengths, np.zeros_like(lengths.ended), np.zeros(1, np.int64))
    hazard = fitted.ended / np.maximum(fitted.exposure, 1e-9)
    mean, _ = mean_and_variance(fitted.edges, survival(cumulative(fitted.edges, hazard), np.ones(())))
    assert float(mean) == pytest.approx(550, rel=0.05)


def test_groups_are_told_apart_where_rows_come_sorted():
    lengths = Lengths.empty([4000, 4000])
    random = np.random.default_rng(1)
    for row in range(800):
        group = int(row < 400)
        lengths.add(group, row, int(random.exponential(200 + 600 * group)) + 1, True)
    fitted = fit(lengths, np.zeros_like(lengths.ended), np.array([8, 9]))
    hazard = fitted.ended / np.maximum(fitted.exposure, 1e-9)
    means = [
        float(mean_and_variance(fitted.edges, survival(cumulative(fitted.edges, hazard * shape), np.ones(())))[0]) for shape in fitted.group
    ]
    assert means == [pytest.approx(200, rel=0.15), pytest.approx(800, rel=0.15)]
    filled = fitted.answers > 0
    assert np.abs(np.log(fitted.cohort[filled])).max() < 0.5  # no drift is seen in them


def test_histograms_survive_the_way_through_json():
    lengths = Lengths.empty([500, 500])
    for row in range(1000):
        lengths.add(row % 2, row, row % 500 + 1, row % 7 > 0)
    again = Lengths.restored(lengths.state())
    assert again.size == lengths.size > 8
    assert (again.ended == lengths.ended).all() and (again.cut == lengths.cut).all()
    assert again.ended.sum() + again.cut.sum() == 1000


def test_a_forecast_follows_a_clear_slope_and_not_a_chance_one():
    random = np.random.default_rng(3)
    x = np.linspace(0.02, 0.48, 24)
    error = np.full(24, 0.05)
    _, flat = forecast(Seen(x, 100 * (1 + 0.05 * random.standard_normal(24)), error), 0.5, 2000, random)
    _, steep = forecast(Seen(x, 100 * (1 + 2 * x), error), 0.5, 2000, random)
    assert np.median(flat) == pytest.approx(100, rel=0.1)
    assert np.median(steep) == pytest.approx(250, rel=0.1)
    assert np.quantile(steep, 0.05) < 250 < np.quantile(steep, 0.95)


def test_speed_counts_what_running_requests_write():
    now = [0.0]
    observed = Observed(Plan({0: 100}, 0, 1000, 4), clock=lambda: now[0])
    for row in range(4):
        observed.on_start(str(row))
    for row in range(3):
        now[0] += 10.0
        observed.on_done(str(row), int(now[0] * 20), "stop", now[0])
    assert observed.rates.open.stream == pytest.approx(20)
    assert observed.rates.recent(1).speed == pytest.approx(20 * 3)  # 4, 3 and 2 in flight, 10 s each


def test_the_tail_is_as_fast_as_blocks_with_few_requests_say():
    full = Block(answers=100, tokens=1000, request_seconds=100, flights=640, seconds=10)
    few = Block(answers=20, tokens=1000, request_seconds=60, flights=160, seconds=10)
    low, high = step_share([full, few], 64)
    assert low < (0.6 - 0.25) / 0.75 < high
    assert step_share([full], 64) == (0.4, 1.0)


def test_a_failed_request_keeps_its_place_and_counts_as_waiting():
    observed = Observed(Plan({0: 3}, 0, 100, 2), clock=lambda: 0.0)
    observed.on_start("a")
    observed.on_start("b")
    observed.on_retry("a", "timeout")
    assert observed.situation().unstarted.tolist() == [2]
    observed.on_start("a")
    observed.on_start("c")
    assert (observed.started, observed.situation().unstarted.tolist()) == (3, [0])
    for key in "abc":
        observed.on_done(key, 0, "refused", 1.0)
    assert observed.done == 3 and observed.lengths.ended.sum() == 0


def test_nothing_is_foretold_from_nothing():
    observed = Observed(Plan({0: 10}, 0, 100, 2), clock=lambda: 0.0)
    assert observed.estimate() is None and observed.naive() == float("inf")


def test_the_same_situation_gives_the_same_interval():
    (look,) = replay(RUNS[0](1), (0.2,))
    (again,) = replay(RUNS[0](1), (0.2,))
    assert (look.low, look.middle, look.high) == (again.low, again.middle, again.high)


def test_blocks_merge_and_keep_their_sums():
    rates = Rates()
    for step in range(5000):
        rates.add(10, 2.0)
        rates.passed(0.5, 4, step / 5000, True)
    blocks = [*rates.blocks, rates.open]
    assert len(blocks) <= 48
    assert sum(block.answers for block in blocks) == 5000
    assert sum(block.flights for block in blocks) == pytest.approx(10000)
