"""Stage `encode`: the conversations of one dataset to token rows with loss spans."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.rows import LOST_SCHEMA, Source, TokenRow, token_frame, token_rows, write_table
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.chat.turns import Conversation, Native, served
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard, read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, Result

CONVERSATIONS_PER_SHARD = 2048  # bounds the token lists that are Python objects at one time
# kind of dataset: the stage that made its rows, the prefix of their files, the columns that order them
ORIGINS = {"prompts": ("generate", "responses-", ("id", "turn")), "native": ("prepare", "rows-", ("id",))}


@dataclass(frozen=True)
class Settings:
    """`name` and `kind` of the dataset, and the longest row in tokens."""

    name: str
    kind: str
    max_length: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Settings":
        """From the config slice of a job."""
        return cls(settings["name"], settings["kind"], settings["encode"]["max_length"])


@dataclass
class Tally:
    """What one shard, or all of them, hold; `turns` counts assistant turns read."""

    turns: int = 0
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut_rows: int = 0
    thoughts_left_out: int = 0
    lost: list[tuple[str, int, str, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the figures of another shard."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def encode(job: Job, folder: Path) -> Result:
    """Write `tokens-*.parquet` and `rejected.parquet` into `folder`, ordered by conversation id and turn.

    Counts are of assistant turns: several may share one row. Raises StageError when no turn is trained at all.
    """
    settings = Settings.of(job.settings)
    template = ChatTemplate.load(job.input("target").parent)
    files = input_files(job.input("rows"), settings.kind)
    conversations = served if settings.kind == "prompts" else Native(template).conversations
    parts = partition(files, ORIGINS[settings.kind][2])
    (folder / "partial").mkdir(exist_ok=True)
    progress = Progress(folder, len(parts), "shards")
    total, shards = Tally(), []
    for number, part in enumerate(parts):
        path = folder / f"tokens-{number:05d}.parquet"
        tally = finished(path) or write_shard(path, conversations(read_rows(files, part, ORIGINS[settings.kind][2])), settings)
        total.add(tally)
        shards += [Shard.of(path, tally.rows, tally.tokens)] if tally.rows else []
        progress.add(1, tally.tokens)
    write_table(folder / "rejected.parquet", pl.DataFrame(total.lost, schema=LOST_SCHEMA, orient="row"))
    return Result(manifest(job, template, total, shards), {"tokens_per_second": round(progress.tokens / progress.seconds, 1)})


def manifest(job: Job, template: ChatTemplate, total: Tally, shards: Sequence[Shard]) -> Manifest:
    """The stage's manifest. Raises StageError when nothing is trained: such data look healthy and teach nothing."""
    rejected = dict(sorted(Counter(reason for _, _, reason, _ in total.lost).items()))
    if not total.trained_tokens:
        first = f"; the first: {total.lost[0][2]}, {total.lost[0][3]}" if total.lost else ""
        raise StageError(
            f"{job.input('rows')}: none of {total.turns} assistant turns has a trained token (rejected: {rejected}{first}); "
            f"raise encode.max_length or look at the dataset's rows"
        )
    facts = {
        "unit": "assistant turns",
        "rows": total.rows,
        "tokens": total.tokens,
        "trained_tokens": total.trained_tokens,
        "cut_rows": total.cut_rows,
        "template": template.digest,
        "shows_reasoning": template.takes_reasoning,
        **({"answers_without_their_reasoning": total.thoughts_left_out} if total.thoughts_left_out else {}),
    }
    counts = Counts(total.turns, total.turns - len(total.lost), rejected)
    return Manifest(job.stage, job.settings, job.input_digests(), counts, shards, facts)


def input_files(path: Path, kind: str) -> list[Path]:
    """The checked data files of the manifest at `path`, in order of name."""
    stage, prefix, _ = ORIGINS[kind]
    shards = read_manifest(path, stage).shards
    return [checked_shard(path.parent, shard) for shard in sorted(shards, key=lambda shard: shard.name) if shard.name.startswith(prefix)]


def partition(files: Sequence[Path], order: Sequence[str]) -> list[pl.DataFrame]:
    """Where the rows of each output shard lie: columns `file` and `row`, whole conversations in order of id.

    Only the ordering columns are read, so that the token lists of one shard alone are in memory at a time.
    """
    frames = [
        pl.read_parquet(file, columns=list(order)).with_row_index("row").with_columns(file=pl.lit(number))
        for number, file in enumerate(files)
    ]
    if not frames:
        return []
    index = pl.concat(frames).sort(order, maintain_order=True)
    shard = (pl.col("id").rank("dense") - 1) // CONVERSATIONS_PER_SHARD
    return index.with_columns(shard=shard).partition_by("shard", maintain_order=True)


def read_rows(files: Sequence[Path], part: pl.DataFrame, order: Sequence[str]) -> pl.DataFrame:
    """The rows that `part` names, in order."""
    frames = [pl.read_parquet(files[rows["file"][0]])[rows["row"]] for rows in part.partition_by("file", maintain_order=True)]
    return pl.concat(frames).sort(order, maintain_order=True)


def finished(path: Path) -> Tally | None:
    """The figures of a shard that an earlier attempt wrote, None when it did not get that far."""
    record = record_path(path)
    return Tally(**json.loads(record.read_text())) if record.exists() else None


def record_path(path: Path) -> Path:
    """The record of the finished shard at `path`: its figures, removed before publishing."""
    return path.parent / "partial" / f"{path.name}.json"


def write_shard(path: Path, conversations: Iterable[Conversation], settings: Settings) -> Tally:
    """Write the token rows of `conversations` as the shard at `path`, then its record. A shard without rows gets no file."""
    kept: list[TokenRow] = []
    tally = Tally()
    for conversation in conversations:
        source = Source(conversation.id, settings.name, conversation.group, conversation.prompt_hash)
        found, untrained = token_rows(source, conversation.rows, settings.max_length)
        lost = sorted([*conversation.lost, *untrained], key=lambda turn: turn.turn)
        kept += found
        tally.turns += len(lost) + sum(len(row.spans) for row in found)
        tally.thoughts_left_out += conversation.thoughts_left_out
        tally.lost += [turn.row() for turn in lost]
    tally.rows = len(kept)
    tally.tokens = sum(len(row.input_ids) for row in kept)
    tally.trained_tokens = sum(row.trained_tokens for row in kept)
    tally.cut_rows = sum(row.cut for row in kept)
    if kept:
        write_table(path, token_frame(kept))
    write_json(record_path(path), asdict(tally))
    return tally
