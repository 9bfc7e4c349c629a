"""Look into a shard of hidden states: tensors, rows, bytes a token, norms by layer, states that are not finite, and its sha256.

python -m scripts.inspect_states results/demo/hidden/train-00000.safetensors
"""

import argparse
from pathlib import Path

from scripts.lib.ground.stage import guarded
from scripts.lib.states.describing import described


def main() -> None:
    """Parse the command line and print a page for each shard."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.inspect_states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path, nargs="+", metavar="SHARD", help="a .safetensors file that stage hidden wrote")
    arguments = parser.parse_args()
    guarded("inspect_states", lambda: print("\n\n".join(map(described, arguments.shards))))


if __name__ == "__main__":
    main()
