"""Which engine, and what of the target: known without torch, whose import takes seconds."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineSettings:
    """Which engine, in which dtype, where, and how it samples.

    `device_map` spreads a target that is too large for one GPU over all of them, as accelerate understands it; None: it lies on `device`.
    """

    engine: str
    dtype: str
    device: str
    threads: int
    temperature: float = 0.0
    seed: int = 0
    device_map: str | None = None


@dataclass(frozen=True)
class TargetShape:
    """What the target's config says: layers, hidden size H, and the positions that it was made for."""

    layers: int
    hidden_size: int
    context: int

    @classmethod
    def of(cls, folder: Path) -> "TargetShape":
        """Read `config.json` of the target in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        return cls(config["num_hidden_layers"], config["hidden_size"], config["max_position_embeddings"])
