"""Stage hidden: token rows to shards of hidden states."""

import contextlib
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.lib.engines.opening import open_engine
from scripts.lib.engines.protocol import RowStates, StateRequest, TargetEngine
from scripts.lib.engines.settings import EngineSettings, TargetShape
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_text, write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.provenance import code
from scripts.lib.ground.stage import Job, Result
from scripts.lib.states.budget import Budget
from scripts.lib.states.capture import batches, capture
from scripts.lib.states.checks import check_sample, defect, unlike_greedy
from scripts.lib.states.format import packed, write_shard
from scripts.lib.states.marks import RECEIPTS, receipt_path
from scripts.lib.states.reader import read_shard
from scripts.lib.states.reuse import Earlier, write_table
from scripts.lib.states.rows import SPLITS, ShardPlan, TokenRow, digest, plan_shards
from scripts.lib.states.served import ServedEngine, Serving
from scripts.lib.states.settings import HiddenSettings
from scripts.lib.targets.named import named

MOST_UNLIKE = 0.05  # of greedily written tokens: servers batch and round otherwise, a shift by one leaves nearly nothing alike
ROLLING = "rolling"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


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
        if not receipt_path(self.folder, plan.name).exists():
            return None
        data = json.loads(receipt_path(self.folder, plan.name).read_text())
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
        states = capture(self.engine(), rows, self.boundaries, self.settings.together, self.earlier.states)
        defects = [defect(state) for state in states]
        good = [place for place, why in enumerate(defects) if why is None]
        rejected = tuple((place, rows[place].id, why) for place, why in enumerate(defects) if why)
        greedy, unlike = self._checked([(rows[place], states[place]) for place in good])
        members = self._members(rows)
        receipt = Receipt(digest(rows), rejected, greedy, unlike, tuple(members[place] for place in good))
        if good:
            shard = packed([rows[place] for place in good], [states[place] for place in good])
            write_shard(self.folder / plan.name, shard, self.settings.storing)
        write_json(receipt_path(self.folder, plan.name), asdict(receipt))
        return receipt

    def _checked(self, made: Sequence[tuple[TokenRow, RowStates]]) -> tuple[int, int]:
        """Check one row against the reference, and all that were written greedily against their tokens: those counted, those unlike."""
        if made:
            row, state = min(made, key=lambda pair: sha256_text(pair[0].id))
            check_sample(self.engine(), row, state, self.boundaries, self.settings.noise)
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

    def coming(self, plan: ShardPlan) -> Iterator[StateRequest]:
        """What the engine will be asked for when `plan` is written, in this order."""
        rows = plan.read()
        for batch in batches([row.input_ids for row in rows], self.settings.together):
            members = [rows[index] for index in batch]
            if not self.earlier.knows(members):
                yield from (StateRequest(row.input_ids, row.final_index) for row in members)

    def _members(self, rows: Sequence[TokenRow]) -> dict[int, tuple[str, int]]:
        """Name of the batch of each of `rows`, and its number in it."""
        made: dict[int, tuple[str, int]] = {}
        for batch in batches([row.input_ids for row in rows], self.settings.together):
            name = self.earlier.batch([rows[index] for index in batch])
            made |= {index: (name, member) for member, index in enumerate(batch)}
        return made


@dataclass(frozen=True)
class Dump:
    """What a job is to dump: its shards, the rows that get none by reason, and who writes them."""

    settings: HiddenSettings
    shape: TargetShape
    plans: Sequence[ShardPlan]
    rejected: Counter[str]
    writer: ShardWriter
    served: ServedEngine | None
    versions: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, folder: Path) -> "Dump":
        """The dump that `job` asks for, into `folder`. The engine is opened when the first state is missing."""
        settings = HiddenSettings(**job.settings["hidden"])
        target = job.input("target").parent
        shape = TargetShape.of(target)
        boundaries = settings.boundaries(shape.layers)
        plans, rejected = plan_shards(job.input("merged"), settings.tokens_per_shard, shape.context)
        opening = EngineSettings(
            settings.engine, settings.dtype, job.runtime["device"], job.runtime["threads"], device_map=job.runtime.get("device_map")
        )
        plain = functools.cache(lambda: open_engine(replace(opening, engine="transformers"), target, frozenset()))
        served = None
        if settings.engine == "sglang":
            pieces = folder / RECEIPTS / "pieces"
            served = ServedEngine(Serving.of(job.runtime, target, settings.dtype, boundaries, pieces), plain)
        engine: Callable[[], TargetEngine] = (lambda: served) if served else plain
        (folder / RECEIPTS).mkdir(exist_ok=True)
        versions = served.serving.versions() if served else {name: metadata.version(name) for name in ("torch", "transformers")}
        earlier = Earlier(job.output, context(job, opening, boundaries, versions))
        writer = ShardWriter(folder, settings, boundaries, engine, frozenset(job.settings.get("greedy", ())), earlier)
        return cls(settings, shape, plans, rejected, writer, served, versions)

    def announce(self, plans: Iterable[ShardPlan]) -> None:
        """Let a server begin with `plans`, which will be written in this order."""
        if self.served:
            self.served.announce(row for plan in plans for row in self.writer.coming(plan))

    @contextlib.contextmanager
    def serving(self, plans: Iterable[ShardPlan]) -> Iterator[None]:
        """Announce `plans`, which the block writes; a server ends with the block."""
        self.announce(plans)
        try:
            yield
        finally:
            if self.served:
                self.served.close()

    @property
    def kept(self) -> list[ShardPlan]:
        """The shards that this job writes: the rolling mode leaves those to train on to the training."""
        return [plan for plan in self.plans if not (self.settings.mode == ROLLING and plan.name.startswith("train-"))]

    @property
    def rolled(self) -> list[ShardPlan]:
        """The shards that come and go while a drafter is trained."""
        return [plan for plan in self.plans if plan not in self.kept]


def hidden(job: Job, folder: Path) -> Result:
    """Write `train-*.safetensors` and `eval-*.safetensors` with the states of the merged rows, in their order.

    In the rolling mode only those of held-out rows: the manifest plans the others. Raises StageError when the disk has no room for
    them, no row is left, or the engine fails a check.
    """
    dump = Dump.of(job, folder)
    plans, writer, rejected = dump.kept, dump.writer, dump.rejected
    receipts = {plan.name: receipt for plan in plans if (receipt := writer.receipt(plan))}
    missing = [plan for plan in plans if plan.name not in receipts]
    budget = Budget(folder, dump.shape.hidden_size, shutil.disk_usage(folder).free, job.runtime.get("max_bytes"))
    budget.check(plans, missing, dump.settings.storing)
    if dump.rolled:
        budget.check_rolling(plans, dump.rolled, dump.settings.storing)
    total = sum(plan.tokens for plan in plans)
    progress = Progress(folder, total, "tokens", done=total - sum(plan.tokens for plan in missing))
    with dump.serving(missing):
        for plan in missing:
            receipts[plan.name] = writer.write(plan)
            progress.add(plan.tokens, note=plan.name)
    quarantined = [[row, reason] for plan in plans for _, row, reason in receipts[plan.name].rejected]
    rejected.update(reason for _, reason in quarantined)
    shards = described(plans, folder)
    write_table(folder, {shard.name: receipts[shard.name].batches for shard in shards})
    check_splits([shard.name for shard in shards] + [plan.name for plan in dump.rolled], rejected, job.output)
    found = {
        "greedy_tokens": sum(receipt.greedy for receipt in receipts.values()),
        "unlike_greedy": sum(receipt.unlike for receipt in receipts.values()),
        "quarantined": quarantined,
    }
    rows = sum(shard.rows for shard in shards) + sum(plan.kept for plan in dump.rolled)
    counts = Counts(rows + sum(rejected.values()), rows, dict(sorted(rejected.items())))
    manifest = Manifest("hidden", job.settings, job.input_digests(), counts, shards, facts(job, dump) | found)
    rate = round((progress.done - progress.resumed_at) / progress.seconds, 1)
    return Result(manifest, cost={"tokens_per_second": rate, "reused_rows": writer.earlier.reused})


def facts(job: Job, dump: Dump) -> dict[str, Any]:
    """What all states are: layers, arithmetic, storing, and the target that they are of.

    Of shards that a training dumps the code is named too, since it alone ties the drafter to how its states were made.
    """
    settings, target = dump.settings, read_manifest(job.input("target"), "target")
    known = named(target) | {f"{shard.name}_sha256": shard.sha256 for shard in target.shards if shard.name in TOKENIZER_FILES}
    result: dict[str, Any] = {
        "boundaries": list(dump.writer.boundaries),
        "num_layers": dump.shape.layers,
        "hidden_size": dump.shape.hidden_size,
        "final": "post-norm",
        "engine": settings.engine,
        "versions": dict(dump.versions),
        "dtype": settings.dtype,
        "stored": settings.stored,
        "compression": settings.compression,
        "target": known,
        "mode": settings.mode,
    }
    if dump.rolled:
        sums = {name: sum(getattr(plan, name) for plan in dump.rolled) for name in ("kept", "tokens", "teachers")}
        result["rolled"] = {"shards": len(dump.rolled), "code": sha256_text(canonical(code("scripts/dump.py"))), **sums}
    return result


def context(job: Job, opening: EngineSettings, boundaries: Sequence[int], versions: Mapping[str, str]) -> str:
    """Names all that decides what the engine gives for a batch: target, layers, arithmetic, device, code and versions."""
    target = job.input_digests()[str(job.input("target"))]
    parts = [target, list(boundaries), opening.engine, opening.dtype, opening.device, code("scripts/hidden.py"), list(versions.values())]
    return sha256_text(canonical(parts))


def check_splits(names: Sequence[str], rejected: Mapping[str, int], output: Path) -> None:
    """Raise StageError when no shard of a split is among those called `names`."""
    for split in SPLITS:
        if not any(name.startswith(f"{split}-") for name in names):
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
