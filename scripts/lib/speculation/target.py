"""The target with the key/value cache of one request.

Shapes: N new tokens, H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from scripts.lib.engines.decoder import final_states
from scripts.lib.engines.key_values import PreallocatedLayer
from scripts.lib.engines.transformers_engine import forward_states


class CachedTarget:
    """Feeds tokens of one request and remembers them, up to `capacity` tokens; forgetting some costs nothing.

    Plain and speculative decoding share it, so that they differ in the number of tokens a forward pass takes and in nothing else.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.layers = [PreallocatedLayer(1, capacity) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))

    def final(self, tokens: Sequence[int]) -> Tensor:
        """States [N, H] after the last norm of N new `tokens`."""
        return final_states(self.model, self._ids(tokens), self.cache)[0]

    def final_and_aux(self, tokens: Sequence[int], boundaries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `final`, with the states [N, 3, H] at `boundaries` that a drafter listens to."""
        return forward_states(self.model, self._ids(tokens), self.cache, boundaries)

    def choices(self, final: Tensor) -> list[int]:
        """The greedy next token after each of the states `final` [N, H].

        A CPU multiplies a few float32 states twice as fast when the head stands on the left; one state gives the same either way.
        """
        head = self.model.lm_head
        if final.dtype == torch.float32 and head.bias is None:
            return torch.mm(head.weight, final.T).argmax(0).tolist()
        return head(final).argmax(-1).tolist()

    def crop(self, length: int) -> None:
        """Forget every token from `length` on."""
        for layer in self.layers:
            layer.fill(length)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.model.device)
