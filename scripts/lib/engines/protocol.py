"""What every target engine offers, whatever runs behind it.

Shapes: T tokens of a row, F positions of it where a teacher is wanted, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True)
class Request:
    """One prompt to answer; `key` names it in the completion and seeds its sampling."""

    key: str
    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """The engine's own token ids, with the end-of-turn token if it was generated.

    `finish_reason` is `stop` after an end-of-turn token and `length` when max_tokens were written before one.
    """

    key: str
    output_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class StateRequest:
    """One token row, and the positions in it where the final state is wanted, ascending."""

    input_ids: tuple[int, ...]
    final_index: tuple[int, ...]


@dataclass(frozen=True)
class RowStates:
    """States of one row: `aux` [T, 3, H] of every token, `final` [F, H] after the last norm and `argmax` [F] of its logits."""

    aux: torch.Tensor
    final: torch.Tensor
    argmax: torch.Tensor


class TargetEngine(Protocol):
    """A target that can write answers and show its states.

    `generate` and `states` take one batch; equal batches give equal results, other batch compositions may differ in the last bits.
    """

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer `requests`; completions come in the same order."""
        ...

    def lane(self) -> AbstractContextManager[None]:
        """A batch whose states are asked for inside may run while that before it does."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """What is asked for inside does not wait for batches whose states were asked for before."""
        ...

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Logits [F, V] of final states [F, H]."""
        ...

    def states(self, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        """States of `rows` at the three boundary ids (state k = residual stream entering layer k), in the same order."""
        ...

    def reference(self, input_ids: Sequence[int], boundaries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`aux` [T, 3, H] and `final` [T, H] of one row in the plainest way there is, to check `states` against."""
        ...
