"""Trained tokens a second of the fast training path against the plain one, in the sizes of SmolLM2-135M, on made-up states.

The plain path is what EAGLE-3 trainers commonly do: a row at a time, every position at every step, dense masks,
the teacher's softmax over the whole target vocabulary, logits kept for autograd. Both paths must give the same loss.
The last line is JSON. Run: python -m benchmarks.train_speed --threads 2
"""

import argparse
import json
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from scripts.lib.eagle3.initial import initialise
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.training.batches import TrainingRow, collate
from scripts.lib.training.loss import Teacher, unrolled_loss
from scripts.lib.training.unroll import unroll

SIZES = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)
DRAFT_VOCAB, DECAY = 8192, 0.8


def main() -> None:
    """Time both paths on the same rows and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 8), ("prompt", 100), ("answer", 97), ("steps", 4), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    embedding, drafter = torch.randn(SIZES.vocab_size, SIZES.hidden_size) * 0.1, made_up_drafter()
    rows = [made_up_row(arguments.prompt, arguments.answer) for _ in range(arguments.rows)]
    trained = sum(len(row.slots) for row in rows)
    figures: dict[str, float] = {"trained_tokens": trained, "steps": arguments.steps, "threads": arguments.threads}
    losses = []
    for name, path in (("fast", fast), ("plain", plain)):
        loss, cost = timed(lambda path=path: path(drafter, embedding, rows, arguments.steps), drafter, arguments.repeats)  # type: ignore[misc]
        losses.append(loss)
        figures |= {f"{name}_{key}": round(value, 3) for key, value in cost.items()}
        figures[f"{name}_tokens_per_cpu_second"] = round(trained / cost["cpu_seconds"], 1)
        figures[f"{name}_tokens_per_second"] = round(trained / cost["seconds"], 1)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    figures["speed_up_cpu"] = round(figures["plain_cpu_seconds"] / figures["fast_cpu_seconds"], 2)
    print(json.dumps(figures))


def made_up_drafter() -> Drafter:
    """A random drafter whose vocabulary is every sixth target token."""
    ids = torch.arange(DRAFT_VOCAB) * (SIZES.vocab_size // DRAFT_VOCAB)
    t2d = torch.zeros(SIZES.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    drafter = Drafter(DrafterConfig.from_target(SIZES, DRAFT_VOCAB, (2, 15, 27)), ids - torch.arange(DRAFT_VOCAB), t2d)
    initialise(drafter, 0)
    return drafter


def made_up_row(prompt: int, answer: int) -> TrainingRow:
    """A row of `prompt` tokens and one answer of `answer` tokens."""
    slots = torch.arange(prompt - 1, prompt + answer - 2)
    length, size = int(slots[-1]) + 1, SIZES.hidden_size
    return TrainingRow(
        id="row",
        tokens=torch.randint(0, SIZES.vocab_size, (length + 1,)),
        aux=torch.randn(length, 3, size).bfloat16(),
        slots=slots,
        remaining=torch.arange(len(slots), 0, -1),
        final=torch.randn(len(slots), size).bfloat16(),
        argmax=torch.zeros(len(slots)),
    )


def timed(compute: Callable[[], Tensor], drafter: Drafter, repeats: int) -> tuple[Tensor, dict[str, float]]:
    """The loss that `compute` gives, and seconds, CPU seconds of a forward and backward pass, the best of `repeats`."""
    best = {"seconds": float("inf"), "cpu_seconds": float("inf")}
    loss = torch.zeros(())
    for _ in range(repeats + 1):  # the first one warms up
        drafter.zero_grad()
        start, cpu = time.perf_counter(), time.process_time()
        loss = compute()
        loss.backward()
        best = {
            "seconds": min(best["seconds"], time.perf_counter() - start),
            "cpu_seconds": min(best["cpu_seconds"], time.process_time() - cpu),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return loss.detach(), best | {"peak_memory_mib": peak}


def fast(drafter: Drafter, embedding: Tensor, rows: list[TrainingRow], steps: int) -> Tensor:
    """The path that stage `train` takes."""
    batch = collate(rows, torch.float32, "cpu")
    probabilities = Teacher(embedding, embedding[drafter.target_ids]).probabilities(batch.final)
    return unrolled_loss(unroll(drafter, embedding, batch, steps), drafter, probabilities, DECAY)[0]


def plain(drafter: Drafter, embedding: Tensor, rows: list[TrainingRow], steps: int) -> Tensor:
    """A row at a time, every position at every step; logits [T, D] and the teacher's [T, V]."""
    sums, counts = [torch.zeros(()) for _ in range(steps)], [0] * steps
    for row in rows:
        for step, (total, count) in enumerate(plain_row(drafter, embedding, row, steps)):
            sums[step] = sums[step] + total
            counts[step] += count
    return torch.stack([DECAY**step * total / count for step, (total, count) in enumerate(zip(sums, counts, strict=True))]).sum()


def plain_row(drafter: Drafter, embedding: Tensor, row: TrainingRow, steps: int) -> list[tuple[Tensor, int]]:
    """For each step the summed loss of the trained slots of `row` and their number."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length = len(row.aux)
    final = torch.zeros(length, SIZES.hidden_size)
    final[row.slots] = row.final.float()
    probabilities = torch.softmax(final @ embedding.T, -1)[:, drafter.t2d]
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    hidden, tokens, keys, values, masks, found = drafter.fuse(row.aux.float()), row.tokens[1:].long(), [], [], [], []
    for step in range(steps):
        positions = torch.arange(length) + step
        inputs = layer.inputs(embedding[tokens.roll(-step)], hidden)
        key, value = attention.keys_values(inputs, positions)
        keys.append(key)
        values.append(value)
        masks.append(torch.ones(length, length, dtype=torch.bool).tril() if not step else torch.eye(length, dtype=torch.bool))
        attended = functional.scaled_dot_product_attention(
            attention.queries(inputs, positions).transpose(0, 1)[None],
            torch.cat(keys).transpose(0, 1)[None],
            torch.cat(values).transpose(0, 1)[None],
            torch.cat(masks, 1),
            enable_gqa=True,
        )
        hidden = layer.finish(attended[0].transpose(0, 1), hidden)
        losses = -(probabilities.roll(-step, 0) * torch.log_softmax(drafter.logits(hidden), -1)).sum(-1)
        trained = torch.zeros(length)
        trained[row.slots[row.remaining > step]] = 1.0
        found.append(((losses * trained).sum(), int(trained.sum())))
    return found


if __name__ == "__main__":
    main()
