"""The prompts of a task, without those that the drafter was trained on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.messages import Message, answerable, from_rows
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.generation.conversation import spoken
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import checked_shard, read_manifest


@dataclass(frozen=True)
class Prompt:
    """One conversation of a task: `ids` is what the target sees before its first answer, `places` where in `messages` answers belong."""

    id: str
    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    places: tuple[int, ...]
    tools: str | None = None

    @property
    def more_turns(self) -> bool:
        """Whether the task goes on after the first answer."""
        return len(self.places) > 1

    def turns(self, which: str) -> range:
        """The turns to measure, `which` being first or all."""
        return range(1 if which == "first" else len(self.places))

    def ids_after(self, answers: Sequence[Sequence[int]], template: ChatTemplate) -> list[int]:
        """What the target sees before its next answer, when its own `answers` (ids) so far stand in their places."""
        if not answers:
            return list(self.ids)
        written = {place: spoken(ids, template) for place, ids in zip(self.places, answers, strict=False)}
        history = self.messages[: self.places[len(answers)]]
        return template.prompt_ids([written.get(place, message) for place, message in enumerate(history)], self.tools)


@dataclass(frozen=True)
class Prompts:
    """The prompts to measure, and the ids of the rows that are none, by reason."""

    kept: tuple[Prompt, ...]
    rejected: Mapping[str, tuple[str, ...]]

    def first(self, count: int | None) -> "Prompts":
        """The first `count` of them, the rest rejected as `over_variants_prompts`; all when `count` is None."""
        rest = () if count is None else tuple(prompt.id for prompt in self.kept[count:])
        return Prompts(self.kept[:count], {**self.rejected, "over_variants_prompts": rest}) if rest else self


def read_prompts(prepared: Path, merged: Path, template: ChatTemplate) -> Prompts:
    """Prompts of the prepared task, in its order. StageError when none is left.

    Rejected are rows whose first user turn the training rows hold too (`in_training_data`), rows without a user turn
    (`no_user_turn`), and repeated prompts (`duplicate`): a prompt seen twice in one pass would be served from warm caches.
    """
    trained = training_hashes(merged)
    kept: dict[tuple[int, ...], Prompt] = {}
    rejected: dict[str, list[str]] = {}
    for row in prepared_rows(prepared):
        prompt = first_turn(row, template)
        if row["prompt_hash"] in trained:
            rejected.setdefault("in_training_data", []).append(row["id"])
        elif prompt is None:
            rejected.setdefault("no_user_turn", []).append(row["id"])
        elif prompt.ids in kept:
            rejected.setdefault("duplicate", []).append(row["id"])
        else:
            kept[prompt.ids] = prompt
    counts = {reason: len(ids) for reason, ids in sorted(rejected.items())}
    if not kept:
        raise StageError(
            f"{prepared}: no prompt is left to measure, rejected {counts}; choose a task whose prompts are not in the training data"
        )
    return Prompts(tuple(kept.values()), {reason: tuple(ids) for reason, ids in sorted(rejected.items())})


def first_turn(row: Mapping[str, Any], template: ChatTemplate) -> Prompt | None:
    """The prompt of the answer to the first user turn; None when no user asks anything."""
    messages = from_rows(row["messages"])
    places = tuple(answerable(messages))
    if not places:
        return None
    ids = template.prompt_ids(messages[: places[0]], row["tools"])
    return Prompt(row["id"], tuple(ids), messages, places, row["tools"])


def prepared_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of the prepared source whose manifest is at `path`."""
    for shard in read_manifest(path, "prepare").shards:
        if shard.name.startswith("rows-"):
            yield from pl.read_parquet(checked_shard(path.parent, shard)).iter_rows(named=True)


def training_hashes(path: Path) -> set[str]:
    """`prompt_hash` of every training row of the mix whose manifest is at `path`."""
    shards = [shard for shard in read_manifest(path, "merge").shards if shard.name.startswith("train-")]
    return {
        digest for shard in shards for digest in pl.read_parquet(checked_shard(path.parent, shard), columns=["prompt_hash"])["prompt_hash"]
    }
