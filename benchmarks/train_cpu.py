"""Trained tokens a second of the trainer on a CPU, beside the plain path and beside what matrix products alone would allow.

The steps are those of the default run's curriculum, one half of them with one draft step and the other with the shape's, or
all of them with as many as asked for. Products are in bf16 where the processor has instructions for them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.train_reference import PlainStep
from benchmarks.train_rows import Shape
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.flops import Work, model_flops, shared_flops, work_of
from scripts.lib.training.loss import Teacher
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packing import size_of, spread
from scripts.lib.training.row_step import RowStep
from scripts.lib.training.stepping import Recipe

DECAY, CLIP, RATE = 0.8, 0.5, 1e-4
Group = Sequence[TrainingRow]


@dataclass
class Spent:
    """Trained tokens, wall and CPU seconds of some steps."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def time(self, compute: Callable[[], float], tokens: int) -> float:
        """What `compute` returns, its time added."""
        start, cpu = time.perf_counter(), time.process_time()
        found = compute()
        self.seconds += time.perf_counter() - start
        self.cpu_seconds += time.process_time() - cpu
        self.tokens += tokens
        return found

    def figures(self, name: str) -> dict[str, float]:
        """Rates by either clock."""
        return {
            f"{name}trained_tokens_per_second": round(self.tokens / self.seconds, 1),
            f"{name}trained_tokens_per_cpu_second": round(self.tokens / self.cpu_seconds, 1),
        }


def on_cpu(shape: Shape, rows: Sequence[TrainingRow], arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the trainer, and of the plain path if that is asked for; the losses of both must be the same."""
    sets = spread([size_of(row) for row in rows], range(len(rows)), arguments.slots)
    groups = [[rows[index] for index in indices] for indices in sets]
    draft_steps = (arguments.ttt,) if arguments.ttt else (1, shape.steps)
    recipe = Recipe(product_dtype(), "cpu", DECAY, CLIP, soft_cross_entropy_, optimizer=shape.optimizer)
    torch.manual_seed(1)
    embedding, head = (torch.randn(shape.vocabulary, shape.hidden) * 0.02 for _ in range(2))
    drafter = shape.drafter("cpu")
    fast = RowStep(drafter, Teacher(embedding, head[drafter.target_ids]), recipe)
    for steps in draft_steps:
        for number in range(arguments.warmup):
            fast_step(fast, groups[number % len(groups)], steps)
    rate, total, flops = product_rate(shape, recipe.dtype), Spent(), 0.0
    figures: dict[str, Any] = {}
    for steps in draft_steps:
        spent = Spent()
        for number in range(arguments.steps // len(draft_steps)):
            group = groups[number % len(groups)]
            work = work_of(group, steps)
            spent.time(partial(fast_step, fast, group, steps), work.counts[0])
            flops += executed(fast, work)
        figures |= spent.figures(f"ttt_{steps}_")
        total = Spent(total.tokens + spent.tokens, total.seconds + spent.seconds, total.cpu_seconds + spent.cpu_seconds)
    figures |= total.figures("") | {
        "dtype": str(recipe.dtype).removeprefix("torch."),
        "threads": arguments.threads,
        "gflops_per_cpu_second": round(flops / total.cpu_seconds / 1e9, 1),
        "product_gflops_per_cpu_second": round(rate / 1e9, 1),
        "trained_tokens_per_cpu_second_of_products_alone": round(total.tokens * rate / flops, 1),
    }
    if arguments.vs == "reference":
        plain = reference(shape, (embedding, head), groups[: arguments.reference_steps], draft_steps, recipe)
        figures |= plain.figures("reference_")
        figures["speedup_over_reference"] = round(plain.cpu_seconds / plain.tokens * total.tokens / total.cpu_seconds, 2)
    return figures


def product_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it, else float32."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else torch.float32


def fast_step(fast: RowStep, group: Group, steps: int) -> float:
    """One optimizer step of the trainer on the rows of `group`; its loss."""
    return float(fast.train(fast.load([group]), work_of(group, steps).counts, RATE).loss)


def executed(fast: RowStep, work: Work) -> float:
    """Floating-point operations of a step, those left out that its draft steps share."""
    config = fast.weights.masters.config
    return model_flops(config, work) - shared_flops(config, work)


def product_rate(shape: Shape, dtype: torch.dtype, repeats: int = 5) -> float:
    """Floating-point operations a CPU second of the head's matrix products, the best of `repeats`."""
    states, head = torch.randn(shape.slots, shape.hidden).to(dtype), torch.randn(shape.draft_vocabulary, shape.hidden).to(dtype)
    logits, back, gradient = states @ head.T, torch.empty_like(states), torch.empty_like(head)
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        torch.mm(states, head.T, out=logits)
        torch.mm(logits, head, out=back)
        torch.mm(logits.T, states, out=gradient)
        seconds.append(time.process_time() - start)
    return 6 * states.numel() * len(head) / min(seconds)


def reference(
    shape: Shape, target: tuple[torch.Tensor, torch.Tensor], groups: Sequence[Group], draft_steps: Sequence[int], recipe: Recipe
) -> Spent:
    """What the plain path takes for `groups` with each number of draft steps; `target` are embedding and head [V, H]."""
    (embedding, head), spent = target, Spent()
    for steps in draft_steps:
        plain = PlainStep(shape.drafter("cpu"), embedding, head, recipe)
        drafter = shape.drafter("cpu")
        fast = RowStep(drafter, Teacher(embedding, head[drafter.target_ids]), recipe)
        for group in groups:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.dtype == torch.bfloat16):
                loss = spent.time(partial(plain.train, group, steps, RATE), sum(len(row.slots) for row in group))
            tolerance = 1e-3 if recipe.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(fast_step(fast, group, steps), loss, rtol=tolerance, atol=0)
    return spent
