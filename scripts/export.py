"""Check a drafter's folder before an engine loads it: names, shapes, dtypes, vocabulary tables, and that it fits its target."""

import argparse
import logging
from pathlib import Path

import torch
from transformers import AutoConfig

from scripts.lib.eagle3.export import check_target, load_drafter
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
    """StageError when an engine would misread the drafter in `folder`, or when it does not fit `target`."""
    drafter = load_drafter(folder, torch.bfloat16, "cpu")
    if target is not None:
        check_target(folder, AutoConfig.from_pretrained(target))
    log.info(
        "%s: sound, %s parameters, layers %s", folder, f"{sum(p.numel() for p in drafter.parameters()):,}", list(drafter.config.boundaries)
    )


if __name__ == "__main__":
    main()
