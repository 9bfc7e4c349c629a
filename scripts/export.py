"""Check a drafter's folder before an engine loads it, whoever trained it: names, shapes, vocabulary tables, and that it fits its target."""

import argparse
import logging
from pathlib import Path

from transformers import AutoConfig

from scripts.lib.eagle3.judging import judge
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import guarded

log = logging.getLogger("aerie")


def main() -> None:
    """Parse the arguments and check; the last line of a failure says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m scripts.export", description=__doc__)
    parser.add_argument("--check", type=Path, required=True, metavar="DIR", help="folder with config.json and model.safetensors")
    parser.add_argument("--target", type=Path, metavar="DIR", help="folder of the target, to compare sizes, rotary embedding and positions")
    arguments = parser.parse_args()
    guarded(f"export {arguments.check.name}", lambda: check(arguments.check, arguments.target))


def check(folder: Path, target: Path | None) -> None:
    """StageError when an engine would not serve the drafter in `folder` as it was trained, or when it does not fit `target`."""
    verdict = judge(folder, AutoConfig.from_pretrained(target) if target else None)
    for note in verdict.notes:
        log.info("%s: %s", folder, note)
    if verdict.faults:
        raise StageError(f"{folder}: {'; '.join(fault.text for fault in verdict.faults)}")
    log.info("%s: sound", folder)


if __name__ == "__main__":
    main()
