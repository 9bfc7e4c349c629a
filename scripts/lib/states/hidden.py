"""Stage hidden: token rows to shards of hidden states."""

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.eagle3.layers import checked_boundaries, default_boundaries
from scripts.lib.engines.opening import EngineSettings, TargetShape, open_engine
from scripts.lib.engines.protocol import TargetEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, Result
from scripts.lib.states.capture import capture, check_sample, defect
from scripts.lib.states.format import packed, write_shard
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import SPLITS, ShardPlan, digest, plan_shards


@dataclass(frozen=True)
class HiddenSettings:
    """`dtype` is that of the forward pass; `layers` is auto or three boundary ids."""

    engine: str
    dtype: str
    batch_tokens: int
    tokens_per_shard: int
    layers: str | Sequence[int]

    def boundaries(self, layers: int) -> list[int]:
        """The three boundary ids in a target of `layers` layers."""
        return default_boundaries(layers) if isinstance(self.layers, str) else checked_boundaries(self.layers, layers)


@dataclass(frozen=True)
class Receipt:
    """What is known of a finished shard: a digest of the rows it was made of, and those left out, as (place, id, reason)."""

    rows: str
    rejected: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`, a receipt for each into its `partial`, and knows which ones are done."""

    folder: Path
    settings: HiddenSettings
    boundaries: Sequence[int]
    engine: Callable[[], TargetEngine]

    def receipt(self, plan: ShardPlan) -> Receipt | None:
        """The receipt of a shard that an earlier attempt finished, None when the shard must be made."""
        if not self._receipt_path(plan).exists():
            return None
        data = json.loads(self._receipt_path(plan).read_text())
        rows = plan.read()
        receipt = Receipt(data["rows"], tuple((place, row, reason) for place, row, reason in data["rejected"]))
        lost = {place for place, _, _ in receipt.rejected}
        kept = [row.id for place, row in enumerate(rows) if place not in lost]
        path = self.folder / plan.name
        whole = not kept or (path.exists() and list(read_shard(path).ids) == kept)
        return receipt if whole and receipt.rows == digest(rows) else None

    def write(self, plan: ShardPlan) -> Receipt:
        """Make the shard: forward passes, checks, file, receipt."""
        rows = plan.read()
        states = capture(self.engine(), rows, self.boundaries, self.settings.batch_tokens)
        defects = [defect(state) for state in states]
        good = [place for place, why in enumerate(defects) if why is None]
        if good:
            sample = sorted(good, key=lambda place: (len(rows[place].input_ids), place))[len(good) // 2]
            check_sample(self.engine(), rows[sample], states[sample].argmax, self.boundaries, self.settings.dtype)
            write_shard(self.folder / plan.name, packed([rows[place] for place in good], [states[place] for place in good]))
        receipt = Receipt(digest(rows), tuple((place, rows[place].id, why) for place, why in enumerate(defects) if why))
        write_json(self._receipt_path(plan), {"rows": receipt.rows, "rejected": receipt.rejected})
        return receipt

    def _receipt_path(self, plan: ShardPlan) -> Path:
        return self.folder / "partial" / f"{plan.name}.json"


def hidden(job: Job, folder: Path) -> Result:
    """Write `train-*.safetensors` and `eval-*.safetensors` with the states of the merged rows, in their order.

    Raises StageError when the disk has no room for them, no row is left, or the engine fails a check.
    """
    settings = HiddenSettings(**job.settings["hidden"])
    target = job.input("target").parent
    shape = TargetShape.of(target)
    boundaries = settings.boundaries(shape.layers)
    plans, rejected = plan_shards(job.input("merged"), settings.tokens_per_shard, shape.context)
    opening = EngineSettings(settings.engine, settings.dtype, job.runtime["device"], job.runtime["threads"])
    engine = functools.cache(lambda: open_engine(opening, target, frozenset()))
    (folder / "partial").mkdir(exist_ok=True)
    writer = ShardWriter(folder, settings, boundaries, engine)
    receipts = {plan.name: receipt for plan in plans if (receipt := writer.receipt(plan))}
    missing = [plan for plan in plans if plan.name not in receipts]
    check_space(folder, sum(plan.bytes(shape.hidden_size) for plan in missing))
    total = sum(plan.tokens for plan in plans)
    progress = Progress(folder, total, "tokens", done=total - sum(plan.tokens for plan in missing))
    for plan in missing:
        receipts[plan.name] = writer.write(plan)
        progress.add(plan.tokens, note=plan.name)
    quarantined = [[row, reason] for plan in plans for _, row, reason in receipts[plan.name].rejected]
    rejected.update(reason for _, reason in quarantined)
    shards = described(plans, folder)
    check_splits(shards, rejected, job.output)
    facts = {
        "boundaries": boundaries,
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "final": "post-norm",
        "dtype": settings.dtype,
        "quarantined": quarantined,
    }
    manifest = Manifest("hidden", job.settings, job.input_digests(), counts(shards, rejected), shards, facts)
    return Result(manifest, cost={"tokens_per_second": round((progress.done - progress.resumed_at) / progress.seconds, 1)})


def check_space(folder: Path, need: int) -> None:
    """Raise StageError when the file system of `folder` has less than `need` bytes left."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StageError(
            f"{folder}: the missing shards need {need:,} bytes, {free:,} are free; "
            "free some space, or take fewer samples or a shorter encode.max_length, then start again: finished shards are kept"
        )


def counts(shards: Sequence[Shard], rejected: Mapping[str, int]) -> Counts:
    """Rows in, out and rejected."""
    rows = sum(shard.rows for shard in shards)
    return Counts(rows + sum(rejected.values()), rows, dict(sorted(rejected.items())))


def check_splits(shards: Sequence[Shard], rejected: Mapping[str, int], output: Path) -> None:
    """Raise StageError when a split has no row left."""
    for split in SPLITS:
        if not any(shard.name.startswith(f"{split}-") for shard in shards):
            raise StageError(
                f"{output}: no row of split {split} has usable states, rejected: {dict(rejected)}; look at hidden.dtype and the target"
            )


def described(plans: Sequence[ShardPlan], folder: Path) -> list[Shard]:
    """The finished shards; a shard that lost all its rows has no file."""
    shards = []
    for plan in plans:
        path = folder / plan.name
        if path.exists():
            shard = read_shard(path)
            shards.append(Shard.of(path, len(shard.ids), shard.tokens))
    return shards
