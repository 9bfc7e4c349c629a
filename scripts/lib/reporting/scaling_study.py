"""A run's drafters at several fractions of its data: what accept length costs in samples, hours and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical
from scripts.lib.reporting.cells import Cell
from scripts.lib.reporting.published import Published, Run
from scripts.lib.reporting.scaling import Between, Growth, Point, fit

GOALS = (2.5, 3.0)
HELD_OUT = "held-out rows, simulated"
# Settings in which the drafters of one study may differ: how much they see, and what changes no weight.
FREE = ("fraction", "epochs", "eval_every", "checkpoint_every", "micro_tokens", "keep_best")


@dataclass(frozen=True)
class Rates:
    """What a trained token took in this run: seconds to write it, to make states of its row's tokens, to train it once; None unknown.

    `bytes` of hidden states and `rows` stand for one trained token. `gpu` says that the hours are of a GPU.
    """

    write_seconds: float | None
    state_seconds: float | None
    train_seconds: float | None
    bytes: float
    rows: float
    gpu: bool

    @classmethod
    def of(cls, run: Run, drafters: Sequence[Published], cells: Sequence[Cell]) -> "Rates":
        """From the manifests and costs of a run; the drafter with the most rows stands for all."""
        largest = max(drafters, key=lambda part: weights(part).tokens)
        whole = weights(largest).tokens / fraction_of(largest)
        hidden = run.one("hidden")
        shards = [shard for shard in hidden.manifest.shards if shard.name.startswith("train-")]
        written = [part.cost for part in run.parts["responses"] if not part.cost["resumed"] and part.cost.get("generated_tokens")]
        tokens, seconds = (sum(cost[name] for cost in written) for name in ("generated_tokens", "seconds"))
        states = hidden.cost.get("tokens_per_second")
        train = largest.cost.get("trained_tokens_per_second")
        return cls(
            seconds / tokens if tokens else None,
            sum(shard.tokens for shard in shards) / whole / states if states and shards else None,
            1 / train if train else None,
            sum(shard.bytes for shard in shards) / whole,
            weights(largest).rows / weights(largest).tokens,
            any(cell["machine"]["gpu"] for cell in cells),
        )

    def hours(self, tokens: float, epochs: int) -> float | None:
        """Hours for `tokens` trained tokens, written, run through the target and trained `epochs` times; None when a rate is missing."""
        if self.write_seconds is None or self.state_seconds is None or self.train_seconds is None:
            return None
        return tokens * (self.write_seconds + self.state_seconds + epochs * self.train_seconds) / 3600


@dataclass(frozen=True)
class Goal:
    """An accept length, the trained tokens that it needs (None: out of reach on this line), and what those take."""

    accept_length: float
    tokens: Between | None
    samples: float | None
    hours: float | None
    bytes: float | None


@dataclass(frozen=True)
class Series:
    """Drafters of one recipe on one task: their points, the line through them or why there is none, and the goals."""

    task: str
    draft_steps: int
    points: Sequence[Point]
    growth: Growth | None
    refused: str
    goals: Sequence[Goal]

    @property
    def name(self) -> str:
        """Task and length of chain."""
        return f"{self.task}, {self.draft_steps} drafts"


@dataclass(frozen=True)
class Study:
    """All series of a run, and its rates."""

    series: Sequence[Series]
    rates: Rates

    def json(self) -> dict[str, Any]:
        """`report/scaling.json`: what the plan of a bigger run reads."""
        return asdict(self)


def scaling_study(run: Run, cells: Sequence[Cell]) -> Study | None:
    """The study that the drafters of `run` make up; None when no two of them differ in `fraction` or `epochs` alone."""
    groups: dict[str, list[Published]] = {}
    for part in run.parts["drafters"]:
        groups.setdefault(recipe(part), []).append(part)
    studied = [group for group in groups.values() if len(group) > 1]
    if not studied:
        return None
    rates = Rates.of(run, [part for group in studied for part in group], cells)
    return Study([series for group in studied for series in all_series(group, cells, rates)], rates)


def recipe(part: Published) -> str:
    """What drafters of one study share."""
    return canonical({key: value for key, value in part.manifest.settings.get("drafter", {}).items() if key not in FREE} or part.name)


def fraction_of(part: Published) -> float:
    """The share of the training conversations that a drafter saw."""
    return float(part.manifest.settings["drafter"].get("fraction", 1.0))


def weights(part: Published) -> Any:
    """The shard of a drafter's weights, which holds its rows and the trained tokens of one epoch."""
    return next(shard for shard in part.manifest.shards if shard.name == "model.safetensors")


def all_series(group: Sequence[Published], cells: Sequence[Cell], rates: Rates) -> Iterable[Series]:
    """The series of drafters of one recipe: every task and chain that several were served with, and the held-out rows."""
    by_name = {part.name: part for part in group}
    served: dict[tuple[str, int], dict[str, Cell]] = {}
    chains = (cell for cell in cells if cell["drafter"] in by_name and cell["algorithm"] == "EAGLE3" and cell["topk"] == 1)
    for cell in sorted(chains, key=lambda cell: (cell["concurrency"], cell["variant"])):
        if cell["accept_length"] is not None:
            served.setdefault((cell["task"], cell["draft_steps"]), {}).setdefault(cell["drafter"], cell)
    for (task, steps), found in sorted(served.items()):
        if len(found) > 1:
            points = [point(by_name[name], cell["accept_length"]) for name, cell in found.items()]
            largest = max(found.values(), key=lambda cell: weights(by_name[cell["drafter"]]).tokens)
            yield one_series(task, steps, points, rates, largest["break_even_accept_length"])
    simulated = [(part, part.manifest.facts["final"]["accept_length_all"]) for part in group]
    points = [point(part, value) for part, value in simulated if value is not None]
    yield one_series(HELD_OUT, group[0].manifest.settings["drafter"]["ttt_steps"], points, rates, None)


def point(part: Published, accept_length: float) -> Point:
    """A drafter on one task."""
    return Point(part.name, weights(part).tokens, part.manifest.settings["drafter"]["epochs"], accept_length)


def one_series(task: str, steps: int, points: Sequence[Point], rates: Rates, break_even: float | None) -> Series:
    """A series with its line and goals; `break_even` of the largest drafter is one of them."""
    points = sorted(points, key=lambda one: (one.tokens, one.epochs, one.drafter))
    try:
        growth = fit(points, steps + 1)
    except StageError as error:
        return Series(task, steps, points, None, str(error), ())
    lengths = sorted({*GOALS, *([round(break_even, 2)] if break_even else [])})
    return Series(task, steps, points, growth, "", [goal(length, growth, rates) for length in lengths])


def goal(accept_length: float, growth: Growth, rates: Rates) -> Goal:
    """What `accept_length` takes with as many epochs as the largest drafter had."""
    tokens = growth.needed(accept_length, growth.most_epochs)
    if tokens is None:
        return Goal(accept_length, None, None, None, None)
    hours = rates.hours(tokens.value, growth.most_epochs)
    return Goal(accept_length, tokens, tokens.value * rates.rows, hours, tokens.value * rates.bytes)


def read_growths(study: Mapping[str, Any]) -> dict[str, Growth]:
    """The lines of a study as `Study.json` wrote it, by name."""
    found = {f"{series['task']}, {series['draft_steps']} drafts": series["growth"] for series in study["series"]}
    return {name: Growth.of(growth) for name, growth in found.items() if growth}
