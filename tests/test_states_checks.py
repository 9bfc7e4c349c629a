"""Checks before states are written: shifts by a token or a layer, mixed-up rows, and tokens that the target did not write."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError
from scripts.lib.states.capture import Batching, capture, check_shape
from scripts.lib.states.checks import Choices, check_choices, check_sample, choices_of, unlike_greedy
from scripts.lib.states.rows import TokenRow
from tests.tiny import save_tiny_target

BOUNDARIES = [2, 4, 5]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return TransformersEngine(load_target(save_tiny_target(tmp_path_factory.mktemp("tiny")), torch.float32, "cpu"), frozenset())


def greedy_row(engine: TransformersEngine, length: int = 24) -> TokenRow:
    """A row whose answer, from token 4 on, is what the target writes greedily."""
    ids = [5, 77, 130, 201]
    while len(ids) < length:
        _, final = engine.reference(ids, BOUNDARIES)
        ids.append(int(engine.logits(final[-1:]).argmax()))
    return TokenRow("greedy", tuple(ids), ((4, length),), "toy")


def states_of(engine: TransformersEngine, row: TokenRow, boundaries: list[int] = BOUNDARIES) -> RowStates:
    other = TokenRow("other", tuple(range(3, 43)), ((2, 40),))
    return capture(engine, [other, row], boundaries, Batching(200)).wait()[1]


def test_states_from_a_batch_are_those_of_the_plain_pass(engine: TransformersEngine) -> None:
    row = greedy_row(engine)
    check_sample(engine, row, states_of(engine, row), BOUNDARIES, "float32")
    half = TransformersEngine(load_target(Path(engine.model.config._name_or_path), torch.bfloat16, "cpu"), frozenset())
    check_sample(half, row, states_of(half, row), BOUNDARIES, "bfloat16")


SHIFTS: dict[str, Callable[[RowStates], RowStates]] = {
    "state at boundary 2, token": lambda state: replace(state, aux=state.aux.roll(1, 0)),
    "state at boundary 4, token": lambda state: replace(state, aux=state.aux[:, [0, 2, 1]]),
    "final state, token": lambda state: replace(state, final=state.final.roll(1, 0)),
    "position 4: best is": lambda state: replace(state, argmax=state.argmax.roll(1, 0)),
    "state at boundary 5, token": lambda state: replace(state, aux=state.aux * torch.tensor([1, 1, 1.02])[:, None]),
}


@pytest.mark.parametrize("message", SHIFTS)
def test_a_shift_by_one_token_or_layer_is_caught(engine: TransformersEngine, message: str) -> None:
    """Peers differ by one layer, or hand out another token's states, in silence (TorchSpec issue 87, SpecForge pull 240)."""
    row = greedy_row(engine)
    with pytest.raises(StageError, match=f"row greedy, {message}"):
        check_sample(engine, row, SHIFTS[message](states_of(engine, row)), BOUNDARIES, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("boundaries", [[1, 3, 4], [3, 5, 6], [2, 4, 6]])
def test_taps_one_layer_off_are_caught(engine: TransformersEngine, boundaries: list[int], dtype: str) -> None:
    row = greedy_row(engine)
    with pytest.raises(StageError, match=r"row greedy, state at boundary \d, token"):
        check_sample(engine, row, states_of(engine, row, boundaries), BOUNDARIES, dtype)


def test_near_ties_pass_and_other_choices_do_not() -> None:
    row, logits = TokenRow("a", (5, 6, 7, 8), ((1, 4),)), torch.tensor([[8.0, 7.9999, 4.0]]).expand(2, -1)

    def check(argmax: torch.Tensor) -> None:
        check_choices(row, [1, 2], argmax, Choices(*choices_of(logits, argmax)), "float32")

    check(torch.tensor([0, 1]))
    with pytest.raises(StageError, match="row a, position 2: best is 2 in the batch and 0 alone, with a gap of 4"):
        check(torch.tensor([0, 2]))


def test_a_greedy_answer_is_the_targets_own_and_one_shifted_by_a_token_is_not(engine: TransformersEngine) -> None:
    row = greedy_row(engine)
    state = states_of(engine, row)
    assert len(row.final_index) == 19 and unlike(engine, row, state) == 0
    shifted = TokenRow(row.id, (*row.input_ids[:4], 9, *row.input_ids[4:-1]), row.spans, row.dataset)
    assert unlike(engine, shifted, states_of(engine, shifted)) > 0
    late = replace(state, final=state.final.roll(1, 0), argmax=state.argmax.roll(1, 0))
    assert unlike(engine, row, late) > 15


def unlike(engine: TransformersEngine, row: TokenRow, state: RowStates) -> int:
    """Of `row` between two others that are alike."""
    other = greedy_row(engine, 12)
    counts = unlike_greedy(engine, [other, row, other], [states_of(engine, other), state, states_of(engine, other)]).tolist()
    assert counts[0] == counts[2] == 0
    return counts[1]


def test_rows_of_a_cached_prefix_are_refused(engine: TransformersEngine) -> None:
    """Two prompts share six tokens; the second came back six states short (SpecForge pull 698, sglang issue 8066)."""
    row = TokenRow("q2", (1, 2, 3, 4, 5, 6, 20, 21, 22, 23, 24, 25), ((6, 12),))
    (whole,) = engine.states([StateRequest(row.input_ids, row.final_index)], BOUNDARIES)
    with pytest.raises(StageError, match=r"row q2: the engine gave .*\(6, 3, 5, 5\), wanted \(12, 3, 5, 5\)"):
        check_shape(row, replace(whole, aux=whole.aux[6:]))
