"""Where an answer ends."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """An answer ends after its first token in `eos_ids`, which it keeps, or after `max_tokens`."""

    eos_ids: frozenset[int]
    max_tokens: int

    def reached(self, output: Sequence[int]) -> bool:
        """Whether `output`, which holds at least one token, has ended."""
        return len(output) >= self.max_tokens or output[-1] in self.eos_ids

    def cut(self, tokens: Sequence[int], written: int) -> list[int]:
        """What of `tokens` belongs to an answer that holds `written` tokens already: nothing after its end."""
        room = list(tokens[: self.max_tokens - written])
        end = next((place for place, token in enumerate(room, 1) if token in self.eos_ids), len(room))
        return room[:end]
