"""Stage `vocab`: the draft vocabulary from the training split of the mix."""

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, Result
from scripts.lib.vocabulary.counts import choose, coverage, trained_counts
from scripts.lib.vocabulary.tables import tables, write_vocabulary


def vocab(job: Job, folder: Path) -> Result:
    """Write `draft_vocab.safetensors` into `folder`. Counts are of token rows of both splits; only the train split is counted into it."""
    merged, target = job.input("merged"), job.input("target").parent
    vocabulary_size = target_vocabulary_size(target)
    shards = read_manifest(merged, "merge").shards
    counts = {split: trained_counts(shard_paths(merged.parent, shards, split), vocabulary_size) for split in ("train", "eval")}
    eos_ids = ChatTemplate.load(target).eos_ids
    chosen = choose(counts["train"], job.settings["vocab"]["size"], eos_ids)
    path = write_vocabulary(folder, tables(chosen, vocabulary_size))
    rows = sum(shard.rows for shard in shards)
    facts = {
        "size": len(chosen),
        "target_size": vocabulary_size,
        "distinct_trained": int((counts["train"] > 0).sum()),
        "eos_ids": sorted(eos_ids),
        "coverage": {split: coverage(counts[split], chosen) for split in counts},
        "trained_tokens": {split: int(counts[split].sum()) for split in counts},
    }
    return Result(Manifest(job.stage, job.settings, job.input_digests(), Counts(rows, rows), [Shard.of(path, len(chosen))], facts))


def shard_paths(folder: Path, shards: Sequence[Shard], split: str) -> list[Path]:
    """The checked data files of `split`."""
    return [checked_shard(folder, shard) for shard in shards if shard.name.startswith(f"{split}-")]


def target_vocabulary_size(folder: Path) -> int:
    """Number of ids that the target's `lm_head` has, by its config. Raises StageError when the config does not say."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not size:
        raise StageError(f"{path}: no vocab_size, neither at the top nor under text_config; rebuild the target")
    return int(size)
