"""Turn raw records into prepared rows: typed messages, ids, groups, and every rejection with its reason."""

from scripts.lib.formats.preparing import prepare
from scripts.lib.ground.stage import stage_command

if __name__ == "__main__":
    stage_command("prepare", __doc__, prepare, inputs=("raw", "target"))
