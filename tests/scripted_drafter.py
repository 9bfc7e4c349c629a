"""A drafter whose drafts are known beforehand, and whose states are real."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.model import Drafter, DrafterConfig

BOUNDARIES = (2, 4, 5)


def random_drafter(model: PreTrainedModel, seed: int = 0) -> Drafter:
    """An untrained drafter for `model` whose draft vocabulary is the whole target vocabulary."""
    torch.manual_seed(seed)
    size = model.config.vocab_size
    config = DrafterConfig.from_target(model.config, size, BOUNDARIES)
    drafter = Drafter(config, torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))
    return drafter.eval().requires_grad_(False)


class ScriptedDrafter(Drafter):
    """Drafts the tokens of `sequence` by position, except after the positions in `wrong`, where it drafts the token after.

    Its draft vocabulary keeps every second target id and those of `sequence`, so that ids must go through `d2t`.
    """

    def __init__(self, model: PreTrainedModel, sequence: list[int], wrong: frozenset[int] = frozenset(), layers: int = 1) -> None:
        torch.manual_seed(0)
        kept = sorted(set(sequence) | set(range(0, model.config.vocab_size, 2)))
        t2d = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        t2d[kept] = True
        config = replace(DrafterConfig.from_target(model.config, len(kept), BOUNDARIES), num_hidden_layers=layers)
        super().__init__(config, torch.tensor(kept) - torch.arange(len(kept)), t2d)
        self.eval().requires_grad_(False)
        self.script = [kept.index(token) for token in sequence]
        self.wrong, self.place = wrong, 0
        self.seen = DraftCache()

    def decode(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        self.place, self.seen = int(positions[-1]), cache
        return super().decode(embeds, hidden, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        scores = torch.zeros(1, self.config.draft_vocab_size)
        place = min(self.place + 2, len(self.script) - 1)
        scores[0, (self.script[place] + (self.place in self.wrong)) % self.config.draft_vocab_size] = 1.0
        return scores
