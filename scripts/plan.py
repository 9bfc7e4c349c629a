"""Write plan.md: rows, tokens and bytes of a run, as far as they are known before the target answers anything."""

import argparse
import json
import logging
from pathlib import Path

from scripts.lib.ground.files import write_text
from scripts.lib.ground.stage import guarded
from scripts.lib.reporting.planning import free_bytes, plan_page

log = logging.getLogger("aerie")


def main() -> None:
    """Parse the arguments and write the page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__)
    parser.add_argument("--prepared", type=Path, nargs="+", required=True, help="manifests of the datasets' prepared rows")
    parser.add_argument("--target", type=Path, required=True, help="manifest of the target")
    parser.add_argument("--output", type=Path, required=True, help="page to write")
    parser.add_argument("--settings", type=json.loads, required=True, help="the sections of the config that the page is about, as JSON")
    arguments = parser.parse_args()
    guarded("plan", lambda: plan(arguments))


def plan(arguments: argparse.Namespace) -> None:
    """Write the page; it also says how much of the disk is free now, so it is no input of any stage."""
    folder: Path = arguments.output.parent
    folder.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output, plan_page(arguments.prepared, arguments.target, arguments.settings, free_bytes(folder)))
    log.info("wrote %s", arguments.output)


if __name__ == "__main__":
    main()
