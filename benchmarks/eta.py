"""How well the end of a run is foretold, by share done: recorded or simulated runs replayed through the observer.

python -m benchmarks.eta [--record FILE.jsonl ...]
A record is a line `{"start": s, "end": s, "tokens": n, "finish_reason": "stop"}` per turn, and `slots`, `max_tokens` in the first line.
"""

import argparse
import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.lib.watching.observed import Observed, Plan

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97)
SHAREGPT = Path(__file__).with_name("sharegpt-lengths.json")
KEEP_APART = 1e-6  # seconds between events of the same moment


@dataclass(frozen=True)
class Turn:
    """One turn of a run: seconds when it went out and came back, tokens, how it ended, and its group."""

    start: float
    end: float
    tokens: int
    finish_reason: str = "stop"
    group: int = 0


@dataclass(frozen=True)
class Recorded:
    """A whole run; `done` turns were finished by an earlier attempt, with the lengths `before`."""

    name: str
    turns: Sequence[Turn]
    slots: int
    max_tokens: int
    before: Sequence[Turn] = field(default_factory=list)

    @property
    def end(self) -> float:
        """Seconds when the last answer came."""
        return max(turn.end for turn in self.turns)


@dataclass(frozen=True)
class Shape:
    """Rows, slots, cap in tokens; seconds of a step with n in flight: step * (fixed + (1 - fixed) * n / slots), growing with `slower`."""

    rows: int = 6000
    slots: int = 64
    max_tokens: int = 4096
    step: float = 0.02
    fixed: float = 0.6
    slower: float = 0.0


def simulate(lengths: Sequence[int], shape: Shape, random: np.random.Generator, groups: Sequence[int] = ()) -> list[Turn]:
    """A run of answers of the `lengths` in their order, all requests in flight advancing together; lengths above the cap are cut."""
    flying: list[tuple[float, int]] = []
    begun, turns = {}, []
    clock = seconds = noise = 0.0
    waiting = iter(range(len(lengths)))
    ended = 0
    for row in waiting:
        heapq.heappush(flying, (clock + min(lengths[row], shape.max_tokens), row))
        begun[row] = seconds
        if len(flying) == shape.slots:
            break
    while flying:
        end, row = heapq.heappop(flying)
        noise = 0.98 * noise + 0.02 * random.standard_normal()
        share = shape.fixed + (1 - shape.fixed) * (len(flying) + 1) / shape.slots
        seconds += (end - clock) * shape.step * share * (1 + shape.slower * ended / len(lengths)) * np.exp(noise)
        clock, ended = end, ended + 1
        cut = lengths[row] > shape.max_tokens
        group = groups[row] if groups else 0
        turns.append(Turn(begun[row], seconds, min(lengths[row], shape.max_tokens), "length" if cut else "stop", group))
        following = next(waiting, None)
        if following is not None:
            heapq.heappush(flying, (clock + min(lengths[following], shape.max_tokens), following))
            begun[following] = seconds
    return turns


def lognormal(rows: int, mean: np.ndarray | float, spread: float, random: np.random.Generator) -> np.ndarray:
    """Lengths of `rows` answers around `mean` tokens."""
    return np.maximum(np.round(mean * np.exp(spread * random.standard_normal(rows) - spread**2 / 2)), 1).astype(int)


def growing(seed: int) -> Recorded:
    """Mean length from 217 tokens to more than five times that, as in a real run, while the speed falls."""
    random, shape = np.random.default_rng(seed), Shape(rows=12000, slower=0.3)
    lengths = lognormal(shape.rows, np.linspace(217, 1350, shape.rows), 0.9, random)
    return Recorded("growing lengths", simulate(lengths.tolist(), shape, random), shape.slots, shape.max_tokens)


def steady(seed: int) -> Recorded:
    """Real answer lengths of ShareGPT in any order."""
    random, shape = np.random.default_rng(seed), Shape()
    answers = np.array([length for row in json.loads(SHAREGPT.read_text()) for length in row[1::2]])
    lengths = random.choice(answers, shape.rows)
    return Recorded("steady", simulate(lengths.tolist(), shape, random), shape.slots, shape.max_tokens)


def longest_first(seed: int) -> Recorded:
    """Windows of 2,048 rows, in each those first that are expected to be long; the expectation is known as the rows' group."""
    random, shape = np.random.default_rng(seed), Shape(rows=8192)
    lengths = lognormal(shape.rows, 400, 0.9, random)
    expected = lengths * np.exp(0.6 * random.standard_normal(shape.rows))
    kinds = np.array([int(value).bit_length() for value in expected])
    order = np.concatenate([part[np.argsort(-kinds[part], kind="stable")] for part in np.split(np.arange(shape.rows), 4)])
    groups = kinds[order].tolist()
    return Recorded("longest first", simulate(lengths[order].tolist(), shape, random, groups), shape.slots, shape.max_tokens)


def heavy_tail(seed: int) -> Recorded:
    """One answer in twelve never ends and is cut at max_tokens, the rest are short; few rows for the slots."""
    random, shape = np.random.default_rng(seed), Shape(rows=1500, slots=96, max_tokens=8192)
    lengths = lognormal(shape.rows, 350, 1.2, random)
    lengths[random.random(shape.rows) < 1 / 12] = 10**6
    return Recorded("heavy tail, cut", simulate(lengths.tolist(), shape, random), shape.slots, shape.max_tokens)


def overload(seed: int) -> Recorded:
    """The speed falls to less than half, the lengths do not change."""
    random, shape = np.random.default_rng(seed), Shape(slower=1.4)
    return Recorded("overload", simulate(lognormal(shape.rows, 500, 0.8, random).tolist(), shape, random), shape.slots, shape.max_tokens)


def resumed(seed: int) -> Recorded:
    """Growing lengths, killed after 40 % and started again, with the lengths so far."""
    run = growing(seed)
    half = int(0.4 * len(run.turns))
    by_end = sorted(run.turns, key=lambda turn: turn.end)
    before, after = by_end[:half], sorted(by_end[half:], key=lambda turn: turn.start)
    random = np.random.default_rng(seed)
    turns = simulate([turn.tokens for turn in after], Shape(slower=0.2, step=0.024), random)
    return Recorded("resumed", turns, run.slots, run.max_tokens, before)


RUNS: tuple[Callable[[int], Recorded], ...] = (
    steady, growing, longest_first, heavy_tail, overload, resumed,
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What was foretold at a share of the turns done: seconds left in truth, by the naive estimate, and by the interval."""

    share: float
    left: float
    naive: float
    low: float
    middle: float
    high: float
    milliseconds: float

    @property
    def inside(self) -> bool:
        """Whether the true end lies in the interval."""
        return self.low <= self.left <= self.high

    @property
    def line(self) -> str:
        """As a line of the table."""
        wrong, ours = self.naive / self.left - 1, self.middle / self.left - 1
        span, inside = f"{self.low:,.0f} to {self.high:,.0f}", "yes" if self.inside else "NO"
        return f"{self.share:6.0%}{self.left:9,.0f}{wrong:+8.0%}{ours:+8.0%}  {span:>20} {self.width:6.0%}  {inside}"

    @property
    def width(self) -> float:
        """Of the interval, relative to its middle."""
        return (self.high - self.low) / self.middle


def replay(run: Recorded, shares: Sequence[float] = SHARES) -> Iterator[Look]:
    """Let an observer hear the run, and look at each of `shares` of all turns done."""
    now = [0.0]
    groups = Counter(turn.group for turn in [*run.turns, *run.before])
    plan = Plan(dict(groups), len(run.before), run.max_tokens, run.slots)
    observed = Observed(plan, earlier(plan, run), clock=lambda: now[0])
    events = sorted([(turn.start, 1, i) for i, turn in enumerate(run.turns)] + [(turn.end, 0, i) for i, turn in enumerate(run.turns)])
    looks = [round(share * plan.total) for share in shares if round(share * plan.total) > len(run.before)]
    for seconds, starts, i in events:
        now[0], turn = seconds, run.turns[i]
        if starts:
            observed.on_start(str(i), turn.group)
            continue
        observed.on_done(str(i), turn.tokens, turn.finish_reason, turn.end - turn.start)
        if looks and observed.done == looks[0]:
            looks.pop(0)
            yield look(observed, run.end - seconds)


def earlier(plan: Plan, run: Recorded) -> dict[str, Any] | None:
    """The state that the earlier attempt left behind."""
    if not run.before:
        return None
    observed = Observed(Plan(plan.turns, 0, plan.max_tokens, plan.slots), clock=lambda: 0.0)
    for i, turn in enumerate(sorted(run.before, key=lambda turn: turn.start)):
        observed.on_start(str(i), turn.group)
        observed.on_done(str(i), turn.tokens, turn.finish_reason, turn.end - turn.start)
    return observed.state()


def look(observed: Observed, left: float) -> Look:
    """The forecast as it is now."""
    start = time.process_time()
    found = observed.estimate()
    milliseconds = 1000 * (time.process_time() - start)
    low, middle, high = (found.low, found.middle, found.high) if found else (0.0, float("inf"), float("inf"))
    return Look(observed.done / observed.plan.total, left, observed.naive(), low, middle, high, milliseconds)


def recorded(path: Path) -> Recorded:
    """The run in a JSON lines file."""
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Recorded(path.stem, [Turn(**line) for line in lines], head["slots"], head["max_tokens"])


def main() -> None:
    """Print a table of every run; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    runs = [recorded(path) for path in options.record] or [make(seed) for make in RUNS for seed in range(options.seeds)]
    print(f"{'run':32}{'done':>6}{'left s':>9}{'naive':>8}{'ours':>8}  {'interval':>20} {'width':>6}  inside")
    late: list[Look] = []
    for run in runs:
        for seen in replay(run):
            late += [seen] if seen.share >= 0.099 else []
            print(f"{run.name:32}{seen.line}")
    at_half = [seen.width for seen in late if abs(seen.share - 0.5) < 0.01]
    figures = {
        "looks_from_10_percent": len(late),
        "inside": int(sum(seen.inside for seen in late)),
        "median_width_at_50_percent": round(float(np.median(at_half)), 3),
        "widest_at_50_percent": round(max(at_half), 3),
        "median_error": round(float(np.median([abs(seen.middle / seen.left - 1) for seen in late])), 3),
        "median_error_naive": round(float(np.median([abs(seen.naive / seen.left - 1) for seen in late])), 3),
        "milliseconds": round(float(np.median([seen.milliseconds for seen in late])), 1),
        "milliseconds_most": round(max(seen.milliseconds for seen in late), 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
