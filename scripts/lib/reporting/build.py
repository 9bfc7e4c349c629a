"""Stage `report`: the pages of one run."""

from pathlib import Path

from scripts.lib.ground.files import write_text
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, Result
from scripts.lib.reporting.benchmarks import Benchmarks
from scripts.lib.reporting.cells import read_cells
from scripts.lib.reporting.columns import csv_text
from scripts.lib.reporting.curves import read_curve
from scripts.lib.reporting.page import benchmark_markdown, page, plan_markdown
from scripts.lib.reporting.plan import dataset_rows
from scripts.lib.reporting.published import STAGES, Run
from scripts.lib.reporting.run_plots import rows_plot, training_plot
from scripts.lib.reporting.scaling_page import scaling_files, scaling_markdown
from scripts.lib.reporting.scaling_study import scaling_study

INPUTS = tuple(STAGES)


def report(job: Job, folder: Path) -> Result:
    """Write `benchmark.{csv,md,html}`, `plan.md` and the plots into `folder`. Rows are benchmark cells."""
    run = Run.read(job)
    cells = read_cells(run.parts["cells"])
    found, study = Benchmarks.of(cells), scaling_study(run, cells)
    plots = {
        "training": training_plot([read_curve(part) for part in run.parts["drafters"]]),
        "rows": rows_plot(dataset_rows(run)),
    }
    pages = {
        "benchmark.csv": csv_text(found.rows),
        "benchmark.html": page(run, found, study, plots),
        "benchmark.md": benchmark_markdown(run.name, found) + scaling_markdown(study),
        "plan.md": plan_markdown(run),
        **scaling_files(study),
        **{f"{name}.svg": text for name, text in (found.plots | plots).items()},
    }
    for name, text in pages.items():
        write_text(folder / name, text)
    shards = [Shard.of(folder / name, len(found.rows) if name == "benchmark.csv" else 0) for name in sorted(pages)]
    return Result(Manifest(job.stage, job.settings, job.input_digests(), Counts(len(cells), len(cells)), shards))
