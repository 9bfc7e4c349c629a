"""How much memory training takes, estimated from sizes before it starts. On GPUs it was 7 % below to 11 % above what was measured."""

from dataclasses import dataclass

import torch

from scripts.lib.eagle3.model import Drafter
from scripts.lib.training.distil import TEACHERS
from scripts.lib.training.packed import Capacity

MASTER = 16  # bytes of a weight in float32, its gradient and AdamW's two moments


@dataclass(frozen=True)
class Memory:
    """Bytes of weights with all that belongs to them, and of what a batch leaves behind for the backward pass."""

    weights: int
    batch: int

    def __str__(self) -> str:
        gib = 2**30
        total = (self.weights + self.batch) / gib
        return f"{total:.1f} GiB: {self.weights / gib:.1f} for weights, gradients and optimizer, {self.batch / gib:.1f} for a batch"


def estimate(drafter: Drafter, capacity: Capacity, steps: int, dtype: torch.dtype) -> Memory:
    """Memory of training `drafter` for `steps` draft steps on batches of `capacity`, with matrix products in `dtype`.

    Kept of a slot at each step: three times the feed-forward width, five states, four sets of query heads, keys and values;
    logits exist for one chunk of slots.
    """
    config, size = drafter.config, dtype.itemsize
    weights = sum(parameter.numel() for parameter in drafter.parameters())
    copies = 2 * size if dtype != torch.float32 else 0  # a copy of each weight and its gradient
    target = (config.vocab_size + config.draft_vocab_size) * config.hidden_size * size
    heads = 4 * config.num_attention_heads + 2 * config.num_key_value_heads
    slot = 3 * config.intermediate_size + 5 * config.hidden_size + heads * config.head_dim
    position = 10 * config.hidden_size
    logits = TEACHERS * (steps + 1) * config.draft_vocab_size
    return Memory((MASTER + copies) * weights + target, (capacity.slots * steps * slot + capacity.positions * position + logits) * size)
