"""How fast the doctor names a misconfiguration, on copies of a real run that are broken one by one.

    python -m benchmarks.doctor --run results/demo [--drafter eagle3] [--device cpu]

Each broken copy goes through what a benchmark cell asks before its server starts; two more, whose files say nothing, are walked with the
target in this process along the run's held-out rows: layers one too high and weights at random, both without a manifest of a training.
The last line is JSON: cases, named, the seconds of all that files show, of the slowest case, and of a sound run, by the clock and of CPU.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.lib.doctor.command import Case, examine
from scripts.lib.doctor.findings import Finding
from tests.broken_drafters import BROKEN, Run, copied, edit_weights, served, shift_layers


def main() -> None:
    """Break, look, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="results of a run: its target/ and drafters/")
    parser.add_argument("--drafter", default="eagle3", help="name of the drafter")
    parser.add_argument("--device", default="cpu", help="where to walk")
    arguments = parser.parse_args()
    sound = served(arguments.run / "target", arguments.run / "drafters" / arguments.drafter)
    walk = {"device": arguments.device, "rows": arguments.run / "merged/eval-00000.parquet"}
    seconds, named = {}, 0
    for label, (change, name) in BROKEN.items():
        seconds[label], found = timed(sound, change, {})
        named += report(label, seconds[label], found, name)
    for label, change, name in (
        ("walked: layers one too high", unnamed_shift, "layers_shifted"),
        ("walked: random weights", random, "accept_near_one"),
    ):
        seconds[label], found = timed(sound, change, walk)
        named += report(label, seconds[label], found, name)
    whole, found = timed(sound, lambda run: run, walk)
    print(f"{whole}  sound, walked: {[finding.name for finding in found]}")
    files = [took for label, took in seconds.items() if not label.startswith("walked")]
    slowest = max(seconds, key=lambda label: seconds[label].cpu)
    figures = {
        "cases": len(seconds),
        "named": named,
        "files": {"cases": len(files), "seconds": sum(took.wall for took in files), "cpu_seconds": sum(took.cpu for took in files)},
        "slowest": {"case": slowest, **asdict(seconds[slowest])},
        "sound": {**asdict(whole), "findings": [finding.name for finding in found]},
    }
    print(json.dumps(figures))


@dataclass(frozen=True)
class Seconds:
    """What a case took: by the clock, and of this process alone, which other work on the machine does not lengthen."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s ({self.cpu:.2f} of CPU)"


def timed(sound: Run, change: Callable[[Run], Run], walk: Mapping[str, Any]) -> tuple[Seconds, list[Finding]]:
    """Seconds and findings of what `change` makes of a copy of the `sound` run; walked as `walk` says."""
    with tempfile.TemporaryDirectory() as folder:
        broken = change(copied(sound, Path(folder)))
        start, computed = time.perf_counter(), time.process_time()
        found = examine(Case(broken.target, broken.drafter, broken.algorithm, broken.flags, **walk))
        return Seconds(time.perf_counter() - start, time.process_time() - computed), found


def report(label: str, seconds: Seconds, found: list[Finding], name: str) -> bool:
    """Print one case; whether the doctor gave it its `name`."""
    fatal = [finding.name for finding in found if finding.fatal]
    print(f"{seconds}  {label}: {', '.join(fatal)}{'' if name in fatal else f'  MISSED {name}'}", flush=True)
    return name in fatal


def unnamed_shift(run: Run) -> Run:
    """Layers one too high, in the folder of somebody who kept no manifest."""
    (run.drafter / "manifest.json").unlink()
    return shift_layers(run)


def random(run: Run) -> Run:
    """Weights that were never trained."""
    (run.drafter / "manifest.json").unlink()
    torch.manual_seed(0)
    edit_weights(run.drafter, lambda t: {name: torch.randn_like(x) * 0.02 if x.dim() == 2 else x for name, x in t.items()})
    return run


if __name__ == "__main__":
    main()
