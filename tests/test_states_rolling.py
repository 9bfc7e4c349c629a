"""Shards that come and go: the drafter is that of the dumped mode, the budget holds, and a killed training goes on."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scripts.lib.engines.protocol import RowStates
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import HiddenShard, final_borders, packed, write_shard
from scripts.lib.states.hidden import hidden
from scripts.lib.states.marks import Marks, Order, receipt_path
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rolling import Roller, latest
from scripts.lib.states.rows import TokenRow, plan_shards
from scripts.lib.states.storing import Storing
from scripts.lib.training import rolling
from scripts.lib.training.build import train
from scripts.lib.training.rolling import AwaitedRows, Rolled, Rolling
from scripts.lib.training.rows import load_rows
from scripts.lib.training.schedule import plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.trainer import Trainer
from scripts.lib.vocabulary.tables import tables, write_vocabulary
from tests.stage_inputs import hidden_job, publish_merged, publish_target, some_token_rows, token_row
from tests.train_case import SETTINGS, publish

FILES = ("model.safetensors", "curves.csv", "training.json", "config.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, mix and vocabulary; four shards of train rows. One row has no slot to train."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("inputs")
    publish_target(root / "target")
    train_rows = some_token_rows(20)
    train_rows.insert(5, token_row("short", [5, 6, 7, 8, 9], [(3, 5)]))
    publish_merged(root / "merged", train_rows, some_token_rows(4, "e"))
    (root / "vocab").mkdir()
    publish(root / "vocab", "vocab", [write_vocabulary(root / "vocab", tables(np.arange(3, 260), 272))], {})
    for mode in ("dumped", "rolling"):
        run(hidden_job(root, root / "merged/manifest.json", root / "target/manifest.json", mode, mode=mode), hidden)
    return root


def largest(root: Path, shards: int) -> int:
    """Bytes of the held-out rows and of so many of the largest shards."""
    plans, _ = plan_shards(root / "merged/manifest.json", 150, 512)
    sizes = sorted(plan.bytes(64, Storing()) for plan in plans if plan.name.startswith("train-"))
    kept = read_manifest(root / "rolling/manifest.json", "hidden").shards
    return sum(sizes[-shards:]) + sum(shard.bytes for shard in kept)


def train_job(root: Path, output: Path, mode: str, shards: int = 2, **drafter: Any) -> Job:
    """A training on the states of `mode`, with room for `shards` shards."""
    settings = SETTINGS | {"drafter": SETTINGS["drafter"] | {"order": "shards"} | drafter}
    manifests = {name: (root / folder / "manifest.json",) for name, folder in (("hidden", mode), ("vocab", "vocab"), ("target", "target"))}
    runtime = {"device": "cpu", "threads": 1, "hidden": {"device": "cpu", "threads": 1, "max_bytes": largest(root, shards)}}
    merged = (root / "merged/manifest.json",) if mode == "rolling" else ()
    return Job("train", output, manifests, settings, runtime, output.parent / "work", {"merged": merged})


@pytest.fixture(scope="module")
def wanted(inputs: Path) -> Path:
    """The drafter trained on states that were all on disk."""
    run(train_job(inputs, inputs / "wanted/eagle3", "dumped"), train)
    return inputs / "wanted/eagle3"


def same(found: Path, wanted: Path) -> None:
    for name in FILES:
        assert (found / name).read_bytes() == (wanted / name).read_bytes(), name


def test_stage_hidden_keeps_held_out_rows_and_plans_the_others(inputs: Path) -> None:
    dumped, rolling = (read_manifest(inputs / mode / "manifest.json", "hidden") for mode in ("dumped", "rolling"))
    assert rolling.counts == dumped.counts
    assert [shard.name for shard in rolling.shards] == ["eval-00000.safetensors"]
    assert rolling.shards[-1] == dumped.shards[-1]
    planned, train_shards = rolling.facts["rolled"], dumped.shards[:-1]
    assert planned["shards"] == len(train_shards) == 4
    assert (planned["kept"], planned["tokens"]) == (sum(s.rows for s in train_shards), sum(s.tokens for s in train_shards))
    assert not list((inputs / "rolling").glob("train-*"))


def test_a_budget_of_two_shards_trains_the_drafter_of_the_dumped_mode_and_is_killed_meanwhile(
    inputs: Path, wanted: Path, tmp_path: Path
) -> None:
    """Killed in the second epoch: the dumper dies with the training, and the next attempt dumps from there on."""
    job = train_job(inputs, tmp_path / "eagle3", "rolling")
    steps = json.loads((wanted / "training.json").read_text())["steps"]
    context = multiprocessing.get_context("forkserver")  # a forked process finds the threads of polars gone
    context.set_forkserver_preload(["scripts.lib.training.build", "scripts.lib.states.hidden"])
    child = context.Process(target=killed_at, args=(job, steps - 3))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and not job.output.exists()
    run(job, train)
    same(job.output, wanted)
    assert not list(tmp_path.glob("work/**/*.safetensors"))
    assert read_manifest(job.output / "manifest.json", "train").counts == read_manifest(wanted / "manifest.json", "train").counts


def killed_at(job: Job, step: int) -> None:
    """Run `job` and end with SIGKILL at `step`."""
    torch.set_num_threads(1)
    original, done = Trainer.step, []

    def dying(self: Trainer, *arguments: Any) -> Any:
        done.append(1)
        if len(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", dying)
        run(job, train)


def test_a_step_that_reads_more_than_there_is_room_for_is_refused(inputs: Path, tmp_path: Path) -> None:
    job = train_job(inputs, tmp_path / "eagle3", "rolling", order="rows")
    settings, rolled = TrainSettings.of(job.settings), Rolled.of(job)
    feed = Rolling(tmp_path, rolled, settings, rolled.rows, solved=False)
    with pytest.raises(StageError, match=r"step 1 reads \d shards of [\d,]+ bytes together, there is room for 100,000 .*order: shards"):
        feed.begin(plan(rolled.rows, settings), 100_000)
    feed.begin(plan(rolled.rows, settings), 10**9)


@pytest.mark.parametrize(("script", "sentence"), [("marks.refuse('no luck')", "^no luck$"), ("os._exit(9)", "ended with code 9")])
def test_what_stops_the_dumper_stops_the_training_with_its_sentence(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, sentence: str
) -> None:
    """The command line of the dumper is replaced by a few words that fail at once."""

    def failing(_: Job, folder: Path) -> list[str]:
        words = "import os; from pathlib import Path; from scripts.lib.states.marks import Marks"
        marks = f"marks = Marks(Path({str(folder / rolling.FOLDER)!r}))"
        return [sys.executable, "-c", f"{words}; {marks}; {script}; raise SystemExit(1)"]

    monkeypatch.setattr(rolling, "command", failing)
    with pytest.raises(StageError, match=sentence):
        run(train_job(inputs, tmp_path / "eagle3", "rolling"), train)


def test_a_row_that_is_left_out_of_its_shard_is_left_out_of_its_step(inputs: Path, tmp_path: Path) -> None:
    """What has states that are not finite is known when its shard is dumped; the rows behind it keep their places."""
    job = train_job(inputs, tmp_path / "eagle3", "rolling")
    settings, rolled = TrainSettings.of(job.settings), Rolled.of(job)
    feed = Rolling(tmp_path, rolled, settings, rolled.rows, solved=False)
    steps = plan(rolled.rows, settings)
    whole = {row.id: row for row in load_rows(inputs / "dumped", read_manifest(inputs / "dumped/manifest.json", "hidden"), "train").rows}
    lost = rolled.plans[feed.order[0]].read()[1].id
    for shard in rolled.plans:
        bad = [[place, row.id, "non_finite"] for place, row in enumerate(shard.read()) if row.id == lost]
        full = read_shard(inputs / "dumped" / shard.name)
        write_shard(tmp_path / shard.name, without(full, shard.read(), lost))
        receipt_path(tmp_path, shard.name).parent.mkdir(exist_ok=True)
        write_json(receipt_path(tmp_path, shard.name), {"rejected": bad})
    feed.marks.make_ready(len(feed.order))
    names = [row.id for step in steps[: len(steps) // 2] for row in feed.usable(step)]
    assert sorted([*names, lost]) == sorted(whole) and feed.quarantined() == 1
    for step in steps[: len(steps) // 2]:
        for batch in step.batches:
            for row in AwaitedRows(feed, step.epoch, batch):
                assert row.id != lost and torch.equal(decoded(row.aux), decoded(whole[row.id].aux))
                assert torch.equal(decoded(row.final), decoded(whole[row.id].final)) and torch.equal(row.tokens, whole[row.id].tokens)


def without(shard: HiddenShard, rows: Sequence[TokenRow], lost: str) -> HiddenShard:
    """`shard`, which holds `rows`, without the row `lost`."""
    borders, finals = shard.row_offsets.tolist(), final_borders(shard.row_offsets, shard.final_index)
    states = [
        RowStates(decoded(shard.aux)[start:end], decoded(shard.final)[first:last], shard.argmax[first:last])
        for (start, end), (first, last) in zip(pairwise(borders), pairwise(finals), strict=True)
    ]
    kept = [place for place, row in enumerate(rows) if row.id != lost]
    return packed([rows[place] for place in kept], [states[place] for place in kept])


@pytest.fixture
def roller(tmp_path: Path) -> Iterator[tuple[Roller, list[list[str]]]]:
    """A dumper of made-up shards of 100 bytes, and the shards that were there after each dump."""
    there: list[list[str]] = []

    def write(plan: Any) -> None:
        (tmp_path / plan.name).write_bytes(bytes(100))
        there.append(sorted(path.stem for path in tmp_path.glob("*.safetensors")))

    plans = [SimpleNamespace(name=f"{name}.safetensors", tokens=1, bytes=lambda *_: 100) for name in "abcd"]
    writer = SimpleNamespace(folder=tmp_path, write=write, receipt=lambda plan: (tmp_path / plan.name).exists() or None)
    dump: Any = SimpleNamespace(rolled=plans, writer=writer, shape=SimpleNamespace(hidden_size=1), settings=SimpleNamespace(storing=None))
    dump.announce = lambda _: None
    yield Roller(dump, Marks(tmp_path), 300), there


def test_no_more_shards_than_the_budget_and_what_fits_stays_for_the_next_epoch(roller: tuple[Roller, list[list[str]]]) -> None:
    """Room for three of four shards, two epochs, two readers: one shard is dumped twice, and none goes that one still reads.

    With a lead, what goes would hang on how far the readers happen to be.
    """
    dumper, there = roller
    order = [f"{name}.safetensors" for name in "abcdbacd"]
    dumper.marks.announce(Order(order, 2, 0))
    thread = threading.Thread(target=dumper.run)
    thread.start()
    for place in range(len(order) + 1):
        dumper.marks.use(0, len(order))
        dumper.marks.use(1, place)
        while dumper.marks.ready() <= place < len(order):
            pass
        assert place == len(order) or (dumper.marks.folder / order[place]).exists()
    thread.join()
    assert all(len(names) <= 3 for names in there)
    assert len(there) == 5


def test_what_is_needed_last_goes_first() -> None:
    assert latest(["a", "b", "c"], ["b", "a", "c", "a"]) == "c"
    assert latest(["a", "b"], ["b"]) == "a"
