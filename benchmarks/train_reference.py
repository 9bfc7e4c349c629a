"""What EAGLE-3 trainers commonly do, as a baseline: a row at a time, every position at every step, dense masks, the teacher's
softmax over the whole target vocabulary, logits kept for autograd.

Shapes: T positions of a row, H hidden size, D draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.eagle3.model import Drafter
from scripts.lib.states.encoded import decoded
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.stepping import Recipe


class PlainStep:
    """Optimizer steps of `drafter` with one backward pass for all rows of a step; `embedding` and `head` [V, H] are the target's."""

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, recipe: Recipe) -> None:
        self.drafter, self.embedding, self.head, self.recipe = drafter, embedding, head, recipe
        self.optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=0.0)

    def train(self, rows: Sequence[TrainingRow], steps: int, learning_rate: float) -> float:
        """One optimizer step on `rows`; its loss."""
        loss = plain_loss(self, rows, steps)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return loss.item()


def plain_loss(plain: PlainStep, rows: Sequence[TrainingRow], steps: int) -> Tensor:
    """Sum over draft steps of decay^step times the mean loss of the slots trained at it."""
    sums, counts = [torch.zeros(()) for _ in range(steps)], [0] * steps
    for row in rows:
        for step, (total, count) in enumerate(plain_row(plain, row, steps)):
            sums[step] = sums[step] + total
            counts[step] += count
    return torch.stack(
        [plain.recipe.decay**step * total / count for step, (total, count) in enumerate(zip(sums, counts, strict=True))]
    ).sum()


def plain_row(plain: PlainStep, row: TrainingRow, steps: int) -> list[tuple[Tensor, int]]:
    """For each step the summed loss of the trained slots of `row` and their number."""
    drafter, embedding = plain.drafter, plain.embedding
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    length = len(row.aux)
    final = torch.zeros(length, row.final.shape[1])
    final[row.slots] = decoded(row.final).float()
    probabilities = torch.softmax(final @ plain.head.T, -1)[:, drafter.t2d]
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    hidden, tokens, keys, values, masks, found = drafter.fuse(decoded(row.aux).float()), row.tokens[1:].long(), [], [], [], []
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
