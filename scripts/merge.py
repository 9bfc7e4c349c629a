"""Stage `merge`: shuffle the token rows of all data sets into training shards and a held-out split."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.mixing.merge import merge

if __name__ == "__main__":
    stage_command("merge", __doc__, merge, inputs=("tokens",), consulted=("prepared", "tasks"))
