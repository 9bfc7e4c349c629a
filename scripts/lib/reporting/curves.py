"""Training curves of drafters."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.reporting.published import Published


@dataclass(frozen=True)
class Curve:
    """The steps of one drafter's training; each row maps a column of `curves.csv` to its value, without those it has none of."""

    drafter: str
    rows: Sequence[dict[str, float]]

    def series(self, column: str) -> tuple[list[float], list[float]]:
        """Steps that have `column`, and its values there."""
        present = [row for row in self.rows if column in row]
        return [row["step"] for row in present], [row[column] for row in present]

    def columns(self, prefix: str) -> list[str]:
        """Numbered columns `prefix`0, `prefix`1, …, in order."""
        names = {name for row in self.rows for name in row if name.removeprefix(prefix).isdigit()}
        return sorted(names, key=lambda name: int(name.removeprefix(prefix)))


def read_curve(part: Published) -> Curve:
    """`curves.csv` of a published drafter."""
    path: Path = part.folder / "curves.csv"
    try:
        with path.open(newline="") as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise StageError(f"{path}: not a readable training curve ({error}); train the drafter again") from error
    return Curve(part.name, rows)
