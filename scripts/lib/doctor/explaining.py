"""Why an accept length is not the one that was expected."""

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from scripts.lib.doctor.findings import IDLE_ACCEPT_LENGTH
from scripts.lib.doctor.flags import parsed, rounding_findings

ALIKE = 0.05
SURE = 2.0  # standard errors
NO_REASON = ("training_unknown", "server_silent", "extension_eager")  # says what was not compared, or of speed alone
PLENTY = 0.8  # of answers that are the target's own


def explain(cell: Mapping[str, Any]) -> str | None:
    """Why the served accept length of `cell` (a `cell.json`) is not the simulated one; None within 5 % or where one of them is missing.

    The simulation walks chains over the target's own answers to the same prompts, so each reason is something that the server did
    otherwise. Without one, the sentence says what to run.
    """
    served, simulated = cell.get("accept_length"), cell.get("simulated_accept_length")
    if served is None or simulated is None or abs(served / simulated - 1) <= ALIKE:
        return None
    found = dict.fromkeys(reasons(cell, served, simulated))
    told = "; ".join(found) or "nothing in the cell explains it: run `python -m scripts.doctor --walk` with its target, drafter and flags"
    return f"served {served:.2f}, simulated {simulated:.2f} ({served / simulated - 1:+.0%}): {told}"


def reasons(cell: Mapping[str, Any], served: float, simulated: float) -> Iterator[str]:
    """What in `cell` sets its server apart from the simulation, the gravest first."""
    if served < IDLE_ACCEPT_LENGTH:
        yield "the server accepts nothing: it runs another algorithm, other layers or another vocabulary than the drafter was trained for"
    for found in cell.get("findings") or ():
        if found["name"] not in NO_REASON:
            yield f"{found['name']}: {found['evidence']}"
    error = standard_error(cell.get("accepted_histogram") or ())
    if error is not None and abs(served - simulated) < SURE * error:
        yield f"{sum(cell['accepted_histogram'])} verify steps tell it no better than ±{SURE * error:.2f}"
    if (cell.get("topk") or 1) > 1:
        yield f"a tree of top-k {cell['topk']} is served, a chain simulated"
    if cell.get("turns") == "all":
        yield "later turns are served after the variant's own answers, and simulated after the target's"
    yield from text_reasons(cell)
    yield from arithmetic_reasons(cell)


def standard_error(histogram: Sequence[int]) -> float | None:
    """Of the mean of accepted drafts, whose counts by number are `histogram`; None under two verify steps."""
    steps = sum(histogram)
    if steps < 2:
        return None
    mean = sum(drafts * count for drafts, count in enumerate(histogram)) / steps
    return sqrt(sum(count * (drafts - mean) ** 2 for drafts, count in enumerate(histogram)) / (steps - 1) / steps)


def text_reasons(cell: Mapping[str, Any]) -> Iterator[str]:
    """Answers that were served and are not those that were walked."""
    identical, near, different = (cell.get(kind) or 0 for kind in ("identical", "near_tie", "different"))
    count = identical + near + different
    if different:
        yield f"{different} of {count} answers are not the target's own: the server verifies something else"
    if count and identical / count < PLENTY and near:
        yield f"{near} of {count} answers part from the target's own at near ties and go on as another text"
    written, own = cell.get("completion_tokens"), cell.get("baseline_completion_tokens")
    if written and own and abs(written / own - 1) > ALIKE:
        yield f"{written} tokens were served where the target alone writes {own}"


def arithmetic_reasons(cell: Mapping[str, Any]) -> Iterator[str]:
    """Arithmetic that is not the simulation's."""
    for found in rounding_findings({"speculative-algorithm": cell.get("algorithm") or "EAGLE3", **parsed(cell.get("flags") or ())}):
        yield f"{found.name}: {found.evidence}"
    on_gpu = bool((cell.get("machine") or {}).get("gpu"))
    if not on_gpu and cell.get("dtype") == "bfloat16":
        yield "served in bfloat16, simulated in float32, which a CPU does faster"
    if (cell.get("concurrency") or 1) > 1:
        yield f"{cell['concurrency']} requests share a batch, whose kernels add in another order"
