"""Stage `vocab`: choose the tokens that the drafter can propose from the counts of trained tokens."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.vocabulary.vocab import vocab

if __name__ == "__main__":
    stage_command("vocab", __doc__, vocab, inputs=("merged", "target"))
