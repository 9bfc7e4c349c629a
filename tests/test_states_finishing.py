"""Shards that threads finish while the next ones are computed: the same files, whatever is early, late or fails."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import hidden_stage
from scripts.lib.engines.protocol import StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, changes, load_target
from scripts.lib.ground import manifest as manifests
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import sha256_file
from scripts.lib.ground.manifest import Shard
from scripts.lib.ground.stage import Job
from scripts.lib.states import hidden as stage
from scripts.lib.states import landing
from scripts.lib.states.finishing import WORKERS, workers, written
from scripts.lib.states.hidden import hidden
from tests.stage_inputs import disk_full_at, hidden_job, publish_merged, publish_target, some_token_rows

BOUNDARIES = [2, 4, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_merged(tmp_path_factory.mktemp("published") / "merged", some_token_rows(20), some_token_rows(3, "e"))


@pytest.fixture
def finishing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many threads the stage finishes shards with."""
    return lambda count: monkeypatch.setattr(stage, "workers", lambda _: count)


def dumped(job: Job, folder: Path) -> Sequence[Shard]:
    """The shards of the manifest that `job` gives, worked out in `folder`."""
    folder.mkdir(exist_ok=True)
    return hidden(job, folder).manifest.shards


def files(folder: Path) -> dict[str, bytes]:
    """Shards, receipts and the table of batches."""
    paths = [*folder.glob("*.safetensors"), *folder.glob("partial/*.json"), *folder.glob("*.parquet")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_any_number_of_finishing_threads_gives_the_same_files_and_receipts(
    target: Path, merged: Path, tmp_path: Path, finishing: Callable[[int], None]
) -> None:
    job, made = hidden_job(tmp_path, merged, target), {}
    for count in (0, 1, 3):
        finishing(count)
        shards = dumped(job, tmp_path / str(count))
        made[count] = (shards, files(tmp_path / str(count)))
    assert len(made[0][0]) > 3 and len(made[0][1]) == 2 * len(made[0][0]) + 1
    assert made[0] == made[1] == made[3]
    assert workers("cpu") == 0 and workers("cuda:1") == WORKERS


class Late:
    """Stands for a GPU's event: the copies hold nothing before somebody has waited for it."""

    def __init__(self, copies: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
        self.pairs = list(zip(copies, tensors, strict=True))

    def synchronize(self) -> None:
        for copy, tensor in self.pairs:
            copy.copy_(tensor)


def test_nobody_reads_states_that_are_still_under_way(
    target: Path, merged: Path, tmp_path: Path, finishing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hidden_job(tmp_path, merged, target)
    dumped(job, tmp_path / "wanted")

    def late(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Late]:
        copies = tuple(torch.zeros_like(tensor) for tensor in tensors)
        return copies, Late(copies, tensors)

    monkeypatch.setattr(landing, "fetching", late)
    finishing(2)
    dumped(job, tmp_path / "late")
    assert files(tmp_path / "late") == files(tmp_path / "wanted")


def test_a_shard_that_cannot_be_finished_stops_the_stage_by_name_and_the_finished_ones_stay(
    target: Path, merged: Path, tmp_path: Path, finishing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hidden_job(tmp_path, merged, target)
    dumped(job, tmp_path / "wanted")
    finishing(2)
    with disk_full_at("train-00002.safetensors"), pytest.raises(OSError, match=r"No space left.*train-00002\.safetensors"):
        dumped(job, tmp_path / "full")
    kept = files(tmp_path / "full")
    assert {"train-00000.safetensors", "train-00001.safetensors", "partial/train-00001.safetensors.json"} <= set(kept)
    assert not any("train-00002" in name for name in kept)
    moments = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "full").glob("*.safetensors")}
    dumped(job, tmp_path / "full")
    assert files(tmp_path / "full") == files(tmp_path / "wanted")
    assert all((tmp_path / "full" / name).stat().st_mtime_ns == moment for name, moment in moments.items())


def test_a_failed_check_in_a_thread_is_the_stages_own_sentence(
    target: Path, merged: Path, tmp_path: Path, finishing: Callable[[int], None]
) -> None:
    finishing(2)
    job = hidden_job(tmp_path, merged, target)
    greedy = Job(job.stage, job.output, job.inputs, {**job.settings, "greedy": ["toy"]}, job.runtime, job.work)
    with pytest.raises(StageError, match=r"of \d+ tokens of greedy answers are not what the target would write.* of toy"):
        dumped(greedy, tmp_path / "folder")
    assert not list((tmp_path / "folder").glob("*.safetensors"))


def test_the_digests_are_taken_once_and_a_resumed_run_keeps_them(
    target: Path, merged: Path, tmp_path: Path, finishing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finishing(2)
    job, folder = hidden_job(tmp_path, merged, target), tmp_path / "folder"
    first = dumped(job, folder)
    assert all((shard.bytes, shard.sha256) == ((folder / shard.name).stat().st_size, sha256_file(folder / shard.name)) for shard in first)
    for name in ("train-00001.safetensors", "partial/train-00003.safetensors.json"):
        (folder / name).unlink()

    def read_again(path: Path) -> str:
        assert path.suffix != ".safetensors", path
        return sha256_file(path)

    monkeypatch.setattr(manifests, "sha256_file", read_again)
    assert dumped(job, folder) == first


def test_no_more_shards_are_in_memory_than_threads_and_one() -> None:
    """Capturing is instant here, and finishing waits until one more shard is captured than two threads can finish."""
    changed, begun, open_now, captured = threading.Condition(), threading.Barrier(2, timeout=10), [0], [0]

    def capture(rows: int) -> int:
        with changed:
            open_now[0] += 1
            captured[0] += 1
            assert open_now[0] <= 3
            changed.notify_all()
        return rows

    def finish(_: Any, rows: int) -> int:
        begun.wait()
        with changed:
            assert changed.wait_for(lambda: open_now[0] == 3 or captured[0] == 10, timeout=10)
        begun.wait()
        with changed:
            open_now[0] -= 1
        return rows

    fake: Any = SimpleNamespace(capture=capture, finish=finish)
    plans: Any = [SimpleNamespace(read=lambda number=number: number) for number in range(10)]
    assert [(plan.read(), receipt) for plan, receipt in written(fake, plans, 2)] == [(number, number) for number in range(10)]
    assert not list(written(fake, [], 2)), "a run that was killed behind its last shard has none left to make"


def test_the_benchmark_gives_its_figures(target: Path, merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--target", str(target.parent), "--merged", str(merged), "--tokens", "900", "--tokens-per-shard", "300", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["hidden_stage", *words, "--threads", "1"])
    figures = hidden_stage.measured(hidden_stage.arguments(), tmp_path)
    assert 870 < figures["tokens"] <= 900 and figures["shards"] > 2
    rates = [f"{name}_tokens_per_second" for name in ("prefill", "dump")] + [f"{name}_gb_per_second" for name in ("write", "disk")]
    assert all(figures[name] > 0 for name in rates[:2]) and set(rates) <= set(figures) and figures["dump_of_prefill"] > 0
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_a_plain_pass_beside_a_batch_leaves_its_taps_alone(target: Path) -> None:
    """Taps are hooks of the modules: states of the other thread's pass would be taken for those of the batch."""
    engine = TransformersEngine(load_target(target.parent, torch.float32, "cpu"), frozenset())
    batch = [StateRequest(tuple(range(3, 3 + length)), (4, 5)) for length in (60, 90)]
    wanted, alone = engine.states(batch, BOUNDARIES), engine.reference(range(5, 80), BOUNDARIES)
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(engine.reference, range(5, 80), BOUNDARIES) for _ in range(40)]
        made = [engine.states(batch, BOUNDARIES) for _ in range(20)]
        for states in made:
            for one, other in zip(states, wanted, strict=True):
                assert torch.equal(one.aux, other.aux) and torch.equal(one.final, other.final)
        assert all(torch.equal(one, other) for future in beside for one, other in zip(future.result(), alone, strict=True))


@pytest.mark.parametrize(
    ("rope", "part", "found"),
    [
        ({"rope_type": "llama3"}, SimpleNamespace(), False),
        ({"full": {"rope_type": "longrope"}}, SimpleNamespace(), True),
        (None, SimpleNamespace(), False),
        (None, SimpleNamespace(_hf_hook="moves weights"), True),
    ],
)
def test_a_target_that_a_pass_changes_gets_no_second_stream(rope: dict[str, Any] | None, part: Any, found: bool) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(rope_parameters=rope), modules=lambda: [part])
    assert changes(model) == found
