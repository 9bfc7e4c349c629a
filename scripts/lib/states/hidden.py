"""Stage hidden: token rows to shards of hidden states."""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.lib.engines.opening import once, open_engine
from scripts.lib.engines.protocol import TargetEngine
from scripts.lib.engines.settings import EngineSettings, TargetShape
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_text
from scripts.lib.ground.manifest import Counts, Manifest, read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.provenance import code
from scripts.lib.ground.stage import Job, Result
from scripts.lib.sharing.leaving import make_room
from scripts.lib.states.budget import Budget
from scripts.lib.states.capture import Batching
from scripts.lib.states.finishing import workers, written
from scripts.lib.states.marks import RECEIPTS
from scripts.lib.states.reuse import Earlier, write_table
from scripts.lib.states.rounded import rounding_device
from scripts.lib.states.rows import SPLITS, ShardPlan, plan_shards
from scripts.lib.states.served import ServedEngine, Serving
from scripts.lib.states.settings import HiddenSettings
from scripts.lib.states.writer import ShardWriter
from scripts.lib.targets.named import named

ROLLING = "rolling"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


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
        plain = once(lambda: open_engine(replace(opening, engine="transformers"), target, frozenset()))
        served = None
        if settings.engine == "sglang":
            pieces = folder / RECEIPTS / "pieces"
            served = ServedEngine(Serving.of(job.runtime, target, settings.dtype, boundaries, pieces), plain)
        engine: Callable[[], TargetEngine] = (lambda: served) if served else plain
        (folder / RECEIPTS).mkdir(exist_ok=True)
        versions = served.serving.versions() if served else {name: metadata.version(name) for name in ("torch", "transformers")}
        earlier = Earlier(job.output, context(job, opening, boundaries, versions))
        rounding = rounding_device(settings.engine, settings.storing, opening.device)
        batching = Batching(settings.together, leads=opening.device == "cpu", rounding=rounding)
        writer = ShardWriter(folder, settings, boundaries, engine, frozenset(job.settings.get("greedy", ())), earlier, batching)
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
    make_room(job.runtime["device"])
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
        for plan, receipt in written(writer, missing, workers(job.runtime["device"])):
            receipts[plan.name] = receipt
            progress.add(plan.tokens, note=plan.name)
    quarantined = [[row, reason] for plan in plans for _, row, reason in receipts[plan.name].rejected]
    rejected.update(reason for _, reason in quarantined)
    shards = [shard for plan in plans if (shard := receipts[plan.name].shard)]
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
