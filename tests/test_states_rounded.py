"""States that a device rounds before they come to the host: the same files as of the host's rounding, and checks that see the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.lib.engines.protocol import RowStates
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.stage import Job
from scripts.lib.states import hidden as stage
from scripts.lib.states import landing, rounded, writer
from scripts.lib.states.capture import Batching, Captured, capture
from scripts.lib.states.checks import check_sample, largest, sampled
from scripts.lib.states.hidden import hidden
from scripts.lib.states.rounded import rounded_aux, rounded_final, rounding_device
from scripts.lib.states.rounding import off_grid, on_grid, quantised
from scripts.lib.states.rows import TokenRow
from scripts.lib.states.storing import Storing, every_storing
from tests.stage_inputs import hidden_job, publish_merged, publish_target, some_token_rows
from tests.test_states_finishing import Late

CPU = torch.device("cpu")
POISON = 250
FIRST_SHARD = 7  # rows
SIZES = ((50, 3, 64), (30, 64))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@dataclass(frozen=True)
class Dumping:
    """Dumps rows with `engine`, and notes what the checks are asked about and who captures exact states."""

    folder: Path
    target: Path
    engine: TransformersEngine
    patch: pytest.MonkeyPatch
    checked: list[tuple[str, Any]] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)

    def files(self, name: str, rows: Sequence[dict[str, Any]], device: torch.device | None, threads: int = 0) -> dict[str, bytes]:
        """Shards, receipts and the table of batches, of states that `device` rounds before they are copied, if it is given."""
        for seen in (self.checked, self.exact):
            seen.clear()
        for place, value in (("rounding_device", device), ("workers", threads), ("open_engine", self.engine)):
            self.patch.setattr(stage, place, lambda *_, value=value: value)
        folder = self.folder / name
        folder.mkdir()
        job = hidden_job(folder, publish_merged(folder / "merged", rows, some_token_rows(3, "e")), self.target, stored="fp8")
        hidden(Job(job.stage, job.output, job.inputs, {**job.settings, "greedy": ["toy"]}, job.runtime, job.work), folder)
        paths = [*folder.glob("*.safetensors"), *folder.glob("partial/*.json"), *folder.glob("batches.parquet")]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def seen(self) -> list[tuple[str, Any]]:
        """What checks were asked about, by row: of the sample all, of greedy answers the final states."""
        return sorted(self.checked, key=lambda entry: (entry[0], len(entry[1])))

    def check_sample(self, engine: Any, row: TokenRow, state: RowStates, *rest: Any) -> None:
        self.checked.append((row.id, [state.aux.tolist(), state.final.tolist(), state.argmax.tolist()]))
        check_sample(engine, row, state, *rest)

    def unlike_greedy(self, _: Any, rows: Sequence[TokenRow], states: Sequence[RowStates]) -> np.ndarray:
        self.checked.extend((row.id, [state.final.tolist(), state.argmax.tolist()]) for row, state in zip(rows, states, strict=True))
        return np.zeros(len(rows), np.int64)

    def capture(self, engine: Any, rows: Sequence[TokenRow], boundaries: Sequence[int], batching: Batching, *known: Any) -> Captured:
        self.exact.append(batching.rounding is None)
        return capture(engine, rows, boundaries, batching, *known)


@pytest.fixture
def dumping(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dumping:
    made = Dumping(tmp_path, target, TransformersEngine(load_target(target.parent, torch.float32, "cpu"), frozenset()), monkeypatch)
    for name in ("check_sample", "unlike_greedy", "capture"):
        monkeypatch.setattr(writer, name, getattr(made, name))
    return made


@pytest.mark.parametrize("threads", [0, 2])
def test_files_and_what_checks_see_are_those_of_the_hosts_rounding(dumping: Dumping, threads: int) -> None:
    wanted = dumping.files("wanted", some_token_rows(20), None)
    seen = dumping.seen()
    assert dumping.files("made", some_token_rows(20), CPU, threads) == wanted and len(wanted) > 9
    assert dumping.seen() == seen and not any(dumping.exact)


def test_where_the_row_to_be_checked_has_a_defect_another_is_checked_exactly(dumping: Dumping) -> None:
    """Only rounded states of that other one came: they are computed again."""
    rows = some_token_rows(20)
    dumping.engine.model.model.embed_tokens.weight[POISON] = torch.nan
    rows[sampled([TokenRow(row["id"], (), ()) for row in rows[:FIRST_SHARD]])]["input_ids"][0] = POISON
    wanted = dumping.files("wanted", rows, None)
    seen = dumping.seen()
    assert dumping.files("made", rows, CPU) == wanted
    assert dumping.seen() == seen and any(dumping.exact)


def test_nobody_reads_rounded_states_that_are_still_under_way(dumping: Dumping, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = dumping.files("wanted", some_token_rows(20), None)

    def late(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Late]:
        copies = tuple(torch.zeros_like(tensor) for tensor in tensors)
        return copies, Late(copies, tensors)

    monkeypatch.setattr(landing, "fetching", late)
    assert dumping.files("late", some_token_rows(20), CPU, 2) == wanted


@pytest.mark.parametrize("at_once", [1, 500, 2**26])
def test_rounding_a_batch_is_rounding_its_states(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Whatever is rounded together, with states of nought and of very different size among them."""
    monkeypatch.setattr(rounded, "AT_ONCE", at_once)
    aux, final = (
        torch.randn(size).bfloat16() * torch.logspace(-4, 4, size[0]).bfloat16().view(-1, *[1] * (len(size) - 1)) for size in SIZES
    )
    final[3] = 0
    bits, scales, peaks = rounded_aux(aux)
    values, factors = quantised(aux)
    assert torch.equal(bits, values.view(torch.uint8)) and torch.equal(scales, factors) and torch.equal(peaks, largest(aux))
    even, final_peaks = rounded_final(final)
    assert torch.equal(even.view(torch.int16), off_grid(*on_grid(final)).view(torch.int16)) and torch.equal(final_peaks, largest(final))
    assert len(rounded_final(final[:0])[0]) == len(rounded_aux(aux[:0])[0]) == 0


def test_a_device_rounds_only_what_it_computed_and_the_host_does_not_compress() -> None:
    where = {storing: rounding_device("transformers", storing, "cuda:1") for storing in every_storing()}
    assert [storing for storing, device in where.items() if device] == [Storing("fp8")] and where[Storing("fp8")] == torch.device("cuda:1")
    assert rounding_device("sglang", Storing("fp8"), "cuda") is None and rounding_device("transformers", Storing("fp8"), "cpu") is None
