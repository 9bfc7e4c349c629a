"""Stage `benchmark`: one cell."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.benchmark.answers import Measured, Pair
from scripts.lib.benchmark.cell import cell_figures, notes
from scripts.lib.benchmark.machine import machine, versions
from scripts.lib.benchmark.prompts import Prompt, Prompts, read_prompts
from scripts.lib.benchmark.settings import Settings
from scripts.lib.chat.rows import write_table
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import Job, Result
from scripts.lib.targets.named import named

log = logging.getLogger(__name__)
# What equal work repeats on any day: the rest of a cell is speed.
STEADY = ("accept_length", "ceiling", "identical", "near_tie", "different", "verify_steps", "completion_tokens")
TOLD = ("baseline_tok_s", "tok_s", "speedup", "accept_length", "break_even_accept_length")
OUTPUT_SCHEMA = pl.Schema(
    {
        "id": pl.String(),
        "turn": pl.Int64(),
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
    settings = Settings.of(job.settings)
    template = ChatTemplate.load(job.input("target").parent)
    prompts = read_prompts(job.input("prepared"), job.input("merged"), template).first(settings.prompts)
    for reason, ids in prompts.rejected.items():
        log.warning("%d prompts rejected, %s: %s", len(ids), reason, ", ".join(ids[:5]) + ("…" if len(ids) > 5 else ""))
    measured = measure(job, settings, prompts.kept, template, folder)
    cell = cell_figures(settings, measured) | {
        "machine": machine(job.runtime),
        "target": named(read_manifest(job.input("target"), "target")),
    }
    cell["versions"] = versions() | {name: cell["server_packages"][name] for name in ("sglang",) if name in cell["server_packages"]}
    cell["notes"] = notes(cell)
    log.info("%s", ", ".join(f"{name} {cell[name]:.2f}" for name in TOLD if cell[name] is not None))
    for note in cell["notes"]:
        log.warning("%s", note)
    write_json(folder / "cell.json", cell)
    write_table(folder / "outputs.parquet", outputs(measured.passes[0]))
    return Result(manifest(job, folder, prompts, cell), {"tok_s": cell["tok_s"], "baseline_tok_s": cell["baseline_tok_s"]})


def measure(job: Job, settings: Settings, prompts: Sequence[Prompt], template: ChatTemplate, folder: Path) -> Measured:
    """All pairs of answers, by the cell's engine. Only that one is imported: servers do not need what a model in this process needs."""
    if settings.served:
        from scripts.lib.benchmark.served import measure_served

        return measure_served(job, settings, prompts, template, folder)
    from scripts.lib.benchmark.measure import measure_in_process

    return measure_in_process(job, settings, prompts, template, folder)


def outputs(pairs: Sequence[Pair]) -> pl.DataFrame:
    """Both answers to every turn and where they part."""
    rows = [
        (pair.id, pair.turn, list(pair.plain.ids), list(pair.chain.ids), pair.verdict.kind, pair.verdict.first_difference, pair.verdict.gap)
        for pair in pairs
    ]
    return pl.DataFrame(rows, schema=OUTPUT_SCHEMA, orient="row")


def manifest(job: Job, folder: Path, prompts: Prompts, cell: Mapping[str, Any]) -> Manifest:
    """The manifest. It lists `cell.json` by digest, because a new measurement must reach the report."""
    rejected = {reason: len(ids) for reason, ids in prompts.rejected.items()}
    kept = len(prompts.kept)
    facts = {
        **{name: cell[name] for name in STEADY},
        "turns_measured": cell["turns"],
        "prompts_with_more_turns": sum(prompt.more_turns for prompt in prompts.kept),
        "rejected_ids": {reason: list(ids) for reason, ids in prompts.rejected.items()},
    }
    shards = [Shard.of(folder / "cell.json", 1), Shard.of(folder / "outputs.parquet", kept, cell["completion_tokens"])]
    return Manifest(job.stage, job.settings, job.input_digests(), Counts(kept + sum(rejected.values()), kept, rejected), shards, facts)
