"""Stage report: what a cycle costs, and how often drafts are accepted."""

import random
from itertools import product

import pytest

from scripts.lib.reporting.acceptance import by_position, shortened
from scripts.lib.reporting.cells import Ground, with_unknown
from scripts.lib.reporting.cost_model import Observation, VerifyCurve, fit, observation, verify_curve
from scripts.lib.reporting.estimate import student
from tests.report_matrix import DRAFT, OVERHEAD, STEPS, TASKS, cycle, forward, histogram, matrix
from tests.report_parts import cell

NO_CURVE = VerifyCurve(())


def observed(steps, tokens, cost, noise=0.005):
    return Observation(steps, tokens, cost, noise)


def test_three_kinds_of_setting_tell_overhead_draft_and_check_apart():
    """Trees check more tokens than they draft steps, so that both prices show."""
    settings = [(3, 4), (5, 6), (5, 16), (2, 3)]
    model = fit([observed(k, d, 1.5 + 0.25 * k + 0.02 * (d - 1)) for k, d in settings], NO_CURVE, 1)
    split = model.split(5, 16)
    assert (split.overhead, split.draft, split.verify) == (pytest.approx(0.5), pytest.approx(1.25), pytest.approx(1.3))
    assert split.draft_share == pytest.approx(1.25 / 3.05)
    assert model.cycle(4, 5).value == pytest.approx(1.5 + 1.0 + 0.08)


def test_chains_alone_say_nothing_of_trees_and_do_not_split():
    """A chain checks one token more than it drafts: only the sum of both prices shows."""
    model = fit([observed(k, k + 1, 1.4 + 0.3 * k) for k in (3, 5)], NO_CURVE, 1)
    assert model.cycle(4, 5).value == pytest.approx(2.6)
    assert model.draft_and_check().value == pytest.approx(0.3)
    assert model.cycle(4, 16) is None
    assert model.split(3, 4) is None


def test_one_length_of_chain_determines_itself_alone():
    model = fit([observed(3, 4, 2.3), observed(3, 4, 2.4)], NO_CURVE, 1)
    assert model.cycle(3, 4).value == pytest.approx(2.35, abs=0.01)
    assert model.cycle(2, 3) is None
    assert model.draft_and_check() is None


def test_without_repeats_nothing_is_known_of_the_error():
    model = fit([observed(k, k + 1, 1.4 + 0.3 * k, None) for k in (3, 5)], NO_CURVE, 1)
    assert model.cycle(4, 5) is None


def test_the_target_alone_at_other_concurrencies_prices_the_check():
    curve = VerifyCurve(tuple((size, STEPS[size]) for size in (1, 4, 8)))
    assert curve.relative(4, 1) == pytest.approx(STEPS[4] / STEPS[1])
    assert curve.relative(6, 1) == pytest.approx(forward(6) / STEPS[1])
    assert curve.relative(4, 8) is None, "32 tokens at once were not measured"
    assert curve.relative(2, 2) is None, "nor was a concurrency of 2"
    model = fit([observed(k, k + 1, cycle(k, k + 1, 1) / STEPS[1]) for k in (3, 5)], curve, 1)
    split = model.split(5, 6)
    assert split.draft == pytest.approx(5 * DRAFT / STEPS[1])
    assert split.overhead == pytest.approx(OVERHEAD / STEPS[1])


def test_intervals_hold_about_as_often_as_they_say():
    """Lengths 2, 3 and 5 of three tasks, 2 % noise: a cell of length 4 lies in the interval 95 times in 100."""
    hits = 0
    for seed in range(200):
        chance = random.Random(seed)
        cells = [observed(k, k + 1, (1.4 + 0.3 * k) * (1 + chance.gauss(0, 0.02)), 0.02) for k in (2, 3, 5) for _ in TASKS]
        expected = fit(cells, NO_CURVE, 1).cycle(4, 5)
        hits += expected.low <= 2.6 * (1 + chance.gauss(0, 0.02)) <= expected.high
    assert 180 <= hits <= 199


def test_wide_misfit_gives_wide_intervals():
    """Figures of one H200: two tasks whose 5-step chains once cost more and once less than those of 3 steps."""
    study = [(3, 2.85), (3, 3.61), (5, 3.80), (5, 3.14)]
    model = fit([observed(k, k + 1, cost, None) for k, cost in study], NO_CURVE, 1)
    assert model.draft_and_check().low < 0
    assert model.cycle(4, 5).error > 1


def test_cells_without_a_chain_of_drafts_are_no_observations():
    known = {"verify_steps": 10, "accepted_histogram": [5, 5]}
    assert observation(with_unknown(cell("a", "chain4", **known))) == Observation(4, 5, 2.0, None)
    assert observation(with_unknown(cell("a", "ngram", algorithm="NGRAM", drafter=None, draft_tokens=8))) is None
    assert observation(with_unknown(cell("a", "chain4", break_even_accept_length=None))) is None
    noisy = with_unknown(cell("a", "chain4", speedup=1.0, speedup_interval=[0.9, 1.1]))
    assert observation(noisy).noise == pytest.approx(0.1 / 1.96)


def test_the_curve_of_a_ground_leaves_out_other_grounds():
    cells = [with_unknown(one) for one in matrix()]
    ground = Ground.of(next(one for one in cells if one["cuda_graphs"]))
    assert verify_curve(cells, ground).seconds == tuple((size, STEPS[size]) for size in (1, 8, 32))


def test_speculative_flags_are_not_the_grounds():
    plain = with_unknown(cell("a", "x", flags=["--page-size", "16"]))
    tuned = with_unknown(cell("a", "y", flags=["--speculative-token-map", "m.pt", "--page-size", "16"]))
    assert Ground.of(plain) == Ground.of(tuned)


def test_acceptance_by_position_is_of_drafts_whose_predecessors_were_accepted():
    shares = by_position([50, 25, 15, 10])
    assert [share.value for share in shares] == [0.5, 0.5, 0.4]
    assert shares[0].low < 0.5 < shares[0].high
    assert by_position([10, 0, 0])[1] is None, "no cycle came that far"


@pytest.mark.parametrize(("steps", "length"), [(1, 1.5), (2, 1.75), (3, 1.85)])
def test_a_shorter_chain_accepts_what_the_longer_one_did_up_to_there(steps, length):
    assert shortened([50, 25, 15, 10], steps).value == pytest.approx(length)


def test_no_chain_is_longer_than_measured():
    assert shortened([50, 25, 15, 10], 4) is None
    assert shortened([0, 0], 1) is None


def test_the_accept_length_of_a_shorter_chain_is_within_its_error():
    for (_, first), steps in product(TASKS.items(), (1, 2, 3)):
        long, own = histogram(first, 5, 4000, random.Random(1)), histogram(first, steps, 4000, random.Random(2))
        measured = 1 + sum(index * count for index, count in enumerate(own)) / sum(own)
        expected = shortened(long, steps)
        assert abs(expected.value - measured) < 1.5 * expected.error


def test_quantiles_fall_to_the_normal_one():
    assert [round(student(freedom), 2) for freedom in (1, 10, 20, 200)] == [12.71, 2.23, 2.08, 1.97]
