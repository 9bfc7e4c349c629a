"""Turns that wait to be asked: by partition, the longest first."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.policy import Slots


@dataclass
class Pending:
    """The next turn of a conversation: its expected tokens, how often it failed for which reason, and how many answers it discarded."""

    conversation: Conversation
    expected: float
    failures: Counter[str] = field(default_factory=Counter)
    discarded: int = 0
    key: str = field(init=False)  # names the turn to observers

    def __post_init__(self) -> None:
        self.key = f"{self.conversation.id}/{self.conversation.turn}"


class Backlog:
    """What is ready, and who waits for it. `low` is the number of ready turns below which another window is wanted."""

    def __init__(self, slots: Mapping[str, Slots], low: int) -> None:
        self.slots, self.low = slots, low
        self.ready: dict[str, deque[Pending]] = defaultdict(deque)
        self.waiting = 0  # conversations in flight or asleep: they may come back
        self.complete = False
        self.changed = asyncio.Event()
        self.hungry = asyncio.Event()

    def add(self, pending: Iterable[Pending]) -> None:
        """Put turns among those that are ready."""
        for turn in pending:
            self.ready[turn.conversation.partition].append(turn)
        for partition, queue in self.ready.items():
            self.ready[partition] = deque(sorted(queue, key=lambda turn: turn.expected, reverse=True))
        self._wake()

    def close(self) -> None:
        """No window comes after this."""
        self.complete = True
        self._wake()

    async def wanted(self) -> None:
        """Wait until another window is wanted: a partition that has slots runs low, and memory is not full of the others' rows."""
        while not self._low():
            self.hungry.clear()
            await self.hungry.wait()

    async def take(self, partition: str, slot: int) -> Pending | None:
        """The longest turn of `partition` for `slot`, as soon as there is one and the slot is open; None when all is done."""
        while True:
            queue = self.ready[partition]
            if queue and self.slots[partition].admits(slot):
                self.waiting += 1
                if self._low():
                    self.hungry.set()
                return queue.popleft()
            if self.complete and not self.waiting and not any(self.ready.values()):
                self._wake()
                return None
            self.changed.clear()
            await self.changed.wait()

    def done(self) -> None:
        """A turn that was taken is over for good."""
        self.waiting -= 1
        if not self.waiting:
            self._wake()

    def back(self, pending: Pending) -> None:
        """Put a turn that was taken, or the next turn of its conversation, first in its queue."""
        self.waiting -= 1
        self.ready[pending.conversation.partition].appendleft(pending)
        self._wake()

    def again(self, pending: Pending, seconds: float) -> None:
        """`back` after `seconds`; the slot is free meanwhile."""
        asyncio.get_running_loop().call_later(seconds, self.back, pending)

    def opened(self) -> None:
        """Slots have been opened."""
        self._wake()

    def _low(self) -> bool:
        sizes = [len(self.ready[partition]) for partition in self.slots]
        return min(sizes) < self.low and sum(sizes) < 4 * self.low

    def _wake(self) -> None:
        self.changed.set()
