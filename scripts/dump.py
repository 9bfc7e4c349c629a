"""Dump hidden states for a training that reads them as they come (hidden.mode: rolling). Stage train starts it.

It takes the settings of stage hidden, works in the training's folder, and ends when its standard input closes.
"""

import argparse
import json
from pathlib import Path

from scripts.lib.ground.stage import Job, guarded
from scripts.lib.states.rolling import end_with_standard_input, roll


def main() -> None:
    """Parse the command line and dump."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.dump", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("merged", "target"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"manifest of {name}")
    parser.add_argument("--folder", type=Path, required=True, help="where shards and marks go")
    parser.add_argument("--settings", type=json.loads, required=True, help="those of stage hidden, as JSON")
    parser.add_argument("--runtime", type=json.loads, required=True, help="machine settings and `room`, the most bytes of shards, as JSON")
    given = parser.parse_args()
    end_with_standard_input()
    inputs = {"merged": (given.merged,), "target": (given.target,)}
    guarded("dump", lambda: roll(Job("hidden", given.folder, inputs, given.settings, given.runtime), given.folder))


if __name__ == "__main__":
    main()
