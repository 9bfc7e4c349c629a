"""Floating-point operations of a training step, counted from the network's sizes: two for each multiplication of a matrix product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scripts.lib.eagle3.model import DrafterConfig
from scripts.lib.training.batches import TrainingRow

PASSES = 3  # forward, and backward to inputs and to weights


@dataclass(frozen=True)
class Work:
    """What a step has to do: `positions` of rows, slots trained at each draft step (`counts`), keys that those slots see in all.

    `other_keys` are those that positions without a slot would see at the first step.
    """

    positions: int
    counts: tuple[int, ...]
    keys: int
    other_keys: int = 0


def work_of(rows: Sequence[TrainingRow], steps: int) -> Work:
    """What training on `rows` asks for when it drafts `steps` steps."""
    slots, remaining = torch.cat([row.slots for row in rows]), torch.cat([row.remaining for row in rows])
    active = remaining > torch.arange(steps)[:, None]
    counts = active.sum(1)
    keys = (active * (slots + 1)).sum() + (counts * torch.arange(steps)).sum()
    lengths = [len(row.aux) for row in rows]
    others = sum(length * (length + 1) // 2 for length in lengths) - int((slots + 1).sum())
    return Work(sum(lengths), tuple(counts.tolist()), int(keys), others)


def model_flops(config: DrafterConfig, work: Work) -> float:
    """What the mathematics asks for: nothing for filler, recomputation or padding, and no discount for what we share between steps.

    `fc` and the teacher's head have no gradient to their inputs; the teacher has none at all. All layers but the last run at all
    positions at the first step, and at slots at later ones.
    """
    size, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_key_value_heads * config.head_dim
    fuse = 2 * work.positions * 3 * size * size
    head = 2 * size * config.draft_vocab_size
    slots, later = sum(work.counts), sum(work.counts[1:])
    layers = 0
    for number in range(config.num_hidden_layers):
        seen = 2 * size if number == 0 else size
        last = number == config.num_hidden_layers - 1
        keys = 2 * seen * kv_width * (work.positions + later)
        layer = 2 * (seen * width + width * size + 3 * size * config.intermediate_size)
        attention = 4 * width * (work.keys if last else work.keys + work.other_keys)
        layers += keys + (slots if last else work.positions + later) * layer + attention
    return 2 * fuse + PASSES * (layers + slots * head) + head * work.counts[0]


def shared_flops(config: DrafterConfig, work: Work) -> float:
    """The part of `model_flops` that is not executed, as the embedding's half of the projections serves all draft steps."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return PASSES * 2 * config.hidden_size * heads * sum(work.counts[1:])
