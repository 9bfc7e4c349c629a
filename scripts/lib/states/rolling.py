"""Shards that come and go: dumped just before a training reads them, deleted when there must be room for the next ones.

The whole order of reading is known, so what goes is the shard that is needed last: with several epochs, what fits stays.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import Job, last_words
from scripts.lib.states.hidden import Dump
from scripts.lib.states.marks import POLL_SECONDS, Marks, Order
from scripts.lib.states.rows import ShardPlan

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Roller:
    """Keeps shards in the folder of `dump` within `room` bytes, for a training that says by `marks` how far it is."""

    dump: Dump
    marks: Marks
    room: int

    def run(self) -> None:
        """Dump the shards of the announced order, each before it is read and none before there is room for it."""
        order = waited(self.marks.order)
        plans = {plan.name: plan for plan in self.dump.rolled}
        for place in range(waited(lambda: self.marks.used(order.ranks)), len(order.shards)):
            plan = plans[order.shards[place]]
            if self.dump.writer.receipt(plan) is None:
                self.make_room(plan, order, place)
                start = time.monotonic()
                self.dump.announce([plan])
                self.dump.writer.write(plan)
                log.info("%s dumped, %s tokens a second", plan.name, f"{plan.tokens / (time.monotonic() - start):,.0f}")
            self.marks.make_ready(place + 1)

    def make_room(self, plan: ShardPlan, order: Order, place: int) -> None:
        """Delete shards until there is room for `plan`, which comes at `place`; wait while all of them are still to be read before it.

        Nothing is deleted before the readers are so near that `plan` is wanted: the later, the better it is known what can go.
        """
        need = plan.bytes(self.dump.shape.hidden_size, self.dump.settings.storing)
        while (held := self.held()) and sum(held.values()) + need > self.room:
            used = waited(lambda: self.marks.used(order.ranks))
            idle = [name for name in held if name not in order.shards[used:place]]
            if idle and place - used <= order.lead:
                (self.dump.writer.folder / latest(idle, order.shards[place:])).unlink()
            else:
                time.sleep(POLL_SECONDS)

    def held(self) -> Mapping[str, int]:
        """The shards that are there, by name, and their bytes."""
        return {path.name: path.stat().st_size for path in sorted(self.dump.writer.folder.glob("*.safetensors"))}


def latest(names: Sequence[str], coming: Sequence[str]) -> str:
    """Which of `names` comes last in the order of those that are `coming`, or not at all."""
    places = {name: place for place, name in reversed(list(enumerate(coming)))}
    return max(names, key=lambda name: (places.get(name, len(coming)), name))


def waited(ask: Callable[[], T | None]) -> T:
    """What `ask` gives once it gives something."""
    while (answer := ask()) is None:
        time.sleep(POLL_SECONDS)
    return answer


def roll(job: Job, folder: Path) -> None:
    """Dump for the training that works in `folder`, within `runtime.room` bytes. What stops it is left in the marks for the training."""
    marks = Marks(folder)
    try:
        dump = Dump.of(job, folder)
        with dump.serving(()):
            Roller(dump, marks, job.runtime["room"]).run()
    except Exception as error:
        marks.refuse(str(error) if isinstance(error, StageError) else last_words(error))
        raise


def end_with_standard_input() -> None:
    """Let this process end at once when its standard input closes, which it does when the process that holds the other end dies."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
