"""How fast the engine writes: tokens a second and requests in flight, in blocks of the run."""

from dataclasses import dataclass, field

import numpy as np

from scripts.lib.watching.trend import Seen

BLOCKS = 48
FIRST_ANSWERS = 16  # answers of a block at first; doubles whenever the blocks run out
ROUGH = 0.2  # relative spread of one request's speed


@dataclass
class Block:
    """Sums over a stretch of the run: answers, their tokens, the seconds that requests were in flight for them, and its own seconds.

    `flights` is the integral of the requests in flight over its `seconds`; `done` is the share of rows done at its end; `full` says that
    rows still waited.
    """

    answers: int = 0
    tokens: int = 0
    request_seconds: float = 0.0
    flights: float = 0.0
    seconds: float = 0.0
    done: float = 0.0
    full: bool = True

    @property
    def stream(self) -> float:
        """Tokens a second of one request in flight, its waiting and lost tries included."""
        return self.tokens / max(self.request_seconds, 1e-9)

    @property
    def speed(self) -> float:
        """Tokens a second of all requests in flight: those that still run count, unlike in tokens finished by second."""
        return self.stream * self.running

    @property
    def running(self) -> float:
        """Mean requests in flight."""
        return self.flights / max(self.seconds, 1e-9)

    def plus(self, other: "Block") -> "Block":
        """Both as one block, `other` being the later one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("answers", "tokens", "request_seconds", "flights", "seconds")}
        return Block(**sums, done=other.done, full=self.full and other.full)


@dataclass
class Rates:
    """The blocks so far, and the one that is being filled."""

    size: int = FIRST_ANSWERS
    blocks: list[Block] = field(default_factory=list)
    open: Block = field(default_factory=Block)

    def add(self, tokens: int, seconds: float) -> None:
        """A request ended after `seconds` with `tokens`."""
        self.open.answers += 1
        self.open.tokens += tokens
        self.open.request_seconds += seconds

    def lost(self, seconds: float) -> None:
        """A request was in flight for `seconds` and has to go again."""
        self.open.request_seconds += seconds

    def passed(self, seconds: float, running: int, done: float, full: bool) -> None:
        """`seconds` went by with `running` requests in flight."""
        block = self.open
        block.flights += seconds * running
        block.seconds += seconds
        block.done, block.full = done, block.full and full
        if block.answers >= self.size and block.seconds > 0:
            self.blocks.append(block)
            self.open = Block()
            if len(self.blocks) >= BLOCKS:
                self.blocks = [left.plus(right) for left, right in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
                self.size *= 2

    def recent(self, answers: int) -> Block:
        """The last blocks that hold at least `answers` together, or all."""
        total = self.open
        for block in reversed(self.blocks):
            if total.answers >= answers:
                break
            total = block.plus(total)
        return total

    def seen(self) -> Seen:
        """Seconds a token of the blocks in which rows still waited: a forecast of these stays above zero, one of the speed does not."""
        blocks = [block for block in [*self.blocks, self.open] if block.full and block.answers >= 8 and block.speed > 0]
        errors = np.array([ROUGH / np.sqrt(block.answers) for block in blocks])
        return Seen(np.array([block.done for block in blocks]), np.array([1 / block.speed for block in blocks]), errors)

    def alone(self, running: float) -> tuple[float, float]:
        """Share of a step's time that fewer requests do not save, as a range, from blocks with clearly fewer in flight than `running`."""
        return step_share([block for block in self.blocks if block.answers >= 8], running)


def step_share(blocks: list[Block], running: float) -> tuple[float, float]:
    """Lowest and highest plausible share a in step(n) = step(running) * (a + (1 - a) * n / running)."""
    few = [block for block in blocks if block.running < 0.6 * running]
    many = [block for block in blocks if block.running > 0.9 * running]
    if not few or not many:
        return 0.4, 1.0
    step = float(np.mean([1 / block.stream for block in many]))
    shares = [(1 / block.stream / step - block.running / running) / (1 - block.running / running) for block in few]
    middle = float(np.clip(np.median(shares), 0.0, 1.0))
    return max(0.0, middle - 0.2), min(1.0, middle + 0.2)
