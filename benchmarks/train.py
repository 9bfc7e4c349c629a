"""Trained tokens a second of the trainer on made-up states of a known target's sizes and real lengths of conversations.

Time is wall time of whole optimizer steps: loading, forward, loss, backward, optimizer. Positions of prompts are not counted.
`--vs specforge` trains the same rows with SpecForge's own model, loss and optimizer (its package must be importable) in
batches padded to the longest row; `--vs speculators` with those of that package, in sequences packed to multiples of the longest row;
`--vs reference`, on a CPU unless said otherwise, does with the plain path of `benchmarks.train_reference`, and checks
that both have the same losses (`benchmarks.train_cpu`).
The last line is JSON. Run: python -m benchmarks.train --device cuda --shape llama-8b --vs specforge
"""

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # also for `python benchmarks/train.py`
from benchmarks.train_cpu import on_cpu
from benchmarks.train_rows import LENGTHS, SHAPES, Shape, conversations, made_up_rows, one_long
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.flops import model_flops, shared_flops, work_of
from scripts.lib.training.loss import Teacher
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import Capacity
from scripts.lib.training.packing import size_of, split, spread
from scripts.lib.training.stepping import Recipe, Stepper
from scripts.lib.training.trainer import new_stepper

PEAK = 790e12  # bf16 matrix products that an H200 was seen to reach
DECAY, CLIP, RATE = 0.8, 0.5, 1e-4
log = logging.getLogger("benchmark")


def main() -> None:
    """Measure and print one line of JSON."""
    arguments = parsed()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    shape = SHAPES[arguments.shape]
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
    steps = arguments.ttt or shape.steps
    arguments.slots = arguments.slots or shape.slots
    spans = conversations(arguments.rows, arguments.longest or shape.longest, arguments.lengths)
    if shape.conversation:
        prompt, answer = shape.conversation
        spans = [[(prompt, prompt + answer)]] * arguments.rows
    if arguments.long:
        spans = [one_long(arguments.long, arguments.long // 10)] * arguments.rows
    rows = made_up_rows(shape, spans)
    figures: dict[str, Any] = {"shape": arguments.shape, "device": arguments.device, "ttt": steps, "slots": arguments.slots}
    figures |= {"fp8": arguments.fp8, "rows": len(rows)}
    figures["mean_row"] = round(sum(len(row.aux) for row in rows) / len(rows), 1)
    figures["trained_share"] = round(sum(len(row.slots) for row in rows) / sum(len(row.aux) for row in rows), 3)
    if arguments.device == "cpu" and arguments.vs in {"none", "reference"}:
        print(json.dumps(figures | on_cpu(shape, rows, arguments)))
        return
    figures |= ours(shape, rows, steps, arguments)
    if arguments.vs == "specforge":
        from benchmarks.train_specforge import specforge

        figures |= best_of_batches(lambda size: specforge(shape, rows, steps, size, arguments.peer_steps), arguments.peer_batch, figures)
    if arguments.vs == "speculators":
        from benchmarks.train_speculators import Trial, speculators

        lengths = [size * (arguments.longest or shape.longest) for size in arguments.peer_batch]
        for kind in arguments.peer_loss:
            trial = Trial(arguments.device, steps, arguments.peer_steps, kind)
            figures[kind] = best_of_batches(partial(speculators, shape, rows, trial), lengths, figures)
    print(json.dumps(figures))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--vs", choices=("none", "reference", "specforge", "speculators"), default=None)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="JSON list of [prompt, answer, prompt, answer, ...] tokens")
    parser.add_argument("--long", type=int, default=0, help="rows of this one length instead")
    for name, default, text in (
        ("rows", 256, "rows to draw"),
        ("longest", 0, "rows are cut here; 0: the shape's"),
        ("slots", 0, "trained tokens of a batch; 0: the shape's"),
        ("accumulate", 1, "packed batches of an optimizer step"),
        ("ttt", 0, "draft steps; 0: the shape's"),
        ("steps", 20, "timed optimizer steps"),
        ("warmup", 3, "steps before the clock"),
        ("peer-steps", 30, "timed steps of a peer"),
        ("reference-steps", 2, "steps of the reference"),
        ("threads", 1, "of the CPU"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument(
        "--peer-batch",
        type=int,
        nargs="+",
        default=[1, 2, 4],
        help="rows of a batch, or longest rows of a sequence, that a peer is tried with; its best counts",
    )
    parser.add_argument("--peer-loss", nargs="+", choices=("fused", "eager"), default=["fused"], help="of speculators")
    parser.add_argument("--fp8", action="store_true", help="our products of numbers in 8 bits (`precision: fp8`); on a GPU")
    parser.add_argument("--recompute", action="store_true", help="compute draft steps again in the backward pass")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    arguments = parser.parse_args()
    if arguments.fp8 and arguments.device == "cpu":
        parser.error("--fp8 is for --device cuda")
    arguments.vs = arguments.vs or ("reference" if arguments.device == "cpu" else "none")
    return arguments


def ours(shape: Shape, rows: Sequence[TrainingRow], steps: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of what the trainer runs on this device."""
    device = arguments.device
    groups = planned(rows, arguments)
    capacity = Capacity.of(*(batch for group in groups for batch in group))
    drafter, head = shape.drafter(device), torch.randn(shape.draft_vocabulary, shape.hidden, device=device) * 0.02
    embedding = torch.randn(shape.vocabulary, shape.hidden, device=device) * 0.02
    trained = replace(recipe(device), recompute=arguments.recompute, optimizer=shape.optimizer, fp8=arguments.fp8)
    step = new_stepper(drafter, Teacher(embedding, head), trained, capacity)
    warm, timed = groups[: arguments.warmup], groups[arguments.warmup :]
    with logged("warm-up, capacity %s", capacity):
        run(step, warm, steps)
    peak_reset(device)
    start, cpu = time.perf_counter(), time.process_time()
    losses = run(step, timed, steps)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    if arguments.profile:
        profiled(lambda: run(step, timed[:2], steps))
    work = work_of([row for group in timed for batch in group for row in batch], steps)
    model, shared = (count(drafter.config, work) / seconds / 1e12 for count in (model_flops, shared_flops))
    on_cuda = {"tflops_executed": round(model - shared, 2), "share_of_peak": round(model * 1e12 / PEAK, 3), "peak_gb": peak_gb(device)}
    on_cpu = {
        "trained_tokens_per_cpu_second": round(work.counts[0] / cpu_seconds, 1),
        "gflops_per_cpu_second": round(model * 1e3 * seconds / cpu_seconds, 1),
    }
    return {
        "trained_tokens_per_second": round(work.counts[0] / seconds, 1),
        "tokens_per_second": round(work.positions / seconds, 1),
        "seconds_per_step": round(seconds / len(timed), 4),
        "fill": round(work.counts[0] / (capacity.slots * sum(len(group) for group in timed)), 3),
        "tflops": round(model, 3),
        "loss": [round(value, 4) for value in (losses[0], losses[-1])],
    } | (on_cuda if device == "cuda" else on_cpu)


def recipe(device: str) -> Recipe:
    """bf16 on a GPU, float32 elsewhere."""
    return Recipe(torch.bfloat16 if device == "cuda" else torch.float32, device, DECAY, CLIP, soft_cross_entropy_)


@contextlib.contextmanager
def logged(text: str, *values: Any) -> Iterator[None]:
    """Log how long what is inside took."""
    start = time.perf_counter()
    yield
    log.info(f"{text}: %.1f s", *values, time.perf_counter() - start)


def planned(rows: Sequence[TrainingRow], arguments: argparse.Namespace) -> list[list[list[TrainingRow]]]:
    """Rows of each batch of each optimizer step, cut as the trainer cuts them, repeated as needed."""
    sizes = [size_of(row) for row in rows]
    groups = [
        [[rows[index] for index in batch] for batch in split(sizes, indices, arguments.slots)]
        for indices in spread(sizes, range(len(rows)), arguments.slots * arguments.accumulate)
    ]
    return [groups[number % len(groups)] for number in range(arguments.steps + arguments.warmup)]


def run(step: Stepper, groups: list[list[list[TrainingRow]]], steps: int) -> list[float]:
    """One optimizer step for each of `groups`; their losses, fetched at the end."""
    batches = step.load([batch for group in groups for batch in group])
    figures = []
    for group in groups:
        work = work_of([row for batch in group for row in batch], steps)
        figures.append(step.train(islice(batches, len(group)), work.counts, RATE))
    return [float(figure.loss) for figure in figures]


def best_of_batches(peer: Callable[[int], dict[str, Any]], sizes: Sequence[int], figures: dict[str, Any]) -> dict[str, Any]:
    """The peer at each batch size, and our speed-up over its fastest, with the memory that this one takes."""
    tried = {}
    for size in sizes:
        try:
            tried[size] = peer(size)
        except torch.OutOfMemoryError:
            tried[size] = {"trained_tokens_per_second": 0.0, "peak_gb": None}
        log.info("peer, batch %d: %s", size, tried[size])
    best = max(tried, key=lambda size: tried[size]["trained_tokens_per_second"])
    found = {
        "peer": tried,
        "peer_trained_tokens_per_second": tried[best]["trained_tokens_per_second"],
        "peer_peak_gb": tried[best]["peak_gb"],
    }
    memory = {"share_of_peer_memory": round(figures["peak_gb"] / found["peer_peak_gb"], 3)} if "peak_gb" in figures else {}
    return found | {"speedup": ratio(figures | found, "trained_tokens_per_second", "peer_trained_tokens_per_second")} | memory


def ratio(figures: dict[str, Any], ours: str, theirs: str) -> float:
    """Figure `ours` over figure `theirs`."""
    return round(float(figures[ours]) / float(figures[theirs]), 2)


def peak_reset(device: str) -> None:
    """Start counting peak memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float | None:
    """Peak memory of tensors on the device since `peak_reset`, in 10^9 bytes; None on the CPU."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None


def profiled(compute: Callable[[], Any]) -> None:
    """Print the kernels that take longest in `compute`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        compute()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
