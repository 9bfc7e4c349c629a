"""Check a running server against a deployed drafter: model, algorithm, flags, template, and that its drafts are accepted.

python -m scripts.check_served --url http://127.0.0.1:30000 --drafter results/RUN/deploy [--target DIR]
"""

import argparse
from pathlib import Path

from scripts.lib.deploying.checking import check_served
from scripts.lib.ground.stage import guarded


def main() -> None:
    """Parse the arguments and check; the last line of a failure says what is wrong and what repairs it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.check_served", description=__doc__)
    parser.add_argument("--url", required=True, help="address of the server")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="folder that stage deploy made")
    parser.add_argument("--target", type=Path, metavar="DIR", help="folder of the target, if it is not where the run left it")
    arguments = parser.parse_args()
    guarded("check_served", lambda: check_served(arguments.url, arguments.drafter, arguments.target))


if __name__ == "__main__":
    main()
