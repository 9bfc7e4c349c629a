"""The tracked settings of stage hidden."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.eagle3.layers import checked_boundaries, default_boundaries
from scripts.lib.states.checks import BETWEEN
from scripts.lib.states.storing import Storing


@dataclass(frozen=True)
class HiddenSettings:
    """`dtype` is that of the forward pass; `layers` is auto or three boundary ids."""

    engine: str
    dtype: str
    batch_tokens: int
    tokens_per_shard: int
    layers: str | Sequence[int]
    stored: str = "bfloat16"
    compression: str = "none"
    mode: str = "dumped"

    @property
    def together(self) -> int:
        """Tokens of rows that are computed together; a server decides that itself, and no two times alike."""
        return 1 if self.engine == "sglang" else self.batch_tokens

    @property
    def noise(self) -> str:
        """Whose rounding may part states from the reference, which is always transformers."""
        return self.dtype + BETWEEN if self.engine == "sglang" else self.dtype

    @property
    def storing(self) -> Storing:
        """How states are written."""
        return Storing(self.stored, self.compression)

    def boundaries(self, layers: int) -> list[int]:
        """The three boundary ids in a target of `layers` layers."""
        return default_boundaries(layers) if isinstance(self.layers, str) else checked_boundaries(self.layers, layers)
