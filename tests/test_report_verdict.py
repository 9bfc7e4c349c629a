"""Stage report: which setting to serve, which to measure next, and what is said of it in words."""

import json
import random
from pathlib import Path

import pytest
import yaml

from scripts.lib.ground.config import config_errors
from scripts.lib.reporting.cells import with_baselines, with_unknown
from scripts.lib.reporting.estimate import Estimate, geometric_mean
from scripts.lib.reporting.families import families, splits
from scripts.lib.reporting.outlook import BOUNDED, EXPECTED, MEASURED
from scripts.lib.reporting.page import best_gain
from scripts.lib.reporting.verdict import checks, leaders, verdicts
from scripts.lib.reporting.wording import in_words, leader_words, next_variants, remarks, stanza, verdict_sentences, with_words
from tests.report_matrix import STEPS, TASKS, chain_cell, cycle, matrix
from tests.report_parts import cell

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cells():
    return [with_unknown(one) for one in matrix()]


@pytest.fixture(scope="module")
def judged(cells):
    return {(one.family.name, one.family.concurrency): one for one in verdicts(families(cells))}


def true_speedup(steps, concurrency):
    """What a chain of the made-up drafter gains over all tasks, without any noise."""
    lengths = []
    for first in TASKS.values():
        reached = [first**place * 0.93 ** (place * (place - 1) / 2) for place in range(steps + 1)]
        lengths.append(sum(reached))
    return geometric_mean(lengths) * STEPS[concurrency] / cycle(steps, steps + 1, concurrency)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_every_length_of_chain_is_judged_rightly(judged, concurrency):
    verdict = judged["eagle3", concurrency]
    assert [setting.basis for setting in verdict.settings] == [BOUNDED, BOUNDED, MEASURED, EXPECTED, MEASURED]
    for setting in verdict.settings:
        assert setting.speedup.low - 0.03 <= true_speedup(setting.steps, concurrency) <= setting.speedup.high + 0.03
    assert "position 6" in verdict.refusals[-1]


def test_the_best_chain_is_never_one_that_is_only_bounded(judged):
    best = judged["eagle3", 1].best
    assert (best.steps, best.basis) == (3, MEASURED)
    assert judged["eagle3", 1].candidate.steps == 2, "whose bound reaches farther than what was measured"
    assert judged["eagle3", 32].best.steps == 4


def test_other_grounds_are_other_families(judged):
    assert judged["eagle3, without CUDA graphs", 1].family.chain_steps == [3]
    assert ("hub:org/other-eagle3", 8) in judged
    assert not any("ngram" in name for name, _ in judged)


def noisy_cells(costs):
    """Two chains on two tasks whose costs contradict each other."""
    made = []
    for (task, steps), cost in costs.items():
        tau = 2.2 + 0.1 * steps
        figures = {"speedup": tau / cost, "accept_length": tau, "break_even_accept_length": cost, "ceiling": steps + 1}
        made.append(cell(task, f"chain{steps}", accepted_histogram=[30, 30, 20, 20, 10, 5][: steps + 1], **figures))
    return [with_unknown(one) for one in made]


def test_noise_that_hides_the_price_of_a_draft_stops_the_recommendation():
    """Figures of one H200: 5 steps cost more than 3 on one task and less on the other."""
    costs = {("mtbench", 3): 2.85, ("humaneval", 3): 3.61, ("mtbench", 5): 3.80, ("humaneval", 5): 3.14}
    (verdict,) = verdicts(families(noisy_cells(costs)))
    assert [setting.steps for setting in verdict.settings] == [1, 2, 3, 5]
    assert verdict.refusals[0].startswith("Chains of 4 drafts are not judged: one more draft with its check cost")
    assert "which noise hides" in verdict.refusals[0]


def test_one_length_bounds_the_shorter_ones():
    (verdict,) = verdicts(families(noisy_cells({("mtbench", 3): 2.0})))
    one, two, three = verdict.settings
    assert (one.basis, two.basis, three.basis) == (BOUNDED, BOUNDED, MEASURED)
    tau = 1 + 70 / 100
    assert (one.speedup.low, one.speedup.high) == (pytest.approx(tau / 2.0, rel=0.15), pytest.approx(tau / (4 / 3), rel=0.15))
    assert verdict.refusals == ["Chains of more than 3 drafts are not judged: no cell measured whether a draft at position 4 is accepted."]


def test_a_run_that_measures_the_recommended_chain_checks_the_model():
    chance = random.Random(3)
    made = [chain_cell(task, steps, 1, chance) for task in TASKS for steps in (2, 3, 5)]
    found = checks(families([with_unknown(one) for one in made]))
    assert [(check.task, check.steps) for check in found] == [(task, steps) for steps in (2, 3) for task in sorted(TASKS)]
    assert [check.expected.basis for check in found] == [BOUNDED] * 3 + [EXPECTED] * 3
    assert all(check.agrees for check in found[:3])


def test_the_fastest_variant_is_held_against_the_fastest_target_alone():
    """Without CUDA graphs a drafter gains more over a target that is slowed down more: no reason to serve it so."""
    slow = cell("a", "eager", cuda_graphs=False, baseline_tok_s=100.0, tok_s=150.0, speedup=1.5)
    fast = cell("a", "graphs", cuda_graphs=True, baseline_tok_s=200.0, tok_s=180.0, speedup=0.9)
    (leader,) = leaders(with_baselines([with_unknown(slow), with_unknown(fast)]))
    assert (leader.variant, leader.gain.value) == ("graphs", pytest.approx(0.9))
    assert best_gain([leader])[0] == ("0.90 ×", "the target alone at its fastest: graphs, concurrency 1, all tasks") and not best_gain([])
    assert (
        leader_words(leader)
        == "No variant pays: serve the target alone. graphs comes nearest, 0.90 times the target alone at its fastest over all tasks."
    )


def test_a_slow_hour_of_the_machine_makes_no_leader():
    """Each variant is held against the target that took turns with it, also where that one was slower than at another time."""
    busy = cell("a", "busy", baseline_tok_s=3.0, tok_s=3.3, speedup=1.1)
    quiet = cell("a", "quiet", baseline_tok_s=8.0, tok_s=5.2, speedup=0.65)
    (leader,) = leaders(with_baselines([with_unknown(busy), with_unknown(quiet)]))
    assert (leader.variant, leader.gain.value) == ("busy", pytest.approx(1.1))


def test_a_variant_of_fewer_tasks_does_not_lead():
    rows = [cell("a", "x", tok_s=30.0), cell("b", "x", tok_s=10.0), cell("a", "y", tok_s=90.0)]
    (leader,) = leaders(with_baselines([with_unknown(one) for one in rows]))
    assert leader.variant == "x"


def test_a_loss_is_put_in_words(cells):
    """The share of the drafter is said where the cells tell it, and the cell's own notes follow."""
    parts = splits(families(cells))
    words = {(row["task"], row["variant"], row["concurrency"]): row["notes"] for row in with_words(cells, parts)}
    (note,) = words["mtbench", "eagle3_5", 1]
    assert note.startswith("0.90 times: needs accept length 2.92, has 2.63; about ") and note.endswith(" % of the cycle is the drafter")
    (note,) = words["mtbench", "other", 32]
    assert note == "0.65 times: needs accept length 2.84, has 1.83; 65 % of the cycle is drafts, their check and overhead"
    told = in_words(with_unknown(cell("a", "chain4", notes=["other"])), None)
    assert told["notes"] == [
        "0.75 times: needs accept length 2.00, has 1.50; 50 % of the cycle is drafts, their check and overhead",
        "other",
    ]


def test_simulated_and_served_accept_length_may_part_by_5_percent():
    near, far = (with_unknown(cell("a", "x", simulated_accept_length=1.5 * factor)) for factor in (1.04, 1.07))
    assert len(in_words(near, None)["notes"]) == 1
    assert in_words(far, None)["notes"][1].startswith("served 1.50, simulated 1.60 (-7%): ")


def test_what_the_doctor_remarks_of_several_cells_is_said_once():
    finding = {"name": "rope_scaled", "evidence": "factor 4", "repair": "serve it plain", "fatal": False}
    made = [with_unknown(cell(task, variant, findings=[finding])) for task in "ab" for variant in "xy"]
    assert remarks([*made, with_unknown(cell("a", "z"))]) == ["rope_scaled (x, y): factor 4, so serve it plain."]


def test_a_variant_that_writes_other_answers_does_not_lead():
    wrong, right = cell("a", "wrong", tok_s=90.0, speedup=4.5, different=1), cell("a", "right", tok_s=30.0)
    (leader,) = leaders(with_baselines([with_unknown(wrong), with_unknown(right)]))
    assert leader.variant == "right"
    (leader,) = leaders(with_baselines([with_unknown(wrong)]))
    assert leader_words(leader) == "No variant is lossless: wrong, 4.50 times the target alone at its fastest, writes other answers."


def test_a_cycle_cheaper_than_a_plain_step_bounds_shorter_ones_from_above():
    """Noise can put a cell's cost under one step of the target."""
    (verdict,) = verdicts(families(noisy_cells({("mtbench", 3): 0.8})))
    assert all((setting.speedup.error or 0.0) >= 0 for setting in verdict.settings)


def test_sentences_say_what_is_needed_and_what_is_not_known(judged):
    words = " ".join(verdict_sentences(judged["eagle3", 1]))
    assert words.startswith("eagle3: 3 draft steps, top-k 1, 4 draft tokens: 1.23 (1.22 to 1.24) times, measured. It breaks even at")
    assert "Not told apart from it: chains of 1 (" in words
    losing = " ".join(verdict_sentences(judged["hub:org/other-eagle3", 32]))
    assert "No length of chain pays. To break even it must write 44 % more tokens a cycle." in losing


def test_the_stanza_is_a_config_that_the_next_run_takes(judged):
    variants = next_variants(list(judged.values()))
    assert set(variants) == {"eagle3_3_steps_2"}, "4 drafts at concurrency 32 would hardly pay"
    config = yaml.safe_load((REPO / "config.yaml").read_text())
    config["benchmark"]["variants"] |= yaml.safe_load(stanza(variants))["benchmark"]["variants"]
    assert config_errors(config, json.loads((REPO / "rules/config.schema.json").read_text())) == []


def test_nothing_is_to_be_measured_where_nothing_can_pay():
    made = [with_unknown(cell("a", "chain4", accepted_histogram=[95, 3, 1, 1, 0], accept_length=1.08, break_even_accept_length=1.44))]
    verdict = verdicts(families(made))
    assert next_variants(verdict) == {}


def test_an_estimate_without_spread_shows_none():
    assert [Estimate(1.234).words(), Estimate(1.234, 0.1).words()] == ["1.23", "1.23 (1.13 to 1.33)"]
