"""The drafter at work on one request.

Shapes: T tokens, K drafts, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.model import Drafter


class DraftChain:
    """Follows the target's tokens and proposes chains of `steps` drafts.

    Position j of its cache pairs the target's states at token j with the embedding of token j + 1.
    """

    def __init__(self, drafter: Drafter, embedding: nn.Module, steps: int) -> None:
        self.drafter, self.embedding, self.steps = drafter, embedding, steps
        self.target_ids = drafter.target_ids
        self.cache = DraftCache()
        self.last = torch.empty(0)  # state [1, H] at the newest position

    def extend(self, aux: Tensor, following: Sequence[int]) -> None:
        """Take T more positions: the target's states `aux` [T, 3, H], and the token after each."""
        ids = torch.tensor(list(following), device=aux.device)
        positions = torch.arange(self.cache.length, self.cache.length + len(ids), device=aux.device)
        states = self.drafter.decode(self.embedding(ids), self.drafter.fuse(aux), positions, self.cache)
        self.last = states[-1:]

    def propose(self) -> list[int]:
        """K drafts, as target ids: each step feeds back its own state; what it adds to the cache is forgotten."""
        length, state = self.cache.length, self.last
        drafts = [self._choice(state)]
        for position in range(length, length + self.steps - 1):
            place = torch.tensor([position], device=state.device)
            state = self.drafter.decode(self.embedding(drafts[-1]), self.drafter.fed_back(state), place, self.cache)
            drafts.append(self._choice(state))
        self.cache.crop(length)
        return torch.cat(drafts).tolist()

    def _choice(self, state: Tensor) -> Tensor:
        """The best draft token's target id [1] after `state` [1, H]."""
        return self.target_ids[self.drafter.logits(state).argmax(-1)]
