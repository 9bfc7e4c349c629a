"""Kept answers to the published tables, a bounded number of tokens in memory at a time."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.messages import Message
from scripts.lib.chat.rows import write_table
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.generation.conversation import spoken
from scripts.lib.generation.segments import Segments
from scripts.lib.ground.manifest import Shard

TOKENS_PER_SHARD = 4_000_000
Schema = dict[str, type[pl.DataType] | pl.DataType]
RESPONSES: Schema = {
    "id": pl.String,
    "turn": pl.Int64,
    "group": pl.String,
    "prompt_hash": pl.String,
    "prompt_ids": pl.List(pl.Int64),
    "output_ids": pl.List(pl.Int64),
    "finish_reason": pl.String,
    "text": pl.String,
    "reasoning": pl.String,
    "attempts": pl.Int64,
}
SERVED: Schema = RESPONSES | {"tool_calls": pl.String, "retokenised": pl.Boolean, "max_tokens": pl.Int64, "seed": pl.Int64}
FAILED: Schema = {"id": pl.String, "turn": pl.Int64, "reason": pl.String, "value": pl.String}


@dataclass
class Written:
    """The published shards and what they hold."""

    shards: list[Shard] = field(default_factory=list)
    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    retokenised: int = 0

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count `rows`."""
        self.rows += len(rows)
        self.prompt_tokens += sum(len(row["prompt_ids"]) for row in rows)
        self.output_tokens += sum(len(row["output_ids"]) for row in rows)
        self.finish_reasons.update(row["finish_reason"] for row in rows)
        self.retried += sum(row["attempts"] > 1 for row in rows)
        self.retokenised += sum(row["retokenised"] for row in rows)

    def facts(self) -> dict[str, Any]:
        """Tokens read and written, how the answers ended, how many needed a second attempt or have ids that are not the server's own."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "retried": self.retried,
            "retokenised": self.retokenised,
        }


def publish_answers(folder: Path, segments: Segments, template: ChatTemplate, truncated: str) -> Written:
    """Write `responses-*.parquet` into `folder`, sorted by id and turn; cut answers stay out where `truncated` is drop."""
    written = Written()
    for number, part in enumerate(parts(segments.index())):
        kept = (record for record in segments.read(part) if truncated == "keep" or record["finish_reason"] != "length")
        rows = [row_of(record, template) for record in kept]
        if rows:
            path = folder / f"responses-{number:05d}.parquet"
            columns = {name: [row[name] for row in rows] for name in SERVED}
            write_table(path, pl.DataFrame(columns, schema=SERVED))
            written.add(rows)
            written.shards.append(Shard.of(path, len(rows), sum(len(row["output_ids"]) for row in rows)))
    return written


def row_of(record: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """The response row of a kept record."""
    said = message_of(record, template)
    text = {"text": said.content or "", "reasoning": said.reasoning_content, "tool_calls": said.tool_calls}
    return {**record, **text, "retokenised": record["message"] is not None}


def message_of(record: Mapping[str, Any], template: ChatTemplate) -> Message:
    """The message that a kept record holds: as it came, or in its ids."""
    message = record["message"]
    if message is None:
        return spoken(record["output_ids"], template)
    return message if isinstance(message, Message) else Message(**message)


def publish_failed(folder: Path, failed: Sequence[Mapping[str, Any]]) -> None:
    """Write `failed.parquet`, by turn."""
    write_table(folder / "failed.parquet", pl.DataFrame(by_turn(failed), schema=FAILED, orient="row"))


def by_turn(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`rows` sorted by id and turn; a row without a turn first."""
    return sorted(rows, key=lambda row: (row["id"], -1 if row["turn"] is None else row["turn"]))


def parts(index: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """`index` in its order, cut where TOKENS_PER_SHARD tokens are reached."""
    shard = (pl.col("tokens").cum_sum() - pl.col("tokens")) // TOKENS_PER_SHARD
    yield from index.with_columns(shard=shard).partition_by("shard", maintain_order=True)
