"""Stage hidden: token rows to shards of hidden states."""

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from scripts.lib.eagle3.layers import checked_boundaries, default_boundaries
from scripts.lib.engines.opening import open_engine
from scripts.lib.engines.protocol import RowStates, TargetEngine
from scripts.lib.engines.settings import EngineSettings, TargetShape
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_text, write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.provenance import code
from scripts.lib.ground.stage import Job, Result
from scripts.lib.states.budget import Budget
from scripts.lib.states.capture import batches, capture
from scripts.lib.states.checks import check_sample, defect, unlike_greedy
from scripts.lib.states.format import packed, write_shard
from scripts.lib.states.reader import read_shard
from scripts.lib.states.reuse import Earlier, write_table
from scripts.lib.states.rows import SPLITS, ShardPlan, TokenRow, digest, plan_shards
from scripts.lib.states.storing import Storing

MOST_UNLIKE = 0.05  # of greedily written tokens: servers batch and round otherwise, a shift by one leaves nearly nothing alike


@dataclass(frozen=True)
class HiddenSettings:
    """`dtype` is that of the forward pass; `layers` is auto or three boundary ids."""

    engine: str
    dtype: str
    batch_tokens: int
    tokens_per_shard: int
    layers: str | Sequence[int]
    stored: str = "bfloat16"
    compression: str = "none"

    @property
    def storing(self) -> Storing:
        """How states are written."""
        return Storing(self.stored, self.compression)

    def boundaries(self, layers: int) -> list[int]:
        """The three boundary ids in a target of `layers` layers."""
        return default_boundaries(layers) if isinstance(self.layers, str) else checked_boundaries(self.layers, layers)


@dataclass(frozen=True)
class Receipt:
    """What is known of a finished shard: a digest of the rows it was made of, and those left out, as (place, id, reason).

    Of the `greedy` positions, where the target wrote the next token as its first choice, `unlike` have another first choice now.
    `batches` holds for each row of the file the name of its batch and its number in it.
    """

    rows: str
    rejected: tuple[tuple[int, str, str], ...]
    greedy: int
    unlike: int
    batches: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`, a receipt for each into its `partial`, and knows which ones are done."""

    folder: Path
    settings: HiddenSettings
    boundaries: Sequence[int]
    engine: Callable[[], TargetEngine]
    greedy: frozenset[str]
    earlier: Earlier

    def receipt(self, plan: ShardPlan) -> Receipt | None:
        """The receipt of a shard that an earlier attempt finished, None when the shard must be made."""
        if not self._receipt_path(plan).exists():
            return None
        data = json.loads(self._receipt_path(plan).read_text())
        rows = plan.read()
        rejected = tuple((place, row, reason) for place, row, reason in data["rejected"])
        receipt = Receipt(data["rows"], rejected, data["greedy"], data["unlike"], tuple((name, member) for name, member in data["batches"]))
        lost = {place for place, _, _ in receipt.rejected}
        kept = [row.id for place, row in enumerate(rows) if place not in lost]
        path = self.folder / plan.name
        whole = not kept or (path.exists() and list(read_shard(path).ids) == kept)
        return receipt if whole and receipt.rows == digest(rows) else None

    def write(self, plan: ShardPlan) -> Receipt:
        """Make the shard: forward passes, checks, file, receipt."""
        rows = plan.read()
        states = capture(self.engine(), rows, self.boundaries, self.settings.batch_tokens, self.earlier.states)
        defects = [defect(state) for state in states]
        good = [place for place, why in enumerate(defects) if why is None]
        rejected = tuple((place, rows[place].id, why) for place, why in enumerate(defects) if why)
        greedy, unlike = self._checked([(rows[place], states[place]) for place in good])
        members = self._members(rows)
        receipt = Receipt(digest(rows), rejected, greedy, unlike, tuple(members[place] for place in good))
        if good:
            shard = packed([rows[place] for place in good], [states[place] for place in good])
            write_shard(self.folder / plan.name, shard, self.settings.storing)
        write_json(self._receipt_path(plan), asdict(receipt))
        return receipt

    def _checked(self, made: Sequence[tuple[TokenRow, RowStates]]) -> tuple[int, int]:
        """Check one row against the reference, and all that were written greedily against their tokens: those counted, those unlike."""
        if made:
            row, state = min(made, key=lambda pair: sha256_text(pair[0].id))
            check_sample(self.engine(), row, state, self.boundaries, self.settings.dtype)
        written = [(row, state) for row, state in made if row.dataset in self.greedy]
        unlike = [unlike_greedy(self.engine(), row, state) for row, state in written]
        greedy = sum(len(row.final_index) for row, _ in written)
        if sum(unlike) > MOST_UNLIKE * greedy:
            worst = written[unlike.index(max(unlike))][0]
            raise StageError(
                f"{sum(unlike)} of {greedy} tokens of greedy answers are not what the target would write now, most of them in row "
                f"{worst.id} of {worst.dataset}: states and tokens are shifted, or another target or template wrote the answers; "
                "delete responses of this dataset and run again, and report it if that does not help"
            )
        return greedy, sum(unlike)

    def _members(self, rows: Sequence[TokenRow]) -> dict[int, tuple[str, int]]:
        """Name of the batch of each of `rows`, and its number in it."""
        made: dict[int, tuple[str, int]] = {}
        for batch in batches([row.input_ids for row in rows], self.settings.batch_tokens):
            name = self.earlier.batch([rows[index] for index in batch])
            made |= {index: (name, member) for member, index in enumerate(batch)}
        return made

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
    earlier = Earlier(job.output, context(job, opening, boundaries))
    writer = ShardWriter(folder, settings, boundaries, engine, frozenset(job.settings.get("greedy", ())), earlier)
    receipts = {plan.name: receipt for plan in plans if (receipt := writer.receipt(plan))}
    missing = [plan for plan in plans if plan.name not in receipts]
    budget = Budget(folder, shape.hidden_size, shutil.disk_usage(folder).free, job.runtime.get("max_bytes"))
    budget.check(plans, missing, settings.storing)
    total = sum(plan.tokens for plan in plans)
    progress = Progress(folder, total, "tokens", done=total - sum(plan.tokens for plan in missing))
    for plan in missing:
        receipts[plan.name] = writer.write(plan)
        progress.add(plan.tokens, note=plan.name)
    quarantined = [[row, reason] for plan in plans for _, row, reason in receipts[plan.name].rejected]
    rejected.update(reason for _, reason in quarantined)
    shards = described(plans, folder)
    write_table(folder, {shard.name: receipts[shard.name].batches for shard in shards})
    check_splits(shards, rejected, job.output)
    facts = {
        "boundaries": boundaries,
        "num_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "final": "post-norm",
        "dtype": settings.dtype,
        "stored": settings.stored,
        "compression": settings.compression,
        "greedy_tokens": sum(receipt.greedy for receipt in receipts.values()),
        "unlike_greedy": sum(receipt.unlike for receipt in receipts.values()),
        "quarantined": quarantined,
    }
    manifest = Manifest("hidden", job.settings, job.input_digests(), counts(shards, rejected), shards, facts)
    rate = round((progress.done - progress.resumed_at) / progress.seconds, 1)
    return Result(manifest, cost={"tokens_per_second": rate, "reused_rows": earlier.reused})


def context(job: Job, opening: EngineSettings, boundaries: Sequence[int]) -> str:
    """Names all that decides what the engine gives for a batch: target, layers, arithmetic, device, code and versions."""
    target = job.input_digests()[str(job.input("target"))]
    versions = [metadata.version(name) for name in ("torch", "transformers")]
    parts = [target, list(boundaries), opening.engine, opening.dtype, opening.device, code("scripts/hidden.py"), versions]
    return sha256_text(canonical(parts))


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
