"""Train an EAGLE-3 drafter on stored hidden states and write the folder that SGLang loads."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.training.build import train

if __name__ == "__main__":
    stage_command("train", __doc__, train, inputs=("hidden", "vocab", "target"))
