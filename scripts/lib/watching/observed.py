"""What an observer has heard of a run of generation so far."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from scripts.lib.watching.estimate import Estimate, Situation, estimate
from scripts.lib.watching.lengths import Counts, Lengths
from scripts.lib.watching.rates import Rates

ENDS = {"stop": True, "length": False}  # finish reasons with an answer: it ended by itself, or was cut


@dataclass(frozen=True)
class Plan:
    """What a run has to do: turns by class, turns that an earlier attempt finished, the longest answer in tokens, and requests at once.

    A class holds the rows whose answers are expected to be equally long, to a factor of two: one more means twice as long. Where nothing
    is known all are of class 0.
    """

    turns: Mapping[int, int]
    done: int
    max_tokens: int
    slots: int

    @cached_property
    def total(self) -> int:
        """Turns of all groups."""
        return sum(self.turns.values())


class Flight(NamedTuple):
    """A request in flight: since when, as which row in the order of starts, of which group."""

    since: float
    position: int
    group: int


class Observed:
    """Hears of every request, as `generation.observing.Observer` asks for; `clock` gives seconds."""

    def __init__(self, plan: Plan, state: Mapping[str, Any] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan, self.clock = plan, clock
        self.groups = {name: place for place, name in enumerate(sorted({0, *plan.turns}))}  # what is rejected unasked is of class 0
        self.lengths = Lengths.empty([plan.max_tokens] * len(self.groups))
        self.started_by_group = np.zeros(len(self.groups), np.int64)
        if state and state["groups"] == sorted(self.groups) and state["max_tokens"] == plan.max_tokens:
            self.lengths = Lengths.restored(state["lengths"])
        self._count_resumed()
        self.rates = Rates()
        self.flying: dict[str, Flight] = {}
        self.parked: dict[str, Flight] = {}  # failed, to go again: they keep their place
        self.done, self.started, self.tokens = plan.done, plan.done, 0
        self.reasons: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.start = self.last = clock()
        self.most = 0

    def on_start(self, key: str, group: int = 0) -> None:
        """A request goes out; with the first one, the clock starts: before it, servers start."""
        if self.started == self.plan.done:
            self.start = self.last = self.clock()
        self._pass()
        known = self.parked.pop(key, None)
        place = known.group if known else self.groups[group]
        if known is None:
            self.started += 1
            self.started_by_group[place] += 1
        self.flying[key] = Flight(self.last, known.position if known else self.started - 1, place)
        self.most = max(self.most, len(self.flying))

    def on_done(self, key: str, tokens: int, finish_reason: str, seconds: float) -> None:
        """A turn is over; one that failed counts as done without a length."""
        self._pass()
        flight = self.flying.pop(key)
        self.done += 1
        self.tokens += tokens
        self.reasons[finish_reason] += 1
        if finish_reason in ENDS:
            self.lengths.add(flight.group, flight.position, tokens, ENDS[finish_reason])
            self.rates.add(tokens, seconds)
        else:
            self.rates.lost(seconds)

    def on_retry(self, key: str, reason: str) -> None:
        """A request failed and goes out again later."""
        self._pass()
        flight = self.flying.pop(key)
        self.parked[key] = flight
        self.retries[reason] += 1
        self.rates.lost(self.last - flight.since)

    @property
    def seconds(self) -> float:
        """Seconds of this attempt."""
        return max(self.last - self.start, 1e-9)

    def naive(self) -> float:
        """Seconds left if the rest goes as fast as the finished rows of this attempt did; infinite before the first."""
        finished = self.done - self.plan.done
        return (self.plan.total - self.done) / finished * self.seconds if finished else float("inf")

    def mean_tokens(self) -> float | None:
        """Mean length of the answers of this attempt."""
        answers = sum(self.reasons[reason] for reason in ENDS)
        return self.tokens / answers if answers else None

    def situation(self) -> Situation:
        """The run as it is now."""
        self._pass()
        speed = self.rates.recent(64).stream
        flights = list(self.flying.values())
        groups = np.array([flight.group for flight in flights], np.int64)
        positions = np.array([flight.position for flight in flights], np.int64)
        ages = np.array([self.last - flight.since for flight in flights])
        present = np.minimum(ages * speed, self.plan.max_tokens - 1)
        running = self.lengths.running(groups, positions, present)
        waiting = self._waiting()
        slots = max(len(flights), round(self.rates.recent(64).running)) if self.rates.blocks else min(self.plan.slots, self.most)
        classes = np.array(sorted(self.groups))
        return Situation(self.lengths, running, waiting, classes, self.started, self.plan.total, slots, self.rates)

    def estimate(self) -> Estimate | None:
        """When it ends, from now on."""
        return estimate(self.situation())

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know the lengths so far, as JSON."""
        return {"groups": sorted(self.groups), "max_tokens": self.plan.max_tokens, "lengths": self.lengths.state()}

    def _waiting(self) -> Counts:
        """Turns not started yet, by group, those that failed and go again included."""
        totals = np.array([self.plan.turns.get(name, 0) for name in sorted(self.groups)])
        parked = np.bincount([flight.group for flight in self.parked.values()], minlength=len(self.groups)) if self.parked else 0
        return np.maximum(totals - self.started_by_group + parked, 0)

    def _count_resumed(self) -> None:
        """Spread the turns of earlier attempts over the groups: as their answers say where those are known, else evenly."""
        answers = (self.lengths.ended + self.lengths.cut).sum((1, 2)).astype(float)
        totals = np.array([self.plan.turns.get(name, 0) for name in sorted(self.groups)], float)
        weights = answers if answers.sum() else totals
        self.started_by_group = np.minimum(np.round(self.plan.done * weights / max(weights.sum(), 1)), totals).astype(np.int64)

    def _pass(self) -> None:
        """Count the time since the last event."""
        now = self.clock()
        waiting = self.started - len(self.parked) < self.plan.total
        self.rates.passed(now - self.last, len(self.flying), self.done / max(self.plan.total, 1), waiting)
        self.last = now
