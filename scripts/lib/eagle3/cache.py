"""What a drafter at work remembers of the tokens before.

Shapes: T new tokens, L tokens in all, G key/value heads, E head size.
"""

from collections import defaultdict

import torch
from torch import Tensor


class LayerCache:
    """Keys and values [L, G, E] of the tokens decoded so far; grows by doubling, shrinks by forgetting."""

    def __init__(self) -> None:
        self.length = 0
        self.keys = self.values = torch.empty(0)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `keys` and `values` [T, G, E]; all of them [L, G, E] come back as views."""
        end = self.length + len(keys)
        if end > len(self.keys):
            self.keys, self.values = (self._grown(old, new, end) for old, new in ((self.keys, keys), (self.values, values)))
        self.keys[self.length : end] = keys
        self.values[self.length : end] = values
        self.length = end
        return self.keys[:end], self.values[:end]

    def crop(self, length: int) -> None:
        """Forget every token from `length` on."""
        self.length = min(self.length, length)

    def _grown(self, old: Tensor, new: Tensor, end: int) -> Tensor:
        grown = new.new_empty(max(2 * end, 64), *new.shape[1:])
        if self.length:
            grown[: self.length] = old[: self.length]
        return grown


class DraftCache:
    """The caches of all layers of one drafter, by their numbers, for one request."""

    def __init__(self) -> None:
        self.layers: defaultdict[int, LayerCache] = defaultdict(LayerCache)

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Forget every token from `length` on."""
        for layer in self.layers.values():
            layer.crop(length)
