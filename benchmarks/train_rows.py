"""Training rows for measurements: made-up states, lengths of real ShareGPT conversations, sizes of known targets."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.optimizers import ADAMW, MUON
from scripts.lib.training.slots import trained_slots

LENGTHS = Path(__file__).with_name("sharegpt-lengths.json")
POOL = 8192  # positions of made-up states that rows share views of


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of the drafter that is trained for it."""

    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    steps: int
    layers: int
    theta: float
    slots: int = 8192  # trained tokens of a batch
    longest: int = 2048  # tokens of a row
    conversation: tuple[int, int] | None = None  # prompt and answer of every row; None: drawn from real lengths
    own: Mapping[str, Any] = field(default_factory=dict)  # of the drafter's config, what is not as it comes from the target
    optimizer: str = ADAMW

    def target(self) -> LlamaConfig:
        """A Llama config of these sizes."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=self.head_dim,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
        )

    def config(self) -> DrafterConfig:
        """The drafter's."""
        boundaries = (2, self.layers // 2, self.layers - 3)
        return replace(DrafterConfig.from_target(self.target(), self.draft_vocabulary, boundaries), **self.own)

    def drafter(self, device: str) -> Drafter:
        """A random drafter on `device`, built there; its vocabulary is spread evenly over the target's."""
        ids = torch.arange(self.draft_vocabulary) * (self.vocabulary // self.draft_vocabulary)
        t2d = torch.zeros(self.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        torch.manual_seed(0)
        with torch.device(device):
            drafter = Drafter(
                self.config(),
                (ids - torch.arange(len(ids), device=ids.device)).to(device),
                t2d.to(device),
            )
            for parameter in drafter.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
        return drafter


SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 7, 32, 500000.0),
    "kimi": Shape(7168, 18432, 64, 64, 128, 163840, 32000, 4, 61, 50000.0),
    "smollm2": Shape(576, 1536, 9, 3, 64, 49152, 16384, 5, 30, 100000.0),
    # The drafter of configs/smollm2-h200.yaml.
    "smollm2-h200": Shape(
        *(576, 1536, 9, 3, 64, 49152, 40960, 4, 30, 100000.0),
        own={"num_hidden_layers": 3, "intermediate_size": 4096, "fc_norm": True, "norm_output": True},
        optimizer=MUON,
    ),
    "demo": Shape(576, 1536, 9, 3, 64, 49152, 8192, 2, 30, 100000.0, 400, 256, (81, 108)),
}


def conversations(count: int, longest: int, path: Path = LENGTHS, seed: int = 0) -> list[list[tuple[int, int]]]:
    """Answer spans of `count` conversations drawn from the lengths in `path` (prompt, answer, prompt, answer, ...), cut at `longest`."""
    lengths = json.loads(path.read_text())
    found: list[list[tuple[int, int]]] = []
    draw = random.Random(seed)
    while len(found) < count:
        spans, place = [], 0
        turns = draw.choice(lengths)
        for prompt, answer in zip(turns[::2], turns[1::2], strict=True):
            spans.append((place + prompt, min(place + prompt + answer, longest)))
            place += prompt + answer
        spans = [(start, end) for start, end in spans if end - start > 2]
        if spans:
            found.append(spans)
    return found


def one_long(length: int, prompt: int) -> list[tuple[int, int]]:
    """The span of one answer behind `prompt` tokens in a row of `length`."""
    return [(prompt, length)]


def made_up_rows(shape: Shape, spans: Sequence[Sequence[tuple[int, int]]]) -> list[TrainingRow]:
    """A row for each of `spans`; rows look at parts of one pool of random states."""
    generator = torch.Generator().manual_seed(1)
    longest = max(row[-1][1] for row in spans)
    pool = torch.randn(max(POOL, longest + 1), 3, shape.hidden, generator=generator, dtype=torch.float32).bfloat16()
    tokens = torch.randint(0, shape.vocabulary, (len(pool) + 1,), generator=generator, dtype=torch.int32)
    draw = random.Random(2)
    return [made_up_row(f"row{number}", row, pool, tokens, draw) for number, row in enumerate(spans)]


def made_up_row(name: str, spans: Sequence[tuple[int, int]], pool: Tensor, tokens: Tensor, draw: random.Random) -> TrainingRow:
    """One row whose states are a part of `pool` [P, 3, H]."""
    slots, remaining = trained_slots(spans)
    length = int(slots[-1]) + 1
    first = draw.randrange(len(pool) - length)
    taught = slots % len(pool)
    return TrainingRow(
        id=name,
        tokens=tokens[first : first + length + 1],
        aux=pool[first : first + length],
        slots=slots,
        remaining=remaining,
        final=pool[taught, 0],
        argmax=tokens[taught],
    )
