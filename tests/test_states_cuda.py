"""On a GPU: states are those of the CPU, copies beside the forward passes are whole, and attention runs in the flash kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.lib.engines.protocol import StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.manifest import Manifest
from scripts.lib.states import hidden as stage
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.encoded import decoded
from scripts.lib.states.hidden import hidden
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import TokenRow
from tests.stage_inputs import hidden_job, publish_merged, publish_target, some_token_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOUNDARIES = [2, 4, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


def test_any_number_of_finishing_threads_gives_the_states_of_the_cpu(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    merged = publish_merged(tmp_path / "merged", some_token_rows(60), some_token_rows(3, "e"))
    made: dict[tuple[str, int], Manifest] = {}
    for device, count in (("cpu", 0), ("cuda", 0), ("cuda", 3)):
        job = hidden_job(tmp_path, merged, target)
        monkeypatch.setattr(stage, "workers", lambda _, count=count: count)
        (tmp_path / f"{device}{count}").mkdir()
        made[device, count] = hidden(replace(job, runtime={**job.runtime, "device": device}), tmp_path / f"{device}{count}").manifest
    assert made["cuda", 0].shards == made["cuda", 3].shards
    rows = [dict(states(tmp_path / folder)) for folder in ("cpu0", "cuda3")]
    assert rows[0].keys() == rows[1].keys()
    for name, state in rows[0].items():
        assert torch.allclose(rows[1][name], state, rtol=2**-6, atol=2e-3), name


def states(folder: Path) -> Any:
    """Id and aux states of each row."""
    for path in sorted(folder.glob("*.safetensors")):
        shard = read_shard(path)
        for number, name in enumerate(shard.ids):
            start, end = shard.row_offsets[number : number + 2].tolist()
            yield name, decoded(shard.aux[start:end]).float()


def test_batches_that_are_copied_while_others_run_are_those_that_are_waited_for(target: Path) -> None:
    engine = TransformersEngine(load_target(target.parent, torch.bfloat16, "cuda"), frozenset())
    rows = [TokenRow(f"{number}", tuple(3 + (number * 31 + place) % 250 for place in range(400)), ((10, 400),)) for number in range(64)]
    made = capture(engine, rows, BOUNDARIES, Batching(1600, leads=False)).wait()
    for row, state in zip(rows, made, strict=True):
        batch = [StateRequest(other.input_ids, other.final_index) for other in rows[int(row.id) // 4 * 4 :][:4]]
        (wanted,) = engine.states(batch, BOUNDARIES)[int(row.id) % 4 :][:1]
        assert torch.equal(state.aux, wanted.aux.cpu()) and torch.equal(state.final, wanted.final.cpu())
        assert torch.equal(state.argmax, wanted.argmax.cpu())


def test_rows_with_a_common_beginning_run_in_the_flash_kernels(target: Path) -> None:
    """With a beginning that is computed once attention needs a mask, which these kernels do not take; others are forbidden here."""
    engine = TransformersEngine(load_target(target.parent, torch.bfloat16, "cuda"), frozenset())
    rows = [StateRequest((*range(3, 63), *range(9, 9 + length)), (4, 5)) for length in (20, 60, 100)]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        states = engine.states(rows, BOUNDARIES)
    assert [len(state.aux) for state in states] == [80, 120, 160]
