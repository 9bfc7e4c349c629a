"""Measure one benchmark cell: a task with drafts against the target alone, and whether the answers are the same."""

from scripts.lib.benchmark.build import benchmark
from scripts.lib.ground.stage import stage_command

if __name__ == "__main__":
    stage_command("benchmark", __doc__, benchmark, inputs=("drafter", "target", "prepared", "merged"))
