"""Notes on cells and verdicts in words."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from scripts.lib.doctor.explaining import explain
from scripts.lib.reporting.cells import Cell, is_baseline
from scripts.lib.reporting.cost_model import Split
from scripts.lib.reporting.outlook import Setting
from scripts.lib.reporting.verdict import Leader, Verdict


def with_words(rows: Sequence[Cell], splits: Mapping[tuple[str, str, int], Split]) -> list[Cell]:
    """The rows of the table with what their figures mean in front of their own notes."""
    return [row if is_baseline(row) else in_words(row, splits.get((row["task"], row["variant"], row["concurrency"]))) for row in rows]


def in_words(cell: Cell, split: Split | None) -> Cell:
    """A cell with its drafter's share of the cycle and its notes."""
    parting = explain(cell)
    found = [*verdict_words(cell, split), *cell["notes"], *([parting] if parting else [])]
    return {**cell, "draft_share": split.draft_share if split else None, "notes": found}


def loss_words(cell: Cell) -> str:
    """The accept length that a cell needs and has."""
    if cell["speedup"] is None or cell["accept_length"] is None:
        return ""
    return f"{cell['speedup']:.2f} times: needs accept length {cell['break_even_accept_length']:.2f}, has {cell['accept_length']:.2f}"


def verdict_words(cell: Cell, split: Split | None) -> list[str]:
    """Gain or loss, and where the time of a losing cell goes."""
    loss = loss_words(cell)
    if not loss:
        return []
    if cell["speedup"] >= 1:
        low = cell["speedup_interval"][0] if cell["speedup_interval"] else cell["speedup"]
        return [loss + ("; its interval reaches below 1" if low < 1 else "")]
    if split is not None:
        return [f"{loss}; about {percent(split.draft_share)} of the cycle is the drafter"]
    if not cell["drafter"]:
        return [loss]
    return [f"{loss}; {percent(1 - 1 / cell['break_even_accept_length'])} of the cycle is drafts, their check and overhead"]


def remarks(cells: Sequence[Cell]) -> list[str]:
    """What the doctor found in servers that is only worth knowing, once, with the variants that it concerns."""
    variants: dict[str, set[str]] = {}
    evidence: dict[str, str] = {}
    for cell in cells:
        for one in cell["findings"]:
            variants.setdefault(one["name"], set()).add(cell["variant"])
            evidence.setdefault(one["name"], f"{one['evidence']}, so {one['repair']}")
    return [f"{name} ({', '.join(sorted(variants[name]))}): {evidence[name]}." for name in sorted(variants)]


def leader_words(leader: Leader) -> str:
    """The fastest variant of a concurrency."""
    if not leader.lossless:
        return (
            f"No variant is lossless: {leader.variant}, {leader.gain.words()} times the target alone at its fastest, writes other answers."
        )
    speed = f"{leader.gain.words()} times the target alone at its fastest over all tasks"
    if leader.gain.value < 1:
        return f"No variant pays: serve the target alone. {leader.variant} comes nearest, {speed}."
    doubt = "" if leader.gain.low > 1 else " Its interval reaches below 1: more prompts or repeats would tell."
    return f"{leader.variant} is the fastest measured, {speed}.{doubt}"


def verdict_words_by_concurrency(leaders: Sequence[Leader], verdicts: Sequence[Verdict]) -> dict[str, tuple[str, list[str]]]:
    """For each concurrency its fastest variant, and what the cost model says of each drafter."""
    return {
        f"Concurrency {leader.concurrency}": (
            leader_words(leader),
            [" ".join(verdict_sentences(one)) for one in verdicts if one.family.concurrency == leader.concurrency],
        )
        for leader in leaders
    }


def verdict_sentences(verdict: Verdict) -> list[str]:
    """What to serve a drafter with, whether it pays, and what the cells do not tell."""
    best = verdict.best
    found = [
        f"{verdict.family.name}: {steps_words(best)}: {best.speedup.words()} times, {best.basis}. "
        f"It breaks even at accept length {best.break_even:.2f} and has {best.accept_length:.2f} of at most {best.steps + 1}."
    ]
    if all(setting.speedup.high < 1 for setting in verdict.settings):
        found.append("No length of chain pays.")
    if best.speedup.value < 1:
        found.append(f"To break even it must write {percent(best.break_even / best.accept_length - 1)} more tokens a cycle.")
    if verdict.rivals:
        rivals = ", ".join(f"{one.steps} ({one.speedup.low:.2f} to {one.speedup.high:.2f})" for one in verdict.rivals)
        found.append(f"Not told apart from it: chains of {rivals}.")
    return [*found, *verdict.refusals]


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.0f} %"


def steps_words(setting: Setting) -> str:
    """A chain as the options of a server name it."""
    return f"{setting.steps} draft step{'s' * (setting.steps > 1)}, top-k 1, {setting.steps + 1} draft tokens"


def next_variants(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Variants that a next run should measure: those that may pay, and be faster than any chain known at their concurrency."""
    found = {}
    for verdict in verdicts:
        setting = verdict.candidate
        rivals = [one.best.speedup.value for one in verdicts if one.family.concurrency == verdict.family.concurrency]
        if setting is not None and setting.speedup.high > max(1.0, *rivals):
            pattern = verdict.family.chains[0]
            found[f"{pattern['variant']}_steps_{setting.steps}"] = variant_like(pattern, setting.steps)
    return found


def variant_like(cell: Cell, steps: int) -> dict[str, Any]:
    """An entry of `benchmark.variants` like that of a cell, with another number of draft steps."""
    served = {
        name: cell[name] for name in ("revision", "attention_backend", "cuda_graphs", "flags") if cell.get(name) not in (None, (), [])
    }
    entry = {"drafter": cell["drafter"], "draft_steps": steps, "dtype": cell["dtype"]}
    if cell["engine"] == "transformers":
        return entry
    return {**entry, "engine": cell["engine"], "algorithm": cell["algorithm"], "topk": 1, "draft_tokens": steps + 1, **served}


def stanza(variants: Mapping[str, Mapping[str, Any]]) -> str:
    """The variants as a section of a config."""
    return yaml.safe_dump({"benchmark": {"variants": dict(variants)}}, sort_keys=False)
