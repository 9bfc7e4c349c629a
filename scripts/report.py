"""Write the report of a run: the benchmark table, plots, and what became of every row."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.reporting.build import INPUTS, report

if __name__ == "__main__":
    stage_command("report", __doc__, report, inputs=INPUTS)
