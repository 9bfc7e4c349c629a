"""Training on shards that come and go: a process dumps them within a byte budget while this one trains on those before.

The order of reading is that of the epochs, shard by shard, with what a solved start needs before it. It is known beforehand, so a place in
it names a shard and an epoch.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from scripts.lib.eagle3.closed_form import Sample, wanted_slots
from scripts.lib.engines.protocol import RowStates
from scripts.lib.engines.settings import TargetShape
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.provenance import ROOT
from scripts.lib.ground.stage import Job
from scripts.lib.states.format import packed
from scripts.lib.states.marks import POLL_SECONDS, Marks, Order, lost_places
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import ShardPlan, TokenRow, plan_shards
from scripts.lib.states.storing import Storing
from scripts.lib.training import ranks
from scripts.lib.training.batches import TrainingRow, shard_order
from scripts.lib.training.feed import own_batches, sample
from scripts.lib.training.rows import RowSet, shard_rows
from scripts.lib.training.schedule import PlannedStep, row_order
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.stepping import Stepper

FOLDER = Path("partial/states")  # in the work folder


@dataclass(frozen=True)
class Rolled:
    """The shards to train on as stage `hidden` has planned them, what each takes, and of what size their rows will be, without states."""

    plans: Sequence[ShardPlan]
    bytes: Sequence[int]
    rows: RowSet
    hidden_size: int

    @classmethod
    def of(cls, job: Job) -> "Rolled":
        """The plan behind the manifests of `job`."""
        hidden = read_manifest(job.input("hidden"), "hidden")
        shape = TargetShape.of(job.input("target").parent)
        (merged,) = job.consulted["merged"]
        plans, _ = plan_shards(merged, hidden.settings["hidden"]["tokens_per_shard"], shape.context)
        train = [plan for plan in plans if plan.name.startswith("train-")]
        storing = Storing(hidden.facts["stored"], hidden.facts["compression"])
        sizes = [plan.bytes(shape.hidden_size, storing) for plan in train]
        return cls(train, sizes, RowSet.of(sketched(plan, shape.hidden_size) for plan in train), shape.hidden_size)


def sketched(plan: ShardPlan, hidden_size: int) -> Iterator[TrainingRow]:
    """The rows of a shard that is not there: states have their sizes and no content."""

    def states(row: TokenRow) -> RowStates:
        teachers = len(row.final_index)
        aux, final = ((len(row.input_ids), 3, hidden_size), (teachers, hidden_size))
        return RowStates(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in (aux, final, (teachers,))))

    rows = plan.read()
    return shard_rows(Path(plan.name), packed(rows, [states(row) for row in rows]))


class Rolling:
    """Rows of shards that a dumper makes in `folder`; a `Feed`.

    A step that reads places `a` to `b` of the order needs all shards of these places at once, which `begin` checks.
    """

    def __init__(self, folder: Path, rolled: Rolled, settings: TrainSettings, found: RowSet, solved: bool) -> None:
        """Reads the rows `found` of the `rolled` shards; `solved`: the start is solved from the first ones."""
        self.folder, self.marks, self.rolled, self.settings, self.found = folder, Marks(folder), rolled, settings, found
        self.index = {place: number for number, place in enumerate(found.places)}
        self.start = leading_shards(found, row_order(found, settings, 0), wanted_slots(rolled.hidden_size)) if solved else []
        epochs = [shard_order(found.shards, settings.seed, epoch) for epoch in range(settings.epochs)]
        self.order = [*self.start, *chain(*epochs)]
        firsts = [len(self.start) + epoch * len(shards) for epoch, shards in enumerate(epochs)]
        numbered = zip(firsts, epochs, strict=True)
        self.entries = [{shard: first + place for place, shard in enumerate(shards)} for first, shards in numbered]
        self.opened: dict[int, Mapping[int, TrainingRow]] = {}
        self.lost: dict[int, set[int]] = {}
        self.ready, self.used, self.stopped = 0, -1, False

    def samples(self) -> Iterator[Sample]:
        """What the rows of the leading shards hold, in the order of the first epoch; copied, as a mapped file takes room until let go."""
        self.use(0)
        entry = {shard: place for place, shard in enumerate(self.start)}
        for number in row_order(self.found, self.settings, 0):
            shard, _ = self.found.places[number]
            if shard not in entry:
                return
            self.use(entry[shard])
            if (row := self.rows(entry[shard]).get(number)) is not None:
                seen = sample(row)
                yield replace(seen, final=seen.final.clone())

    def load(self, stepper: Stepper, steps: Sequence[PlannedStep]) -> Iterator[Any]:
        """The batches of this rank in `steps`; a shard is given up when the last batch that reads it is made."""
        batches = [(step.epoch, batch) for step in steps for batch in own_batches(step)]
        needed = [min(self.places(epoch, batch)) for epoch, batch in batches] + [len(self.order)]
        for place in reversed(range(len(batches))):
            needed[place] = min(needed[place], needed[place + 1])
        self.use(needed[0])
        made = stepper.load([AwaitedRows(self, epoch, batch) for epoch, batch in batches])
        return self.following(made, needed[1:])

    def following(self, batches: Iterator[Any], needed: Sequence[int]) -> Iterator[Any]:
        """`batches`, saying behind each from which place of the order on shards are still `needed`."""
        try:
            for batch, place in zip(batches, needed, strict=True):
                self.use(place)
                yield batch
        finally:
            self.stopped = True

    def usable(self, step: PlannedStep) -> list[TrainingRow]:
        """The rows of `step`, without states, that were not left out of their shards; waits until that is known."""
        self.wait(self.span(step)[1])
        return [self.found.rows[number] for batch in step.batches for number in batch if not self.is_lost(number)]

    def quarantined(self) -> int:
        """How many of the rows were left out, of shards that were dumped so far."""
        return sum(self.is_lost(number) for number in range(len(self.found.rows)))

    def is_lost(self, number: int) -> bool:
        """Whether row `number` was left out of its shard."""
        shard, place = self.found.places[number]
        if shard not in self.lost:
            self.lost[shard] = lost_places(self.folder, self.rolled.plans[shard].name)
        return place in self.lost[shard]

    def span(self, step: PlannedStep) -> tuple[int, int]:
        """The first and the last place in the order that `step` reads."""
        places = self.places(step.epoch, [row for batch in step.batches for row in batch])
        return min(places), max(places)

    def places(self, epoch: int, numbers: Sequence[int]) -> list[int]:
        """Where in the order the shards of the rows `numbers` come in `epoch`."""
        return [self.entries[epoch][self.found.places[number][0]] for number in numbers]

    def rows(self, place: int) -> Mapping[int, TrainingRow]:
        """The rows in the shard at `place` of the order, by their numbers; waits for the shard."""
        if place not in self.opened:
            self.wait(place)
            shard = self.order[place]
            path = self.folder / self.rolled.plans[shard].name
            lost = lost_places(self.folder, path.name)
            kept = [number for number in range(self.rolled.plans[shard].kept) if number not in lost]
            content = shard_rows(path, read_shard(path)) if kept else []
            rows = {self.index.get((shard, number)): row for number, row in zip(kept, content, strict=True)}
            self.opened[place] = {number: row for number, row in rows.items() if number is not None}
        return self.opened[place]

    def wait(self, place: int) -> None:
        """Wait for the shard at `place` of the order. Raises StageError when the dumper has stopped, or the training early."""
        while self.ready <= place:
            refusal = "no more batches are asked for" if self.stopped else self.marks.refusal()
            if refusal is not None:
                raise StageError(refusal)
            time.sleep(POLL_SECONDS)
            self.ready = self.marks.ready()

    def use(self, place: int) -> None:
        """Let go of all shards before `place` of the order, and say so."""
        if place == self.used:
            return
        for before in [opened for opened in list(self.opened) if opened < place]:
            del self.opened[before]
        self.used = place
        self.marks.use(ranks.number(), place)

    def begin(self, steps: Sequence[PlannedStep], room: int) -> None:
        """Tell the dumper the order of `steps`. Raises StageError when one reads shards that do not fit into `room` bytes together."""
        spans = [self.span(step) for step in steps]
        for number, (first, last) in enumerate(spans):
            shards = set(self.order[first : last + 1])
            need = sum(self.rolled.bytes[shard] for shard in shards)
            if need > room:
                raise StageError(
                    f"{self.folder}: step {number + 1} reads {len(shards)} shards of {need:,} bytes together, there is room for {room:,} "
                    "(hidden.max_bytes less the held-out rows, or what the disk has); set the drafter's order: shards, lower "
                    "hidden.tokens_per_shard, or raise hidden.max_bytes to two shards more than a step reads"
                )
        if ranks.first():
            names = [self.rolled.plans[shard].name for shard in self.order]
            self.marks.announce(Order(names, ranks.count(), max(last - first for first, last in spans) + 1))


@dataclass(frozen=True)
class AwaitedRows:
    """The rows `numbers` of one batch in `epoch`, which are read when they are gone through."""

    feed: Rolling
    epoch: int
    numbers: Sequence[int]

    def __iter__(self) -> Iterator[TrainingRow]:
        places = self.feed.places(self.epoch, self.numbers)
        rows = [self.feed.rows(place).get(number) for place, number in zip(places, self.numbers, strict=True)]
        found = [row for row in rows if row is not None]
        if not found:
            names = [self.feed.found.rows[number].id for number in self.numbers]
            raise StageError(f"none of rows {names}, which make a batch, has usable states; look at hidden.dtype and the target")
        return iter(found)


def leading_shards(found: RowSet, order: Sequence[int], slots: int) -> list[int]:
    """The shards that hold the first rows in `order` which have `slots` slots together."""
    shards: dict[int, None] = {}
    count = 0
    for number in order:
        if count >= slots:
            break
        shards[found.places[number][0]] = None
        count += len(found.rows[number].slots)
    return list(shards)


def room_for(job: Job, folder: Path) -> int:
    """Bytes that shards may take in the work `folder`: what the disk has, and no more than hidden.max_bytes with the held-out rows."""
    held = sum(path.stat().st_size for path in (folder / FOLDER).glob("*.safetensors"))
    free, most = shutil.disk_usage(folder).free + held, job.runtime["hidden"]["max_bytes"]
    kept = sum(shard.bytes for shard in read_manifest(job.input("hidden"), "hidden").shards)
    return free if most is None else min(free, most - kept)


def is_rolling(job: Job) -> bool:
    """Whether the states to train on come and go."""
    return "rolled" in read_manifest(job.input("hidden"), "hidden").facts


@contextlib.contextmanager
def dumping(job: Job, folder: Path) -> Iterator[None]:
    """Let a process dump shards into the work `folder` while the block runs, where states come and go. It ends with this process."""
    if not is_rolling(job):
        yield
        return
    states = folder / FOLDER
    states.mkdir(parents=True, exist_ok=True)
    Marks(states).clear()
    process = subprocess.Popen(command(job, folder), stdin=subprocess.PIPE, start_new_session=True, env=environment())
    watcher = threading.Thread(target=watch, args=(process, Marks(states)), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        assert process.stdin
        process.stdin.close()
        watcher.join()


def command(job: Job, folder: Path) -> list[str]:
    """The command line of the dumper."""
    settings = read_manifest(job.input("hidden"), "hidden").settings
    runtime = job.runtime["hidden"] | {"room": room_for(job, folder)}
    (merged,) = job.consulted["merged"]
    inputs = ["--merged", str(merged), "--target", str(job.input("target")), "--folder", str(folder / FOLDER)]
    return [sys.executable, "-m", "scripts.dump", *inputs, "--settings", json.dumps(settings), "--runtime", json.dumps(runtime)]


def environment() -> dict[str, str]:
    """That of this process, in which the project's modules are found."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def watch(process: "subprocess.Popen[bytes]", marks: Marks) -> None:
    """Wait for the end of the dumper, and leave word when it was none of its own choice."""
    code = process.wait()
    if code and marks.refusal() is None:
        marks.refuse(f"the process that dumps states ended with code {code} (-9: killed, maybe for memory); look at the log, start again")
