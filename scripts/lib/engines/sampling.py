"""The next token of every row: the best one, or a seeded draw that no other row can change.

Shapes: B rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Sampler:
    """Greedy at temperature 0, else draws from softmax(logits / temperature) with one generator per request key."""

    temperature: float
    seed: int
    generators: dict[str, torch.Generator] = field(default_factory=dict)

    def pick(self, logits: torch.Tensor, keys: Sequence[str]) -> torch.Tensor:
        """Next token ids [B] of the rows named `keys`, given `logits` [B, V]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        cumulative = torch.softmax(logits.double() / self.temperature, dim=-1).cumsum(-1)
        draws = torch.cat([torch.rand(1, generator=self.generator(key), dtype=torch.float64) for key in keys])
        scaled = draws.to(logits.device)[:, None] * cumulative[:, -1:]  # the sum is not exactly one
        return torch.searchsorted(cumulative, scaled, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)

    def generator(self, key: str) -> torch.Generator:
        """The generator of request `key`: seeded by (seed, key) and advanced once a token."""
        if key not in self.generators:
            digest = hashlib.sha256(f"{self.seed}\n{key}".encode()).digest()
            self.generators[key] = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return self.generators[key]
