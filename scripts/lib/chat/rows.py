"""Token rows: turns joined into rows, cut at the longest length, with the spans that the target generated.

Ids and turn structure decide the spans; no pattern over text does, so text that spells a role marker trains nothing.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from scripts.lib.ground.files import write_bytes

SPAN = pl.Struct({"start": pl.Int64, "end": pl.Int64})
TOKEN_SCHEMA = pl.Schema(
    {
        "id": pl.String(),
        "dataset": pl.String(),
        "group": pl.String(),
        "prompt_hash": pl.String(),
        "input_ids": pl.List(pl.Int64),
        "loss_spans": pl.List(SPAN),
    }
)
LOST_SCHEMA = pl.Schema({"id": pl.String(), "turn": pl.Int64(), "reason": pl.String(), "value": pl.String()})
MIN_SPAN = 2  # one trained position needs two generated tokens: one seen, one predicted
VALUE_LENGTH = 200


@dataclass(frozen=True)
class Turn:
    """One assistant turn: the ids that the target saw and those that it answered, its end-of-turn id included if it was there.

    `prompt_ids` int64 [P], `output_ids` int64 [O].
    """

    number: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray


@dataclass(frozen=True)
class Lost:
    """One assistant turn that trains nothing, and why."""

    id: str
    turn: int
    reason: str
    value: str

    def row(self) -> tuple[str, int, str, str]:
        """The turn as a row of `rejected.parquet`."""
        return self.id, self.turn, self.reason, self.value[:VALUE_LENGTH]


@dataclass(frozen=True)
class Source:
    """The conversation that token rows come from."""

    id: str
    dataset: str
    group: str
    prompt_hash: str


@dataclass(frozen=True)
class Span:
    """Tokens `start` up to, not including, `end` of a row: what the target generated in turn `turn`."""

    turn: int
    start: int
    end: int


@dataclass
class JoinedRow:
    """Turns of one conversation, each of whose prompts extends what came before."""

    turn: int
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    spans: list[Span] = field(default_factory=list)

    def takes(self, turn: Turn) -> bool:
        """Whether the prompt of `turn` begins with all ids so far."""
        return np.array_equal(turn.prompt_ids[: len(self.ids)], self.ids)

    def add(self, turn: Turn) -> None:
        """Append what `turn` adds to the row."""
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
        self.ids = np.concatenate([turn.prompt_ids, turn.output_ids])
        self.spans.append(Span(turn.number, start, end))


@dataclass(frozen=True)
class TokenRow:
    """One row of a `tokens-*.parquet`; `cut` says that it was longer than allowed."""

    source: Source
    turn: int
    input_ids: np.ndarray  # int64 [N]
    spans: Sequence[Span]
    cut: bool

    @property
    def id(self) -> str:
        """The conversation's id; a row that starts at a later turn adds the turn."""
        return self.source.id if self.turn == 0 else f"{self.source.id}#{self.turn}"

    @property
    def trained_tokens(self) -> int:
        """Tokens inside loss spans."""
        return sum(span.end - span.start for span in self.spans)


def join(turns: Iterable[Turn]) -> Iterator[JoinedRow]:
    """Rows of the turns of one conversation, in order: a turn whose prompt does not extend the row so far starts a new one."""
    row: JoinedRow | None = None
    for turn in turns:
        if row is None or not row.takes(turn):
            if row is not None:
                yield row
            row = JoinedRow(turn.number)
        row.add(turn)
    if row is not None:
        yield row


def cut(source: Source, row: JoinedRow, max_length: int) -> tuple[TokenRow | None, list[Lost]]:
    """`row` within `max_length` tokens, ending with its last trained span, and the turns that lost all their trained positions.

    None stands for a row without any.
    """
    spans, lost = [], []
    for span in row.spans:
        end = min(span.end, max_length)
        if end - span.start >= MIN_SPAN:
            spans.append(Span(span.turn, span.start, end))
        else:
            value = f"tokens {span.start} to {span.end}, max_length {max_length}"
            lost.append(Lost(source.id, span.turn, "no_trained_position", value))
    if not spans:
        return None, lost
    return TokenRow(source, row.turn, row.ids[: spans[-1].end], spans, cut=len(row.ids) > max_length), lost


def token_rows(source: Source, rows: Iterable[JoinedRow], max_length: int) -> tuple[list[TokenRow], list[Lost]]:
    """All token rows of one conversation and the turns that are in none of them."""
    pairs = [cut(source, row, max_length) for row in rows]
    return [row for row, _ in pairs if row is not None], [turn for _, lost in pairs for turn in lost]


def token_frame(rows: Sequence[TokenRow]) -> pl.DataFrame:
    """`rows` as the table that `tokens-*.parquet` holds."""
    columns = {
        "id": [row.id for row in rows],
        "dataset": [row.source.dataset for row in rows],
        "group": [row.source.group for row in rows],
        "prompt_hash": [row.source.prompt_hash for row in rows],
        "input_ids": pl.Series([row.input_ids for row in rows]).cast(pl.List(pl.Int64)),
        "loss_spans": [[{"start": span.start, "end": span.end} for span in row.spans] for row in rows],
    }
    return pl.DataFrame(columns, schema=TOKEN_SCHEMA)


def write_table(path: Path, frame: pl.DataFrame) -> None:
    """Write `frame` as Parquet, the whole file or nothing."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd")
    write_bytes(path, buffer.getvalue())
