"""Benchmark cells as rows of one table."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.lib.ground.manifest import checked_shard
from scripts.lib.reporting.published import Published
from scripts.lib.reporting.table import Table, number

COLUMNS = {
    "task": "what is asked",
    "variant": "drafter, chain length and arithmetic, as the config names them together",
    "drafter": "the trained drafter that the variant uses",
    "concurrency": "requests at a time",
    "baseline_tok_s": "tokens a second of the target alone",
    "tok_s": "tokens a second with the drafter",
    "speedup": "tok_s / baseline_tok_s; above 1 the drafter pays",
    "accept_length": "tokens a verify step writes on average: 1 + accepted drafts / verify steps, so the bonus token counts and "
    "the prefill's token does not; without the bonus token it is 1 less",
    "ceiling": "the highest possible accept length: draft steps + 1",
    "break_even_accept_length": "accept_length / speedup: the accept length from which on this variant pays on this machine",
    "identical": "prompts whose output equals the target's own, token by token",
    "near_tie": "prompts whose output first differs where the target's two candidates lie within the noise of the arithmetic",
    "prompts": "prompts measured",
    "completion_tokens": "tokens written with the drafter, in one pass",
    "notes": "what else to know",
}
DIGITS = {"baseline_tok_s": 2, "tok_s": 2, "speedup": 3, "accept_length": 3, "break_even_accept_length": 3}
WORDS = ("task", "variant", "drafter", "notes")
MEASURED = (
    "One request at a time, greedy (temperature 0), target and drafter in the same process, threads and arithmetic.",
    "Each prompt is answered by both ways, one after the other; which goes first alternates from prompt to prompt. "
    "One warm-up answer is not counted, and no prompt comes twice in a pass.",
    "Speed is the number of tokens after the first of each answer over the seconds after it: prefill (reading the prompt, by the "
    "drafter too) is timed apart and stands in each cell.json.",
    "Of tasks with several turns, the first is measured. Prompts that occur in the training data are left out.",
    "An answer ends at the target's end-of-turn token or at max_tokens; drafts behind the end are neither written nor counted.",
)


def read_cells(parts: Sequence[Published]) -> list[dict[str, Any]]:
    """The cells of published folders, by task and variant; every file must be as its manifest says."""
    cells = []
    for part in parts:
        (shard,) = (shard for shard in part.manifest.shards if shard.name == "cell.json")
        cells.append(json.loads(checked_shard(part.folder, shard).read_text()))
    return sorted(cells, key=lambda cell: (cell["task"], cell["variant"]))


def csv_text(cells: Sequence[Mapping[str, Any]]) -> str:
    """`benchmark.csv`. A missing figure is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        rounded = {name: round(cell[name], digits) for name, digits in DIGITS.items() if cell[name] is not None}
        writer.writerow([(dict(cell) | rounded | {"notes": "; ".join(cell["notes"])})[name] for name in COLUMNS])
    return text.getvalue()


def cell_table(cells: Sequence[Mapping[str, Any]], columns: Sequence[str] = tuple(COLUMNS)) -> Table:
    """The same rows for people, in the given columns."""
    rows = [[shown(cell, name) for name in columns] for cell in cells]
    return Table([name.replace("_tok_s", " tok/s").replace("tok_s", "tok/s").replace("_", " ") for name in columns], rows, WORDS)


def shown(cell: Mapping[str, Any], name: str) -> str:
    """Field `name` of a cell as text."""
    value = cell[name]
    if name == "notes":
        return "; ".join(value)
    return value if name in WORDS else number(value, DIGITS.get(name, 0))


def lossless_summary(cells: Sequence[Mapping[str, Any]]) -> str:
    """In words: do the outputs equal the target's own?"""
    parts = []
    for dtype in sorted({cell["dtype"] for cell in cells}):
        group = [cell for cell in cells if cell["dtype"] == dtype]
        identical, ties, different, prompts = (
            sum(cell[name] for cell in group) for name in ("identical", "near_tie", "different", "prompts")
        )
        text = f"{dtype}: {identical} of {prompts} outputs identical, {ties} first differ at a near tie"
        parts.append(f"{text}, {different} DIFFER ELSEWHERE." if different else f"{text}, none elsewhere.")
    return " ".join(parts)


def machines(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each machine that cells were measured on, once, with the versions."""
    lines = set()
    for cell in cells:
        machine, versions = cell["machine"], cell["versions"]
        hardware = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
        lines.add(
            f"{hardware}, device {machine['device']}; " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        )
    return sorted(lines)
