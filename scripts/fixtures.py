"""Write seeded raw files in the shapes of the ten datasets of configs/kimi-k2.5.yaml, for tests, trials and benchmarks."""

import argparse
import logging
from pathlib import Path

from scripts.lib.fixtures.making import FULL_SIZE, make_fixtures
from scripts.lib.fixtures.target import make_target
from scripts.lib.ground.stage import guarded

log = logging.getLogger("aerie")


def main() -> None:
    """Parse the arguments and write."""
    parser = argparse.ArgumentParser(prog="python -m scripts.fixtures", description=__doc__)
    parser.add_argument("--rows", type=int, default=11_000, help=f"raw rows of all datasets together; the real ones hold {FULL_SIZE:,}")
    parser.add_argument("--folder", type=Path, default=Path("fixtures"), help="where the files go, a folder for each dataset")
    parser.add_argument("--seed", type=int, default=7, help="equal seeds and sizes give equal files")
    arguments = parser.parse_args()
    guarded("fixtures", lambda: make(arguments.folder, arguments.rows, arguments.seed))


def make(folder: Path, rows: int, seed: int) -> None:
    """Write a tiny target and the files, and say what is there."""
    make_target(folder / "target", seed)
    counts = make_fixtures(folder, rows, seed)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    log.info("%s: %s rows, %s bytes", folder, f"{sum(counts.values()):,}", f"{size:,}")


if __name__ == "__main__":
    main()
