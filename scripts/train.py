"""Train an EAGLE-3 drafter on stored hidden states and write the folder that SGLang loads."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.training.build import train, train_rank
from scripts.lib.training.launched import leading

if __name__ == "__main__":
    with leading(train_rank) as first:
        if first:
            stage_command("train", __doc__, train, inputs=("hidden", "vocab", "target", "base"), consulted=("merged",))
