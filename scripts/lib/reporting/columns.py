"""The columns of the benchmark table: what each means and how it looks, as CSV and for people."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.lib.reporting.cells import Cell, is_baseline
from scripts.lib.reporting.table import MISSING, Table, number

COLUMNS = {
    "task": "what is asked",
    "variant": "the way to serve, by its name in the config; baseline is the target alone, as measured beside the variants",
    "drafter": "the trained drafter that the variant uses, or where a foreign one comes from",
    "concurrency": "requests at a time",
    "baseline_tok_s": "tokens a second of the target alone, all requests together",
    "tok_s": "tokens a second with the drafter, all requests together",
    "speedup": "tok_s / baseline_tok_s; above 1 the drafter pays",
    "accept_length": "tokens a verify step writes on average: 1 + accepted drafts / verify steps, so the bonus token counts and "
    "the prefill's token does not; without the bonus token it is 1 less",
    "ceiling": "the highest possible accept length: draft steps + 1, of NGRAM its draft tokens",
    "break_even_accept_length": "accept_length / speedup: the accept length from which on this variant pays on this machine; it is "
    "also what a cycle of drafting and checking costs, in decoding steps of the target alone",
    "identical": "prompts whose output equals the target's own, token by token",
    "near_tie": "prompts whose output first differs where the target's two candidates lie within the noise of the arithmetic",
    "prompts": "prompts measured",
    "completion_tokens": "tokens written with the drafter, in one pass",
    "notes": "what else to know",
}
# Behind the columns above in the CSV.
FURTHER = {
    "speedup_low": "lower end of the speed-up's 95 % interval, by bootstrap over prompts and repeats",
    "speedup_high": "upper end of that interval",
    "draft_share": "the drafter's share of a cycle, by the cost model; empty where the cells cannot tell drafts from their check",
    "simulated_accept_length": "accept length by the trainer's walk over the target's own answers to these prompts",
    "ttft_p50_ms": "time to first token, median, in ms",
    "ttft_p95_ms": "time to first token, 95th percentile",
    "itl_mean_ms": "inter-token latency, mean, in ms; tokens that come in one piece share the time since the piece before",
    "itl_p95_ms": "inter-token latency, 95th percentile",
    "baseline_ttft_p50_ms": "the same of the target alone",
    "baseline_ttft_p95_ms": "the same of the target alone",
    "baseline_itl_mean_ms": "the same of the target alone",
    "baseline_itl_p95_ms": "the same of the target alone",
    "cycle_ms": "a cycle of drafting and checking, in ms",
    "baseline_step_ms": "a decoding step of the target alone, in ms",
    "verify_steps": "cycles in one pass",
    "different": "prompts whose output first differs elsewhere than at a near tie; more than 0 is a bug",
    "engine": "what runs the target: in process, or a server",
    "algorithm": "how drafts are made; empty for the target alone",
    "draft_steps": "drafts one after the other",
    "topk": "drafts beside each other; 1 is a chain",
    "draft_tokens": "tokens that one verify step checks",
    "cuda_graphs": "kernels launched as a recorded graph",
    "attention_backend": "the server's attention kernels; empty: its own choice",
    "flags": "further flags of the server",
    "dtype": "arithmetic",
}
TITLES = {
    "tok_s": "tok/s",
    "break_even_accept_length": "break-even",
    "speedup": "speed-up",
    "p50_ms": "median ms",
    "ttft": "TTFT",
    "itl": "ITL",
    "topk": "top-k",
    "cuda": "CUDA",
}
LATENCIES = ("ttft", "itl", "baseline_ttft", "baseline_itl")
DIGITS = {
    "baseline_tok_s": 2,
    "tok_s": 2,
    "speedup": 3,
    "accept_length": 3,
    "break_even_accept_length": 3,
    "speedup_low": 3,
    "speedup_high": 3,
    "draft_share": 3,
    "simulated_accept_length": 3,
    "cycle_ms": 4,
    "baseline_step_ms": 4,
    **{name: 3 for name in FURTHER if name.startswith(LATENCIES)},
}
WORDS = ("task", "variant", "drafter", "notes", "engine", "algorithm", "cuda_graphs", "attention_backend", "flags", "dtype")
# The tables of the page: a drafter's figures, latencies, and how each variant is served.
RESULTS = (
    *("task", "variant", "concurrency", "baseline_tok_s", "tok_s", "speedup", "accept_length", "ceiling", "break_even_accept_length"),
    *("draft_share", "simulated_accept_length", "identical", "near_tie", "prompts"),
)
LATENCY = ("task", "variant", "concurrency", "ttft_p50_ms", "ttft_p95_ms", "itl_mean_ms", "itl_p95_ms", "cycle_ms")
SERVED = (
    *("variant", "drafter", "engine", "algorithm", "draft_steps", "topk", "draft_tokens", "cuda_graphs"),
    *("attention_backend", "flags", "dtype"),
)


def value(row: Cell, name: str) -> Any:
    """The figure of a column, None where it is missing."""
    if name in ("speedup_low", "speedup_high"):
        return row["speedup_interval"][name == "speedup_high"] if row["speedup_interval"] else None
    kind, _, rest = name.rpartition("_ms")[0].rpartition("_")
    if kind in LATENCIES:
        latency = row[f"{kind}_seconds"]
        return 1000 * latency[rest] if latency and latency.get(rest) is not None else None
    if name in ("cycle_ms", "baseline_step_ms"):
        seconds = row[name.replace("_ms", "_seconds")]
        return None if seconds is None else 1000 * seconds
    return row.get(name)


def csv_text(rows: Sequence[Cell]) -> str:
    """`benchmark.csv`. A missing figure is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [*COLUMNS, *FURTHER]
    writer.writerow(columns)
    for row in rows:
        writer.writerow([csv_field(value(row, name), name) for name in columns])
    return text.getvalue()


def csv_field(figure: Any, name: str) -> Any:
    """A figure as a field."""
    if name in ("notes", "flags"):
        return ("; " if name == "notes" else " ").join(figure or ())
    if isinstance(figure, bool):
        return str(figure).lower()
    return round(figure, DIGITS[name]) if figure is not None and name in DIGITS else figure


def cell_table(rows: Sequence[Cell], columns: Sequence[str] = tuple(COLUMNS)) -> Table:
    """The same rows for people, in the given columns."""
    titles = {name: title(name) for name in columns}
    return Table(
        list(titles.values()), [[shown(row, name) for name in columns] for row in rows], [titles[n] for n in columns if n in WORDS]
    )


def title(name: str) -> str:
    """A column's name for people."""
    for old, new in TITLES.items():
        name = name.replace(old, new)
    return name.replace("_", " ")


def shown(row: Cell, name: str) -> str:
    """A field of the table as text: a speed-up with its interval, a share as a percentage."""
    figure = value(row, name)
    if name in SPECIAL and figure is not None:
        return SPECIAL[name](row)
    if name in WORDS:
        return MISSING if figure is None else str(figure)
    return number(figure, min(DIGITS.get(name, 0), 3))


def speedup_words(row: Cell) -> str:
    """A speed-up with its interval, where it has one."""
    low, high = (value(row, name) for name in ("speedup_low", "speedup_high"))
    speedup = f"{row['speedup']:.3f}"
    return speedup if is_baseline(row) or low is None else f"{speedup} ({low:.2f} to {high:.2f})"


SPECIAL: Mapping[str, Callable[[Cell], str]] = {
    "speedup": speedup_words,
    "draft_share": lambda row: f"{100 * row['draft_share']:.0f} %",
    "cuda_graphs": lambda row: "yes" if row["cuda_graphs"] else "no",
    "notes": lambda row: "; ".join(row["notes"]),
    "flags": lambda row: " ".join(row["flags"]) or MISSING,
    "drafter": lambda row: row["drafter"] or MISSING,
}


def lossless_summary(cells: Sequence[Cell]) -> str:
    """In words: do the outputs equal the target's own?"""
    parts = []
    for dtype in sorted({cell["dtype"] for cell in cells}):
        group = [cell for cell in cells if cell["dtype"] == dtype]
        kinds = ("identical", "near_tie", "different", "uncompared", "prompts")
        identical, ties, different, uncompared, prompts = (sum(cell[name] or 0 for cell in group) for name in kinds)
        text = f"{dtype}: {identical} of {prompts} outputs identical, {ties} first differ at a near tie"
        text += f", {uncompared} could not be compared" if uncompared else ""
        parts.append(f"{text}, {different} DIFFER ELSEWHERE." if different else f"{text}, none elsewhere.")
    return " ".join(parts)


def measured_words(cells: Sequence[Cell]) -> list[str]:
    """How cells of the engines in use were measured."""
    engines = {cell["engine"] for cell in cells}
    sentences = [
        "Greedy (temperature 0). Every cell measures the target alone and the variant in one run, by turns, on the same prompts; which "
        "goes first alternates. A warm-up is not counted, and no prompt comes twice in a pass.",
        "An answer ends at the target's end-of-turn token or at max_tokens; drafts behind the end are neither written nor counted.",
        "Prompts that occur in the training data are left out.",
    ]
    if "transformers" in engines:
        sentences.append(
            "Engine transformers: one request at a time, target and drafter in the same process, threads and arithmetic. Speed is the "
            "number of tokens after the first of each answer over the seconds after it; prefill is timed apart, in each cell.json."
        )
    if "sglang" in engines:
        sentences.append(
            "Engine sglang: two servers with the same flags but for the drafter. Speed is all tokens over the clock, prefill included. "
            "Accept length is token-weighted, from the server's own counts of verify steps of each request."
        )
    apart = sorted({cell["variant"] for cell in cells if cell["server"] and not cell["server"].get("side_by_side", True)})
    if apart:
        sentences.append(
            f"One server at a time ({', '.join(apart)}): all prompts went to one of the two and later to the other, not by turns. What "
            "changed on the machine meanwhile is in these speed-ups, and their intervals do not know of it."
        )
    return sentences
