"""How states may be stored, and how many bytes that takes: the one formula behind plan.md, the budget and the sizes of shards.

H hidden size; a teacher is a token whose final state is stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DTYPES = ("bfloat16", "fp8")
COMPRESSIONS = ("none", "lossless")
LAYERS = 3
SCALE_BYTES = 4
# What is left of a number's bytes: measured on the states of SmolLM2-135M (0.69 and 0.86, docs/measurements.md), rounded up.
LEFT = {("bfloat16", "none"): 1.0, ("bfloat16", "lossless"): 0.7, ("fp8", "none"): 1.0, ("fp8", "lossless"): 0.88}
WIDTH = {"bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Storing:
    """`dtype` of the aux states; the final states, which teach, always stay bfloat16. `compression` changes no value."""

    dtype: str = "bfloat16"
    compression: str = "none"

    def token_bytes(self, hidden_size: int) -> float:
        """Bytes of one token's aux states: 6H in plain bfloat16."""
        scales = LAYERS * SCALE_BYTES if self.dtype == "fp8" else 0
        return LAYERS * hidden_size * WIDTH[self.dtype] * LEFT[self.dtype, self.compression] + scales

    def teacher_bytes(self, hidden_size: int) -> float:
        """Bytes of one final state: 2H when it is not compressed."""
        return hidden_size * WIDTH["bfloat16"] * LEFT["bfloat16", self.compression]

    def state_bytes(self, tokens: float, teachers: float, hidden_size: int) -> float:
        """Bytes of the states of `tokens`, of which `teachers` have a final state."""
        return tokens * self.token_bytes(hidden_size) + teachers * self.teacher_bytes(hidden_size)

    def __str__(self) -> str:
        return f"hidden.stored: {self.dtype} with hidden.compression: {self.compression}"


def every_storing() -> Iterator[Storing]:
    """All ways to store states, the exact ones first."""
    for dtype in DTYPES:
        for compression in COMPRESSIONS:
            yield Storing(dtype, compression)
