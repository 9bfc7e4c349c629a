"""A made-up but lifelike matrix of served cells, whose costs and acceptance are known, so that a fit can be judged."""

import random
from collections.abc import Sequence
from typing import Any

from tests.report_parts import cell

GPU = {"cpu": "Some CPU", "device": "cuda", "gpu": "NVIDIA H200", "driver": "580.82.07", "threads": 16}
VERSIONS = {"sglang": "0.5.17", "torch": "2.11.0+cu130"}
# Seconds of one decoding step of the target alone, by requests in it.
STEPS = {1: 1.70e-3, 4: 1.85e-3, 8: 2.75e-3, 32: 3.60e-3, 128: 8.2e-3}
DRAFT, OVERHEAD = 0.42e-3, 0.55e-3
TASKS = {"gsm8k": 0.80, "humaneval": 0.76, "mtbench": 0.70}  # chance that the first draft is accepted
FADING = 0.93  # of it at each further position


def forward(tokens: int) -> float:
    """Seconds of one forward of the target over that many tokens."""
    sizes = sorted(STEPS)
    above = next((size for size in sizes if size >= tokens), sizes[-1])
    below = max(size for size in sizes if size <= tokens)
    share = 0.0 if above == below else (tokens - below) / (above - below)
    return STEPS[below] + share * (STEPS[above] - STEPS[below])


def cycle(steps: int, tokens: int, concurrency: int) -> float:
    """Seconds of one cycle of drafting and checking."""
    return OVERHEAD + steps * DRAFT + forward(tokens * concurrency)


def histogram(first: float, steps: int, cycles: int, chance: random.Random) -> list[int]:
    """Cycles by number of accepted drafts, each position less likely than the one before it."""
    counts = [0] * (steps + 1)
    for _ in range(cycles):
        accepted = 0
        while accepted < steps and chance.random() < first * FADING**accepted:
            accepted += 1
        counts[accepted] += 1
    return counts


def latency(middle: float) -> dict[str, float]:
    """Waiting times around a middle one."""
    return {"mean": 1.1 * middle, "p50": middle, "p95": 1.9 * middle, "p99": 2.6 * middle}


def served_cell(task: str, variant: str, concurrency: int, counts: Sequence[int], seconds: float, **changes: Any) -> dict[str, Any]:
    """A cell whose cycles took `seconds` each and accepted drafts as `counts` says."""
    steps, cycles = len(counts) - 1, sum(counts)
    accepted = sum(index * count for index, count in enumerate(counts))
    tau, alone = 1 + accepted / cycles, STEPS[concurrency]
    speedup = tau * alone / seconds
    figures = {
        "baseline_tok_s": concurrency / alone,
        "tok_s": speedup * concurrency / alone,
        "speedup": speedup,
        "speedup_interval": [speedup * 0.985, speedup * 1.015],
        "accept_length": tau,
        "ceiling": steps + 1,
        "break_even_accept_length": tau / speedup,
        "identical": 31,
        "near_tie": 9,
        "prompts": 40,
        "completion_tokens": accepted + cycles,
        "baseline_completion_tokens": accepted + cycles,
        "verify_steps": cycles,
        "accepted_drafts": accepted,
        "accepted_histogram": list(counts),
        "ttft_seconds": latency(0.021 + 0.001 * concurrency),
        "baseline_ttft_seconds": latency(0.017 + 0.001 * concurrency),
        "itl_seconds": latency(seconds / tau),
        "baseline_itl_seconds": latency(alone),
        "cycle_seconds": seconds,
        "baseline_step_seconds": alone,
        "simulated_accept_length": tau * 1.02,
    }
    served = {
        "engine": "sglang",
        "algorithm": "EAGLE3",
        "dtype": "bfloat16",
        "concurrency": concurrency,
        "draft_steps": steps,
        "topk": 1,
        "draft_tokens": steps + 1,
        "cuda_graphs": True,
        "attention_backend": "triton",
        "flags": [],
        "machine": GPU,
        "versions": {"torch": "2.13.0"},
        "notes": [],
        "server": {"command": ["python", "-m", "sglang.launch_server", "--speculative-num-steps", str(steps)], "version": "0.5.17"},
        "server_packages": VERSIONS,
        "findings": [],
    }
    return cell(task, variant, **figures | served | changes)


def chain_cell(task: str, steps: int, concurrency: int, chance: random.Random, noise: float = 0.01, **changes: Any) -> dict[str, Any]:
    """A cell of the trained drafter as a chain of `steps`, its cycle off by a share of about `noise`."""
    counts = histogram(TASKS[task], steps, 4000, chance)
    seconds = cycle(steps, steps + 1, concurrency) * (1 + chance.gauss(0, noise))
    return served_cell(task, f"eagle3_{steps}", concurrency, counts, seconds, **changes)


def matrix(seed: int = 7) -> list[dict[str, Any]]:
    """Three tasks at concurrencies 1, 8 and 32: chains of 3 and 5, one of them also without CUDA graphs, n-grams, and a foreign drafter."""
    chance, cells = random.Random(seed), []
    for task, first in TASKS.items():
        for concurrency in (1, 8, 32):
            cells += [chain_cell(task, steps, concurrency, chance) for steps in (3, 5)]
            counts = histogram(first - 0.2, 3, 3000, chance)
            foreign = {"drafter": "hub:org/other-eagle3"}
            cells.append(served_cell(task, "other", concurrency, counts, cycle(3, 4, concurrency) * 1.02, **foreign))
            counts = histogram(0.25, 7, 3000, chance)
            ngram = {
                "algorithm": "NGRAM",
                "drafter": "",
                "draft_steps": None,
                "draft_tokens": 8,
                "ceiling": 8,
                "simulated_accept_length": None,
            }
            cells.append(served_cell(task, "ngram", concurrency, counts, forward(min(128, 4 * concurrency)) * 1.25, **ngram))
        counts, slow = histogram(first, 3, 4000, chance), 6.1e-3
        plain = {"cuda_graphs": False, "baseline_tok_s": 330.0, "tok_s": 330.0 * 0.92, "speedup": 0.92, "speedup_interval": [0.89, 0.95]}
        eager = served_cell(task, "eagle3_3_eager", 1, counts, slow, **plain)
        cells.append(eager | {"break_even_accept_length": eager["accept_length"] / 0.92, "baseline_step_seconds": 1 / 330})
    return cells
