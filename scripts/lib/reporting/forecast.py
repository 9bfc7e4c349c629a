"""How many tokens a mix will hold, estimated from prepared rows before the target has answered any of them.

Prompts are counted by `prepare` with the target's tokenizer. Answers are estimated twice: as long as those of the source,
in the tokens per character of the dataset's prompts, and at most, with every new answer as long as its limit allows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.ground.manifest import Manifest, checked_shard
from scripts.lib.states.storing import Storing


@dataclass(frozen=True)
class Limits:
    """What bounds a row: which turns the target writes, its longest answer, the longest row."""

    turns: str | int
    max_tokens: int
    max_length: int


@dataclass(frozen=True)
class Estimate:
    """Tokens and trained tokens of rows."""

    tokens: float = 0.0
    trained: float = 0.0

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.tokens + other.tokens, self.trained + other.trained)

    def state_bytes(self, hidden_size: int, storing: Storing) -> float:
        """Bytes of the hidden states."""
        return storing.state_bytes(self.tokens, self.trained, hidden_size)


@dataclass(frozen=True)
class Forecast:
    """One dataset: rows, assistant turns that will be written or are there already, tokens of the first prompts, and the two estimates."""

    rows: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    expected: Estimate = field(default_factory=Estimate)
    at_most: Estimate = field(default_factory=Estimate)

    def __add__(self, other: "Forecast") -> "Forecast":
        return Forecast(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True)
class Sizes:
    """One row in characters: first prompt, each further stretch between answers, each answer (None where the source has none)."""

    prompt_tokens: int
    prompt: int
    between: Sequence[int]
    answers: Sequence[int | None]


def forecast(manifest: Manifest, folder: Path, limits: Limits) -> Forecast:
    """The forecast of the prepared rows in `folder`. A native row keeps its own answers, so that both estimates agree."""
    rows = list(sizes(manifest, folder, limits.turns if manifest.facts["kind"] == "prompts" else "all"))
    known = [answer for row in rows for answer in row.answers if answer is not None]
    characters = sum(row.prompt for row in rows)
    rate = sum(row.prompt_tokens for row in rows) / characters if characters else 0.0
    usual = sum(known) / len(known) * rate if known else float(limits.max_tokens)
    total = Forecast()
    for row in rows:
        expected, at_most = row_estimates(row, rate, usual, limits, manifest.facts["kind"])
        total += Forecast(1, len(row.answers), row.prompt_tokens, expected, at_most)
    return total


def row_estimates(row: Sizes, rate: float, usual: float, limits: Limits, kind: str) -> tuple[Estimate, Estimate]:
    """Expected and largest size of one row; a cut takes its end, where the last answer stands."""
    own = [usual if answer is None else answer * rate for answer in row.answers]
    longest = own if kind == "native" else [float(limits.max_tokens)] * len(own)
    expected = own if kind == "native" else [min(answer, limits.max_tokens) for answer in own]
    context = row.prompt_tokens + rate * sum(row.between)
    return cut(context, expected, limits.max_length), cut(context, longest, limits.max_length)


def cut(context: float, answers: Sequence[float], max_length: int) -> Estimate:
    """A row of `context` tokens with `answers` between and behind them, within `max_length`."""
    whole = context + sum(answers)
    share = sum(answers) / whole if whole else 0.0
    return Estimate(min(whole, max_length), min(whole, max_length) * share)


def sizes(manifest: Manifest, folder: Path, turns: str | int) -> Iterator[Sizes]:
    """The sizes of every prepared row, a file at a time."""
    for shard in manifest.shards:
        frame = pl.read_parquet(checked_shard(folder, shard), columns=["messages", "prompt_tokens"])
        for messages, prompt_tokens in frame.iter_rows():
            yield row_sizes(messages, prompt_tokens, turns)


def row_sizes(messages: Sequence[Mapping[str, Any]], prompt_tokens: int, turns: str | int) -> Sizes:
    """One row as far as the turns that count: the first answer, the first so many, all, or the last with what stands before it."""
    stretches, answers = [0], []
    for message in messages:
        text = sum(len(message[part] or "") for part in ("content", "reasoning_content", "tool_calls"))
        if message["role"] == "assistant":
            answers.append(text or None)
            stretches.append(0)
        else:
            stretches[-1] += text
    if stretches[-1] or not answers:
        answers.append(None)  # the conversation ends with a question
    prompt, *between = stretches[: len(answers)]
    count = 1 if turns == "first" else turns
    if isinstance(count, int):
        return Sizes(prompt_tokens, prompt, between[: count - 1], answers[:count])
    if turns == "last":
        return Sizes(prompt_tokens, prompt, [*between, *(answer or 0 for answer in answers[:-1])], answers[-1:])
    return Sizes(prompt_tokens, prompt, between, answers)
