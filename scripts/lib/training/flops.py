"""Floating-point operations of a training step, counted from the network's sizes: two for each multiplication of a matrix product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scripts.lib.eagle3.model import DrafterConfig
from scripts.lib.training.batches import TrainingRow

PASSES = 3  # forward, and backward to inputs and to weights


@dataclass(frozen=True)
class Work:
    """What a step has to do: `positions` of rows, slots trained at each draft step (`counts`), keys that those slots see in all."""

    positions: int
    counts: tuple[int, ...]
    keys: int


def work_of(rows: Sequence[TrainingRow], steps: int) -> Work:
    """What training on `rows` asks for when it drafts `steps` steps."""
    slots, remaining = torch.cat([row.slots for row in rows]), torch.cat([row.remaining for row in rows])
    active = remaining > torch.arange(steps)[:, None]
    counts = active.sum(1)
    keys = (active * (slots + 1)).sum() + (counts * torch.arange(steps)).sum()
    return Work(sum(len(row.aux) for row in rows), tuple(counts.tolist()), int(keys))


def model_flops(config: DrafterConfig, work: Work) -> float:
    """What the mathematics asks for: nothing for filler, recomputation or padding, and no discount for what we share between steps.

    `fc` and the teacher's head have no gradient to their inputs; the teacher has none at all.
    """
    size, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = 2 * config.num_key_value_heads * config.head_dim
    fuse = 2 * work.positions * 3 * size * size
    keys = 2 * work.positions * 2 * size * kv_width
    layer = 2 * (2 * size * width + width * size + 3 * size * config.intermediate_size)
    head = 2 * size * config.draft_vocab_size
    slots = sum(work.counts)
    own_keys = 2 * 2 * size * kv_width * sum(work.counts[1:])
    attention = 4 * width * work.keys
    return 2 * fuse + PASSES * (keys + slots * (layer + head) + own_keys + attention) + head * work.counts[0]


def shared_flops(config: DrafterConfig, work: Work) -> float:
    """The part of `model_flops` that is not executed, as the embedding's half of the projections serves all draft steps."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return PASSES * 2 * config.hidden_size * heads * sum(work.counts[1:])
