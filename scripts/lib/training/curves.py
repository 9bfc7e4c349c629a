"""`curves.csv`: one line a step, evaluation figures where there was one."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.ground.files import write_text


def eval_columns(figures: dict[str, Any]) -> dict[str, Any]:
    """Evaluation `figures` as columns of a curve row: one for each step's accuracy."""
    single = {f"eval_{name}": figures[name] for name in ("loss", "accept_length", "accept_length_loops", "accept_length_all")}
    return single | {f"eval_accuracy_{step}": value for step, value in enumerate(figures["accuracies"])}


def write_curves(path: Path, curve: Sequence[dict[str, Any]]) -> None:
    """Write `curve` as CSV; columns in the order in which they first come, empty where a row has no value."""
    columns = list(dict.fromkeys(name for row in curve for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    write_text(path, text.getvalue())
