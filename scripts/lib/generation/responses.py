"""The engine `transformers`: prepared rows to answers of the target, in this process."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.rows import write_table
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.engines.opening import open_engine
from scripts.lib.engines.settings import TargetShape
from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.journal import Journal
from scripts.lib.generation.publishing import RESPONSES, by_turn, publish_failed
from scripts.lib.generation.rounds import Rounds
from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard, read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, Result
from scripts.lib.sharing.leaving import make_room


def generate_in_process(job: Job, settings: GenerateSettings, folder: Path) -> Result:
    """Let the target write the turns in this process; one row out per turn, or one in `failed.parquet`.

    Raises StageError when no turn at all got an answer.
    """
    make_room(job.runtime["device"])
    target = job.input("target").parent
    template = ChatTemplate.load(target)
    conversations = read_conversations(job.input("prepared"), settings.turns)
    requested = sum(len(conversation.places) for conversation in conversations)
    journal = Journal(folder / "partial" / "answers.jsonl")
    kept = sum(map(len, journal.batches.values()))
    engine = functools.cache(lambda: open_engine(settings.opening(job.runtime), target, template.eos_ids))
    rounds = Rounds(settings, template, TargetShape.of(target).context, engine, journal, Progress(folder, requested, "turns", done=kept))
    rounds.failed += [
        {"id": conversation.id, "turn": None, "reason": "no_user_turn", "value": "no message of role user"}
        for conversation in conversations
        if not conversation.places
    ]
    rounds.run([conversation for conversation in conversations if conversation.places])
    return written(job, folder, rounds)


def read_conversations(manifest: Path, turns: str | int) -> list[Conversation]:
    """The conversations of the prepared rows behind `manifest`. Raises StageError when an id comes twice."""
    shards = [checked_shard(manifest.parent, shard) for shard in read_manifest(manifest, "prepare").shards]
    conversations = [Conversation.of(row, turns) for shard in shards for row in pl.read_parquet(shard).iter_rows(named=True)]
    twice = [name for name, times in Counter(conversation.id for conversation in conversations).items() if times > 1]
    if twice:
        raise StageError(f"{manifest.parent}: {len(twice)} row ids come more than once, first {twice[0]}; rebuild stage prepare")
    return conversations


def written(job: Job, folder: Path, rounds: Rounds) -> Result:
    """Write responses and failed turns, sorted by id and turn, and account for them."""
    failed, responses = rounds.failed, by_turn(rounds.responses)
    rejected = Counter(row["reason"] for row in failed)
    if not responses:
        remedy = "look at generate.max_tokens and the target's chat template"
        raise StageError(f"{job.output}: none of {len(failed)} turns got an answer ({dict(rejected)}); {remedy}")
    publish_failed(folder, failed)
    path = folder / "responses-00000.parquet"
    write_table(path, pl.DataFrame(responses, schema=RESPONSES, orient="row"))
    tokens = sum(len(row["output_ids"]) for row in responses)
    progress = rounds.progress
    return Result(
        Manifest(
            stage="generate",
            settings=job.settings,
            inputs=job.input_digests(),
            counts=Counts(len(failed) + len(responses), len(responses), dict(sorted(rejected.items()))),
            shards=[Shard.of(path, len(responses), tokens)],
            facts=facts(responses),
        ),
        cost={"generated_tokens": progress.tokens, "tokens_per_second": round(progress.tokens / progress.seconds, 1)},
    )


def facts(responses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens read and written, how the answers ended, and how many needed a second attempt."""
    return {
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in responses),
        "output_tokens": sum(len(row["output_ids"]) for row in responses),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in responses).items())),
        "retried": sum(row["attempts"] > 1 for row in responses),
    }
