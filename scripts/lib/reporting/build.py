"""Stage `report`: the pages of one run."""

from pathlib import Path

from scripts.lib.ground.files import write_text
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.reporting.cells import csv_text, read_cells
from scripts.lib.reporting.curves import read_curve
from scripts.lib.reporting.page import benchmark_markdown, page, plan_markdown
from scripts.lib.reporting.plan import dataset_rows
from scripts.lib.reporting.plots import accept_length_plot, rows_plot, training_plot
from scripts.lib.reporting.published import STAGES, Run

INPUTS = tuple(STAGES)


def report(job: Job, folder: Path) -> Result:
    """Write `benchmark.{csv,md,html}`, `plan.md` and the plots into `folder`. Rows are benchmark cells."""
    run = Run.read(job)
    cells = read_cells(run.parts["cells"])
    plots = {
        "accept_length": accept_length_plot(cells),
        "training": training_plot([read_curve(part) for part in run.parts["drafters"]]),
        "rows": rows_plot(dataset_rows(run)),
    }
    pages = {
        "benchmark.csv": csv_text(cells),
        "benchmark.html": page(run, cells, plots),
        "benchmark.md": benchmark_markdown(run.name, cells),
        "plan.md": plan_markdown(run),
        **{f"{name}.svg": text for name, text in plots.items()},
    }
    for name, text in pages.items():
        write_text(folder / name, text)
    shards = [Shard.of(folder / name, len(cells) if name == "benchmark.csv" else 0) for name in sorted(pages)]
    return Result(Manifest(job.stage, job.settings, job.input_digests(), Counts(len(cells), len(cells)), shards))
