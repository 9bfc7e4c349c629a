"""Every prompt by both servers, in blocks that alternate between them, so that neither has the machine at another time of day."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.lib.benchmark.answers import Answer
from scripts.lib.benchmark.load import Load, Turn
from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.ground.files import write_json
from scripts.lib.ground.progress import Progress

BLOCK_PROMPTS, BLOCK_ROUNDS = 8, 4
WARM_TOKENS, WARM_ROUNDS = 32, 2


@dataclass(frozen=True)
class Side:
    """One way's answers to a block: the seconds that it took, and the turns of each prompt."""

    seconds: float
    talks: list[list[Turn]]

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Side":
        """From its JSON."""
        turns = [[Turn(tuple(turn["prompt_ids"]), Answer.of(turn["answer"])) for turn in talk] for talk in data["talks"]]
        return cls(data["seconds"], turns)


@dataclass(frozen=True)
class Block:
    """A run of prompts by both ways."""

    plain: Side
    chain: Side


@dataclass(frozen=True)
class Servers:
    """Where the target alone and the target with drafts answer; `flush` empties the cache of prompts of one of them."""

    baseline: str
    variant: str
    flush: Callable[[str], None]

    def block(self, load: Load, prompts: Sequence[Prompt], variant_first: bool) -> Block:
        """Answer `prompts` by both, one after the other."""
        early = self.side(self.variant, load, prompts) if variant_first else None
        plain = self.side(self.baseline, load, prompts)
        return Block(plain, early or self.side(self.variant, load, prompts))

    def side(self, url: str, load: Load, prompts: Sequence[Prompt]) -> Side:
        """Answer `prompts` by one of them, from an empty cache: what another pass left there would be read for free."""
        self.flush(url)
        return Side(*load.run(url, prompts))

    def warm(self, load: Load, prompts: Sequence[Prompt]) -> None:
        """Let both compile and allocate what batches of every size up to the cell's take."""
        short = Load(load.template, min(WARM_TOKENS, load.max_tokens), load.concurrency, "first")
        for url in (self.baseline, self.variant):
            short.run(url, prompts[: WARM_ROUNDS * load.concurrency])


def cut(prompts: Sequence[Prompt], concurrency: int) -> list[Sequence[Prompt]]:
    """`prompts` in blocks of about the same size, each long enough that its end, where slots run empty, counts little."""
    size = max(BLOCK_PROMPTS, BLOCK_ROUNDS * concurrency)
    count = max(1, len(prompts) // size)
    borders = [len(prompts) * number // count for number in range(count + 1)]
    return [prompts[start:end] for start, end in pairwise(borders)]


def measure_blocks(servers: Servers, load: Load, prompts: Sequence[Prompt], repeats: int, folder: Path) -> list[list[Block]]:
    """All blocks, by pass. Each is kept in `folder` as soon as it is measured, and not measured again by a resumed job."""
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    blocks = cut(prompts, load.concurrency)
    files = [[partial / f"{number:03d}-{index:04d}.json" for index in range(len(blocks))] for number in range(repeats)]
    done = sum(len(block) for row in files for path, block in zip(row, blocks, strict=True) if path.exists())
    progress = Progress(folder, repeats * len(prompts), "prompts", done)
    if done < repeats * len(prompts):
        servers.warm(load, prompts)
    for number, row in enumerate(files):
        for index, (path, part) in enumerate(zip(row, blocks, strict=True)):
            if not path.exists():
                block = servers.block(load, part, variant_first=(index + number) % 2 == 1)
                write_json(path, asdict(block))
                turns = [turn for side in (block.plain, block.chain) for talk in side.talks for turn in talk]
                progress.add(len(part), sum(len(turn.answer.ids) for turn in turns))
    return [[read_block(path) for path in row] for row in files]


def read_block(path: Path) -> Block:
    """As this attempt or an earlier one wrote it."""
    data = json.loads(path.read_text())
    return Block(Side.of(data["plain"]), Side.of(data["chain"]))
