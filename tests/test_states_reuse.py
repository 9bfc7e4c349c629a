"""States of an earlier mix: taken over when they are those that would be computed again, and never otherwise."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.states.hidden import hidden
from tests.stage_inputs import data_files, hidden_job, publish_merged, publish_target, some_token_rows

Options = dict[str, Any]
ALONE: Options = {"batch_tokens": 1}


@dataclass(frozen=True)
class Published:
    """Manifests of a target and of two mixes."""

    target: Path
    mixes: tuple[Path, Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A mix, and one with two more rows, in another order, whose last rows are held out."""
    folder, rows = tmp_path_factory.mktemp("mixes"), some_token_rows(12)
    one = publish_merged(folder / "one", rows[:8], rows[8:10])
    two = publish_merged(folder / "two", [*rows[4:8], *rows[:4]], rows[8:])
    return Published(publish_target(folder / "target"), (one, two))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the batches that the engine is asked for."""
    sizes: list[int] = []
    states = TransformersEngine.states

    def noted(self: TransformersEngine, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        sizes.append(len(rows))
        return states(self, rows, boundaries)

    monkeypatch.setattr(TransformersEngine, "states", noted)
    return sizes


def after(folder: Path, published: Published, first: Options, second: Options, asked: list[int]) -> int:
    """Publish the first mix, then the second in its place; rows reused. The bytes must be those of a run that never saw the first."""
    run(hidden_job(folder, published.mixes[0], published.target, **first), hidden)
    asked.clear()
    job = hidden_job(folder, published.mixes[1], published.target, **second)
    run(job, hidden)
    computed = sum(asked)
    fresh = hidden_job(folder, published.mixes[1], published.target, "fresh", **second)
    run(fresh, hidden)
    assert data_files(job.output) == data_files(fresh.output)
    reused = json.loads((job.output / "cost.json").read_text())["reused_rows"]
    assert computed + reused == 12
    return reused


def test_rows_computed_alone_are_found_again_in_any_mix(published: Published, tmp_path: Path, asked: list[int]) -> None:
    assert after(tmp_path, published, ALONE, ALONE, asked) == 10


def test_packed_states_give_back_the_same_bytes(published: Published, tmp_path: Path, asked: list[int]) -> None:
    assert after(tmp_path, published, ALONE, ALONE | {"compression": "lossless"}, asked) == 10
    assert after(tmp_path / "b", published, ALONE | {"compression": "lossless"}, ALONE | {"stored": "fp8"}, asked) == 10


@pytest.mark.parametrize("first", [ALONE, {}], ids=["alone", "batched"])
def test_in_a_batch_only_equal_batches_are_taken_over(published: Published, tmp_path: Path, asked: list[int], first: Options) -> None:
    """A row that shared a batch with others has other last bits: its bytes must not depend on what was published before."""
    assert after(tmp_path, published, first, {}, asked) < 10


@pytest.mark.parametrize(
    "options",
    [
        (ALONE, ALONE | {"layers": [1, 3, 5]}),
        (ALONE, ALONE | {"dtype": "bfloat16"}),
        (ALONE | {"stored": "fp8"}, ALONE | {"stored": "fp8"}),
    ],
    ids=["layers", "dtype", "fp8"],
)
def test_states_that_differ_are_computed_anew(
    published: Published, tmp_path: Path, asked: list[int], options: tuple[Options, Options]
) -> None:
    assert after(tmp_path, published, *options, asked) == 0


def test_a_damaged_earlier_shard_is_refused(published: Published, tmp_path: Path) -> None:
    job = hidden_job(tmp_path, published.mixes[0], published.target, **ALONE)
    run(job, hidden)
    path = job.output / "train-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StageError, match=r"train-00000\.safetensors: sha256"):
        run(hidden_job(tmp_path, published.mixes[1], published.target, **ALONE), hidden)
