"""The figures of one cell, from its measured pairs."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from scripts.lib.benchmark.measure import Answer, Pair
from scripts.lib.benchmark.settings import Settings
from scripts.lib.speculation.figures import accept_length, histogram, tokens_per_second

IDLE_ACCEPT_LENGTH = 1.05
STEADY_SPREAD = 0.1


def cell_figures(settings: Settings, passes: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """Everything `cell.json` says about `passes`.

    Speeds are over all passes; counts, accept length and verdicts are of the first, as greedy passes repeat each other.
    """
    pairs = passes[0]
    all_pairs = [pair for pairs_of_pass in passes for pair in pairs_of_pass]
    baseline, speed = speed_of(all_pairs, plain_answer), speed_of(all_pairs, chain_answer)
    accepted = [drafts for pair in pairs for drafts in pair.chain.accepted]
    tau = accept_length(accepted)
    speedup = speed / baseline if speed is not None and baseline is not None else None
    kinds = Counter(pair.verdict.kind for pair in pairs)
    return {
        "task": settings.task,
        "variant": settings.variant,
        "drafter": settings.drafter,
        "dtype": settings.dtype,
        "concurrency": 1,
        "baseline_tok_s": baseline,
        "tok_s": speed,
        "speedup": speedup,
        "accept_length": tau,
        "ceiling": settings.ceiling,
        "break_even_accept_length": tau / speedup if tau is not None and speedup is not None else None,
        "identical": kinds["identical"],
        "near_tie": kinds["near_tie"],
        "different": kinds["different"],
        "prompts": len(pairs),
        "completion_tokens": sum(len(pair.chain.ids) for pair in pairs),
        "baseline_completion_tokens": sum(len(pair.plain.ids) for pair in pairs),
        "verify_steps": len(accepted),
        "accepted_drafts": sum(accepted),
        "accepted_histogram": histogram(accepted, settings.draft_steps),
        "prefill_seconds": mean_prefill(all_pairs, chain_answer),
        "baseline_prefill_seconds": mean_prefill(all_pairs, plain_answer),
        "repeats": [{"baseline_tok_s": speed_of(row, plain_answer), "tok_s": speed_of(row, chain_answer)} for row in passes],
    }


def plain_answer(pair: Pair) -> Answer:
    """The answer of the target alone."""
    return pair.plain


def chain_answer(pair: Pair) -> Answer:
    """The answer with drafts."""
    return pair.chain


def speed_of(pairs: Sequence[Pair], answer: Callable[[Pair], Answer]) -> float | None:
    """Decoding speed of one way over `pairs`."""
    answers = [answer(pair) for pair in pairs]
    return tokens_per_second(sum(len(a.ids) for a in answers), len(answers), sum(a.decode_seconds for a in answers))


def mean_prefill(pairs: Sequence[Pair], answer: Callable[[Pair], Answer]) -> float:
    """Mean seconds from the prompt to the first token, with the drafter's reading of the prompt."""
    return sum(answer(pair).prefill_seconds for pair in pairs) / len(pairs)


def notes(cell: dict[str, Any]) -> list[str]:
    """What a reader must know about the figures, in words."""
    tau, speedup = cell["accept_length"], cell["speedup"]
    found = []
    if cell["different"]:
        share = f"{cell['different']} of {cell['prompts']}"
        found.append(f"NOT LOSSLESS: {share} outputs differ from the target's own, not at a near tie; see outputs.parquet")
    if tau is None:
        found.append("no verify step: every answer ended with its first token")
    elif tau < IDLE_ACCEPT_LENGTH:
        found.append(
            f"accept length {tau:.2f} is under {IDLE_ACCEPT_LENGTH}: the drafter does nothing; "
            "check that it was trained on this target's states (layers, d2t) and that its held-out accept length rose"
        )
    if speedup is not None and speedup < 1:
        found.append(f"{speedup:.2f} times: needs accept length {cell['break_even_accept_length']:.2f}, has {tau:.2f}")
    spread = max(relative_spread(cell, "baseline_tok_s"), relative_spread(cell, "tok_s"))
    if spread > STEADY_SPREAD:
        found.append(f"repeats differ by {spread:.0%}: the machine was not quiet")
    return found


def relative_spread(cell: dict[str, Any], figure: str) -> float:
    """(highest - lowest) / highest of `figure` over the repeats."""
    values = [repeat[figure] for repeat in cell["repeats"] if repeat[figure] is not None]
    return (max(values) - min(values)) / max(values) if values else 0.0
