"""Stage hidden: the states of the target for every merged row, in safetensors shards, and resumes where it was killed."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.states.hidden import hidden

if __name__ == "__main__":
    stage_command("hidden", __doc__, hidden, inputs=("merged", "target"))
