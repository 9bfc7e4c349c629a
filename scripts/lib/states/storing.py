"""How states may be stored, and how many bytes that takes: the one formula behind plan.md, the budget and the sizes of shards.

H hidden size; a teacher is a token whose final state is stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DTYPES = ("bfloat16", "fp8")
COMPRESSIONS = ("none", "lossless")
LAYERS = 3
SCALE_BYTES = 4
# Bytes of a number: of aux states 2 and 1 when not compressed, of final ones 2. What compression leaves was measured on the states of
# SmolLM2-135M (docs/measurements.md), and is rounded up.
AUX_WIDTH = {("bfloat16", "none"): 2.0, ("bfloat16", "lossless"): 1.4, ("fp8", "none"): 1.0, ("fp8", "lossless"): 0.88}
FINAL_WIDTH = {("bfloat16", "none"): 2.0, ("bfloat16", "lossless"): 1.4, ("fp8", "none"): 2.0, ("fp8", "lossless"): 1.0}


@dataclass(frozen=True)
class Storing:
    """`dtype` fp8 is e4m3 for the aux states, and an even grid for the final ones, which teach. `compression` changes no value."""

    dtype: str = "bfloat16"
    compression: str = "none"

    def token_bytes(self, hidden_size: int) -> float:
        """Bytes of one token's aux states: 6H in plain bfloat16."""
        scales = LAYERS * SCALE_BYTES if self.dtype == "fp8" else 0
        return LAYERS * hidden_size * AUX_WIDTH[self.dtype, self.compression] + scales

    def teacher_bytes(self, hidden_size: int) -> float:
        """Bytes of one final state: 2H when it is not compressed. Only a compressed one needs the step of its grid beside it."""
        step = SCALE_BYTES if (self.dtype, self.compression) == ("fp8", "lossless") else 0
        return hidden_size * FINAL_WIDTH[self.dtype, self.compression] + step

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
