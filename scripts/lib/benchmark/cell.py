"""The figures of one cell, from its measured pairs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from scripts.lib.benchmark.answers import Answer, Measured, Pair
from scripts.lib.benchmark.latency import Way, chain_answer, plain_answer, speedup_interval, summary
from scripts.lib.benchmark.settings import Settings
from scripts.lib.doctor.findings import IDLE_ACCEPT_LENGTH
from scripts.lib.speculation.figures import tokens_per_second

STEADY_SPREAD = 0.1
IDLE = {
    "EAGLE3": "the drafter does nothing; check that it was trained on this target's states (layers, d2t) and that its held-out accept "
    "length rose",
    "STANDALONE": "the drafter does nothing; take a model that was trained on text like the target's",
    "NGRAM": "hardly a run of words in these answers stood in the text before; NGRAM is for answers that repeat their prompt",
}
UNKNOWN: dict[str, Any] = {"simulated_accept_length": None, "server": None, "server_packages": {}, "findings": []}


def cell_figures(settings: Settings, measured: Measured) -> dict[str, Any]:
    """Everything `cell.json` says about the passes but where they ran.

    Speeds are over all passes; counts, accept length and verdicts are of the first, as greedy passes repeat each other.
    """
    pairs = measured.passes[0]
    baseline, speed = overall(measured, "baseline_tok_s"), overall(measured, "tok_s")
    speedup = speed / baseline if speed is not None and baseline is not None else None
    drafted = accepted([pair.chain for pair in pairs], settings.ceiling)
    tau = drafted["accept_length"]
    kinds = Counter(pair.verdict.kind for pair in pairs)
    return {
        **described(settings),
        "baseline_tok_s": baseline,
        "tok_s": speed,
        "speedup": speedup,
        "speedup_interval": interval(settings, measured, speedup),
        "break_even_accept_length": tau / speedup if tau is not None and speedup is not None else None,
        **drafted,
        **{kind: kinds[kind] for kind in ("identical", "near_tie", "different", "uncompared")},
        "prompts": len(pairs),
        "conversations": len({pair.id for pair in pairs}),
        "prompt_tokens": sum(pair.prompt_tokens for pair in pairs),
        "completion_tokens": sum(len(pair.chain.ids) for pair in pairs),
        "baseline_completion_tokens": sum(len(pair.plain.ids) for pair in pairs),
        **summary(measured.passes),
        "repeats": repeats(measured),
        **UNKNOWN,
        **measured.extra,
    }


def described(settings: Settings) -> dict[str, Any]:
    """What the cell measures, in the words of the config."""
    names = ("task", "variant", "engine", "algorithm", "drafter", "draft_steps", "topk", "dtype", "cuda_graphs", "attention_backend")
    told = {name: getattr(settings, name) for name in (*names, "concurrency", "turns", "max_tokens")}
    told |= {"draft_tokens": settings.verified, "flags": list(settings.flags), "ceiling": settings.ceiling}
    told |= {"topk": None} if settings.draft_steps is None else {}  # a tree of any shape
    return told if settings.served else told | {"cuda_graphs": None}


def overall(measured: Measured, name: str) -> float | None:
    """Speed over all passes of what `repeats` calls `name`."""
    pairs = [pair for row in measured.passes for pair in row]
    walls = None if measured.walls is None else (sum(wall[0] for wall in measured.walls), sum(wall[1] for wall in measured.walls))
    return speeds(pairs, walls)[name]


def repeats(measured: Measured) -> list[dict[str, float | None]]:
    """Both speeds of each pass."""
    walls: Sequence[tuple[float, float] | None] = measured.walls or [None] * len(measured.passes)
    return [speeds(row, wall) for row, wall in zip(measured.passes, walls, strict=True)]


def speeds(pairs: Sequence[Pair], walls: tuple[float, float] | None) -> dict[str, float | None]:
    """Tokens a second of both ways: of a server all tokens over the clock, prefill included; else those after the first over decoding."""
    if walls is None:
        return {"baseline_tok_s": speed_of(pairs, plain_answer), "tok_s": speed_of(pairs, chain_answer)}
    plain, chain = (sum(len(way(pair).ids) for pair in pairs) for way in (plain_answer, chain_answer))
    return {"baseline_tok_s": plain / walls[0], "tok_s": chain / walls[1]}


def speed_of(pairs: Sequence[Pair], way: Way) -> float | None:
    """Decoding speed of one way over `pairs`."""
    answers = [way(pair) for pair in pairs]
    return tokens_per_second(sum(len(answer.ids) for answer in answers), len(answers), sum(answer.decode_seconds for answer in answers))


def interval(settings: Settings, measured: Measured, speedup: float | None) -> list[float] | None:
    """Where the speed-up lies with 95 %."""

    def seconds(answer: Answer) -> float:
        return answer.seconds if settings.served else answer.decode_seconds

    return speedup_interval(measured.passes, seconds, speedup, settings.seed)


def accepted(answers: Sequence[Answer], ceiling: int) -> dict[str, Any]:
    """Accept length over all `answers`, each token with the same weight, and what it comes from.

    An answer of one token had no verify step. Where the engine did not count the steps of a longer one, the figures are missing, not 1.
    """
    nothing: dict[str, Any] = dict.fromkeys(
        ("accept_length", "server_accept_length", "verify_steps", "accepted_drafts", "accepted_histogram")
    )
    longer = [answer for answer in answers if len(answer.ids) > 1]
    if any(answer.steps is None for answer in longer):
        return nothing
    steps, drafts = (sum(value or 0 for value in values) for values in ([a.steps for a in longer], [a.drafts for a in longer]))
    counts = [sum(answer.histogram[drafts] for answer in longer if drafts < len(answer.histogram)) for drafts in range(ceiling)]
    theirs = [answer.server_drafts for answer in longer if answer.server_drafts is not None]
    return {
        "accept_length": 1 + drafts / steps if steps else None,
        "server_accept_length": 1 + sum(theirs) / steps if steps and len(theirs) == len(longer) else None,
        "verify_steps": steps,
        "accepted_drafts": drafts,
        "accepted_histogram": counts if sum(counts) == steps else None,
    }


def notes(cell: dict[str, Any]) -> list[str]:
    """What makes the figures doubtful, in words. What they mean, the report says."""
    tau = cell["accept_length"]
    found = []
    if cell["different"]:
        share = f"{cell['different']} of {cell['prompts']}"
        found.append(f"NOT LOSSLESS: {share} outputs differ from the target's own, not at a near tie; see outputs.parquet")
    if tau is None and cell["verify_steps"] is None:
        found.append("accept length unknown: the server did not count its verify steps")
    elif tau is None:
        found.append("no verify step: every answer ended with its first token")
    elif tau < IDLE_ACCEPT_LENGTH:
        found.append(f"accept length {tau:.2f} is under {IDLE_ACCEPT_LENGTH}: {IDLE[cell['algorithm']]}")
    spread = max(relative_spread(cell, "baseline_tok_s"), relative_spread(cell, "tok_s"))
    if spread > STEADY_SPREAD:
        found.append(f"repeats differ by {spread:.0%}: the machine was not quiet")
    return found


def relative_spread(cell: dict[str, Any], figure: str) -> float:
    """(highest - lowest) / highest of `figure` over the repeats."""
    values = [repeat[figure] for repeat in cell["repeats"] if repeat[figure] is not None]
    return (max(values) - min(values)) / max(values) if values else 0.0
