"""Where simulated and served accept length part, the sentence names what the server did otherwise."""

from typing import Any

import pytest

from scripts.lib.doctor.explaining import explain, standard_error

CELL: dict[str, Any] = {
    "accept_length": 2.0,
    "simulated_accept_length": 2.4,
    "topk": 1,
    "draft_steps": 3,
    "algorithm": "EAGLE3",
    "dtype": "bfloat16",
    "machine": {"gpu": "NVIDIA H200"},
    "concurrency": 1,
    "turns": "first",
    "identical": 40,
    "near_tie": 0,
    "different": 0,
    "accepted_histogram": [4000, 3000, 2000, 1000],
    "completion_tokens": 20000,
    "baseline_completion_tokens": 20000,
    "flags": [],
}
HEAD = "served 2.00, simulated 2.40 (-17%): "


@pytest.mark.parametrize("served", [None, 2.39, 2.5])
def test_nothing_is_said_within_five_percent_or_without_a_figure(served):
    assert explain(CELL | {"accept_length": served}) is None
    assert explain({name: value for name, value in CELL.items() if name != "simulated_accept_length"}) is None


def test_without_a_reason_in_the_cell_the_walk_is_named():
    assert explain(CELL) == HEAD + (
        "nothing in the cell explains it: run `python -m scripts.doctor --walk` with its target, drafter and flags"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accepted_histogram": [8, 4, 3, 2]}, "17 verify steps tell it no better than ±0.53"),
        ({"topk": 4}, "a tree of top-k 4 is served, a chain simulated"),
        ({"turns": "all"}, "later turns are served after the variant's own answers, and simulated after the target's"),
        ({"identical": 10, "near_tie": 30}, "30 of 40 answers part from the target's own at near ties and go on as another text"),
        ({"identical": 36, "different": 4}, "4 of 40 answers are not the target's own: the server verifies something else"),
        ({"completion_tokens": 15000}, "15000 tokens were served where the target alone writes 20000"),
        ({"flags": ["--kv-cache-dtype", "fp8_e5m2"]}, "states_rounded: --kv-cache-dtype fp8_e5m2: not the arithmetic that the drafter was"),
        ({"flags": ["--quantization", "fp8"]}, "drafter_quantized: --quantization fp8 counts for the drafter too"),
        ({"concurrency": 8}, "8 requests share a batch, whose kernels add in another order"),
        ({"machine": {"gpu": None}}, "served in bfloat16, simulated in float32, which a CPU does faster"),
        ({"findings": [{"name": "window_cut", "evidence": "the last 64 tokens"}]}, "window_cut: the last 64 tokens"),
    ],
)
def test_each_reason_that_the_cell_holds_is_told(change, reason):
    assert (explain(CELL | change) or "").startswith(HEAD + reason)


def test_a_reason_is_told_once_and_what_was_not_compared_is_none():
    rounded = {"name": "states_rounded", "evidence": "--kv-cache-dtype fp8_e5m2: not the arithmetic that the drafter was trained on"}
    unknown = {"name": "training_unknown", "evidence": "no manifest.json"}
    told = explain(CELL | {"flags": ["--kv-cache-dtype", "fp8_e5m2"], "findings": [rounded, unknown]})
    assert told == f"{HEAD}states_rounded: {rounded['evidence']}"


def test_a_server_that_accepts_nothing_is_called_misconfigured_first():
    told = explain(CELL | {"accept_length": 1.01, "identical": 10, "near_tie": 30}) or ""
    assert "the server accepts nothing: it runs another algorithm" in told
    assert told.index("accepts nothing") < told.index("near ties")


def test_the_standard_error_is_that_of_the_mean():
    assert standard_error([2, 2]) == pytest.approx((1 / 3 / 4) ** 0.5)
    assert standard_error([1]) is None
