"""Shards of hidden states: the file format, its reader, and the checks before anything is written."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.lib.engines.protocol import Completion, Request, RowStates, StateRequest
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file
from scripts.lib.states import format as layout
from scripts.lib.states.capture import Batching, batches, capture
from scripts.lib.states.checks import Peaks, defect, largest
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import TENSORS, HiddenShard, packed, write_rows, write_shard
from scripts.lib.states.reader import check_finite, read_shard
from scripts.lib.states.reuse import Earlier
from scripts.lib.states.rows import TokenRow, digest
from scripts.lib.states.storing import Storing, every_storing

H = 4


class FakeEngine:
    """Gives state t+1 for token t and drops `cached` tokens of every row."""

    def __init__(self, cached: int = 0) -> None:
        self.cached = cached
        self.calls: list[list[int]] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise NotImplementedError

    def lane(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def reference(self, input_ids: Sequence[int], boundaries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def states(self, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        self.calls.append([len(row.input_ids) for row in rows])
        return [self._state(row) for row in rows]

    def _state(self, row: StateRequest) -> RowStates:
        tokens = torch.tensor(row.input_ids, dtype=torch.float32) + 1
        aux = tokens[self.cached :, None, None].expand(-1, 3, H)
        final = tokens[list(row.final_index), None].expand(-1, H)
        return RowStates(aux, final, torch.tensor(row.final_index))


def rows() -> list[TokenRow]:
    return [TokenRow("a", (5, 6, 7, 8), ((1, 4),)), TokenRow("b", (1, 2, 3, 4, 5, 6), ((1, 3), (4, 6))), TokenRow("c", (9, 9), ((0, 2),))]


def shard() -> HiddenShard:
    return packed(rows(), capture(FakeEngine(), rows(), [1, 2, 3], Batching(100)).wait())


def test_rows_lie_end_to_end_with_teachers_where_a_span_has_a_next_token() -> None:
    made = shard()
    assert made.row_offsets.tolist() == [0, 4, 10, 12] and made.input_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 9, 9]
    assert made.loss_spans.tolist() == [[1, 4], [5, 7], [8, 10], [10, 12]]
    assert made.final_index.tolist() == [1, 2, 5, 8, 10] and made.argmax.tolist() == [1, 2, 1, 4, 0]
    assert decoded(made.aux)[:, 0, 0].tolist() == [6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 10, 10]
    assert decoded(made.final)[:, 0].tolist() == [7, 8, 3, 6, 10]


def test_a_shard_comes_back_as_it_was_written_and_equal_shards_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shard(tmp_path / name, shard())
    back = read_shard(tmp_path / "one")
    assert all(torch.equal(getattr(back, name), getattr(shard(), name)) for name in TENSORS) and back.ids == ("a", "b", "c")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    check_finite(tmp_path / "one", back)


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
@pytest.mark.parametrize("stretch", [1, 3 * 3 * H, 2**21])
def test_rows_that_are_not_put_together_first_give_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storing: Storing, stretch: int
) -> None:
    """Also where a row is longer than what is encoded at a time, and the digest is that of the file."""
    monkeypatch.setattr(layout, "STRETCH", stretch)
    generator = torch.Generator().manual_seed(1)

    def made(row: TokenRow) -> RowStates:
        tokens, teachers = len(row.input_ids), len(row.final_index)
        aux, final = (torch.randn(size, generator=generator).bfloat16() for size in ((tokens, 3, H), (teachers, H)))
        return RowStates(aux, final, torch.arange(teachers))

    states = [made(row) for row in rows()]
    digests = (write_rows(tmp_path / "one", rows(), states, storing), write_shard(tmp_path / "two", packed(rows(), states), storing))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert digests == (sha256_file(tmp_path / "one"),) * 2


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_a_cut_shard_is_refused_with_its_name_and_the_remedy(tmp_path: Path, size: int) -> None:
    """A killed dump once left half a file under its final name, and every later run took it for finished."""
    path = tmp_path / "train-00003.safetensors"
    write_shard(path, shard())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StageError, match=r"train-00003\.safetensors: not a readable shard.*delete this file.*rebuild stage hidden"):
        read_shard(path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("aux", torch.zeros(11, 3, H, dtype=torch.bfloat16), "aux is"),
        ("aux", torch.zeros(12, 2, H, dtype=torch.bfloat16), "aux is"),
        ("aux", torch.zeros(12, 3, H), "aux is torch.float32"),
        ("final", torch.zeros(4, H, dtype=torch.bfloat16), "final is"),
        ("row_offsets", torch.tensor([0, 4, 4, 12]), "row_offsets"),
        ("row_offsets", torch.tensor([0, 4, 10, 11]), "row_offsets"),
        ("final_index", torch.tensor([1, 2, 5, 8, 12]), "final_index"),
        ("final_index", torch.tensor([1, 2, 2, 8, 10]), "final_index"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(tmp_path: Path, name: str, value: torch.Tensor, problem: str) -> None:
    tensors = {key: getattr(shard(), key) for key in TENSORS} | {name: value}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"ids": '["a","b","c"]'})
    with pytest.raises(StageError, match=problem):
        read_shard(tmp_path / "x.safetensors")


def test_states_that_are_not_finite_are_refused_by_the_reader_too(tmp_path: Path) -> None:
    bad = shard()
    decoded(bad.aux)[3, 1, 2] = math.nan
    write_shard(tmp_path / "x.safetensors", bad)
    with pytest.raises(StageError, match="1 rows of aux are not finite, first at 3"):
        check_finite(tmp_path / "x.safetensors", read_shard(tmp_path / "x.safetensors"))


def test_fewer_states_than_tokens_are_refused() -> None:
    """A prefix cache skips cached tokens, and nothing is captured for them (SpecForge pull 698)."""
    with pytest.raises(StageError, match=r"row c: the engine gave .*\(1, 3, 1, 1\), wanted \(2, 3, 1, 1\).*prefix cache"):
        capture(FakeEngine(cached=1), rows(), [1, 2, 3], Batching(100))


def test_batches_hold_like_lengths_and_states_return_in_row_order() -> None:
    distinct = [[number] * length for number, length in enumerate([7, 3, 9, 3, 4, 20])]
    assert list(batches(distinct, Batching(10))) == [[1, 3], [4], [0], [2], [5]]
    engine = FakeEngine()
    states = capture(engine, rows(), [1, 2, 3], Batching(8)).wait()
    assert engine.calls == [[2, 4], [6]]
    assert [float(state.aux[0, 0, 0]) for state in states] == [6, 2, 10]


def test_rows_with_a_common_beginning_share_batches_and_no_batch_is_over_its_tokens() -> None:
    lead = list(range(100, 116))
    rows = [[*lead, *range(length)] if number % 2 else list(range(number, number + length)) for number, length in enumerate(range(4, 40))]
    cut = list(batches(rows, Batching(120)))
    assert sorted(index for batch in cut for index in batch) == list(range(36))
    assert all(len(batch) * max(len(rows[index]) for index in batch) <= 120 for batch in cut)
    mixed = [batch for batch in cut if len({index % 2 for index in batch}) > 1]
    assert len(mixed) <= 1  # where the two kinds meet


def test_lengths_alone_decide_where_no_beginning_is_computed_once() -> None:
    lead = list(range(100, 116))
    rows = [[*lead, *range(length)] if number % 2 else list(range(number, number + length)) for number, length in enumerate(range(4, 40))]
    order = [index for batch in batches(rows, Batching(120, leads=False)) for index in batch]
    assert order == sorted(range(36), key=lambda index: (len(rows[index]), index))


def test_names_of_rows_tell_all_of_their_content_and_batches_what_their_states_depend_on() -> None:
    given = [*rows(), TokenRow('"ü', (7,), ())]
    last = given[-1]
    others = [replace(last, id="x"), replace(last, input_ids=(8,)), replace(last, spans=((0, 1),)), replace(last, input_ids=(7, 7))]
    changed = [given[:-1], given[::-1], *([*given[:-1], other] for other in others)]
    # The same tokens in a row cut elsewhere.
    changed.append([replace(given[0], input_ids=(5, 6, 7)), replace(given[1], input_ids=(8, *given[1].input_ids)), *given[2:]])
    assert digest([*given]) == digest(given) and len({digest(given), *map(digest, changed)}) == 1 + len(changed)
    earlier, elsewhere = Earlier(Path("nowhere"), "a"), Earlier(Path("nowhere"), "b")
    named = [earlier.batch(some) for some in (given, *changed) if "x" not in [row.id for row in some]]
    assert len({*named, elsewhere.batch(given)}) == len(named) + 1
    assert earlier.batch(given) == earlier.batch([*given[:-1], others[0]]), "an id decides no state"


def test_nan_infinity_and_zero_states_are_defects() -> None:
    """NaN states were once written and trained on (speculators pull 615)."""
    aux, final = torch.ones(2, 3, H), -torch.ones(1, H)

    def why(aux: torch.Tensor, final: torch.Tensor) -> str | None:
        return defect(Peaks(largest(aux), largest(final)))

    assert why(aux, final) is None
    assert why(aux, final * math.nan) == "non_finite"
    for value in (math.nan, math.inf, -math.inf):
        bad = aux.clone()
        bad[1, 2, 0] = value
        assert why(bad, final) == "non_finite"
    bad = aux.clone()
    bad[0, 1] = 0
    assert why(bad, final) == "zero_state" and why(-aux, final[:0]) is None
