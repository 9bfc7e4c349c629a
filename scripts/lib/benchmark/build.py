"""Stage `benchmark`: one cell."""

import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch

from scripts.lib.benchmark.cell import cell_figures, notes
from scripts.lib.benchmark.measure import Bench, Pair, measure
from scripts.lib.benchmark.prompts import Prompts, read_prompts
from scripts.lib.benchmark.settings import Settings
from scripts.lib.chat.rows import write_table
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.eagle3.export import check_target, load_drafter
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import RECORDED_VERSIONS, Job, Result, installed
from scripts.lib.speculation.limits import Limits

log = logging.getLogger(__name__)
# What equal work repeats on any day: the rest of a cell is speed.
STEADY = ("accept_length", "ceiling", "identical", "near_tie", "different", "verify_steps", "completion_tokens")
OUTPUT_SCHEMA = pl.Schema(
    {
        "id": pl.String(),
        "plain_ids": pl.List(pl.Int64),
        "speculative_ids": pl.List(pl.Int64),
        "verdict": pl.String(),
        "first_difference": pl.Int64(),
        "gap": pl.Float64(),
    }
)


def benchmark(job: Job, folder: Path) -> Result:
    """Write `cell.json` and `outputs.parquet` into `folder`.

    Outputs that differ from the target's own do not stop the stage: they are counted, noted and logged.
    """
    torch.set_num_threads(job.runtime["threads"])
    settings = Settings.of(job.settings)
    template = ChatTemplate.load(job.input("target").parent)
    prompts = read_prompts(job.input("prepared"), job.input("merged"), template).first(settings.prompts)
    for reason, ids in prompts.rejected.items():
        log.warning("%d prompts rejected, %s: %s", len(ids), reason, ", ".join(ids[:5]) + ("…" if len(ids) > 5 else ""))
    bench = load_bench(job, settings, Limits(template.eos_ids, settings.max_tokens))
    passes = measure(bench, prompts.kept, settings.repeats, folder)
    cell = cell_figures(settings, passes)
    cell |= {"notes": notes(cell), "machine": machine(job.runtime), "versions": versions()}
    for note in cell["notes"]:
        log.warning("%s", note)
    write_json(folder / "cell.json", cell)
    write_table(folder / "outputs.parquet", outputs(passes[0]))
    return Result(manifest(job, folder, prompts, cell), {"tok_s": cell["tok_s"], "baseline_tok_s": cell["baseline_tok_s"]})


def load_bench(job: Job, settings: Settings, limits: Limits) -> Bench:
    """Target and drafter in the variant's dtype. StageError when they do not belong together."""
    read_manifest(job.input("target"), "target")
    read_manifest(job.input("drafter"), "train")
    dtype, device, folder = getattr(torch, settings.dtype), job.runtime["device"], job.input("drafter").parent
    model = load_target(job.input("target").parent, dtype, device)
    check_target(folder, model.config)
    return Bench(model, load_drafter(folder, dtype, device), settings.draft_steps, limits)


def outputs(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Both answers to every prompt and where they part."""
    rows = [
        (pair.id, list(pair.plain.ids), list(pair.chain.ids), pair.verdict.kind, pair.verdict.first_difference, pair.verdict.gap)
        for pair in pairs
    ]
    return pl.DataFrame(rows, schema=OUTPUT_SCHEMA, orient="row")


def manifest(job: Job, folder: Path, prompts: Prompts, cell: Mapping[str, Any]) -> Manifest:
    """The manifest. It lists `cell.json` by digest, because a new measurement must reach the report."""
    rejected = {reason: len(ids) for reason, ids in prompts.rejected.items()}
    kept = len(prompts.kept)
    facts = {
        **{name: cell[name] for name in STEADY},
        "turns_measured": "first",
        "prompts_with_more_turns": sum(prompt.more_turns for prompt in prompts.kept),
        "rejected_ids": {reason: list(ids) for reason, ids in prompts.rejected.items()},
    }
    shards = [Shard.of(folder / "cell.json", 1), Shard.of(folder / "outputs.parquet", kept, cell["completion_tokens"])]
    return Manifest(job.stage, job.settings, job.input_digests(), Counts(kept + sum(rejected.values()), kept, rejected), shards, facts)


def machine(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """What the speeds were measured on."""
    device = str(runtime["device"])
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {"cpu": cpu_name(), "device": device, "gpu": gpu, "threads": runtime["threads"]}


def cpu_name() -> str:
    """The processor's name as Linux shows it, its architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Versions of the packages behind the figures."""
    return {name: version for name in RECORDED_VERSIONS if (version := installed(name))}
