"""Every prompt by both servers, in blocks that alternate between them, so that neither has the machine at another time of day.

Where one of them is up at a time, all blocks go to it, and later all of them to the other.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.lib.benchmark.answers import Answer
from scripts.lib.benchmark.load import Load, Turn
from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.ground.files import write_json
from scripts.lib.ground.progress import Progress

log = logging.getLogger(__name__)
BASELINE, VARIANT = "baseline", "variant"  # the target alone, and the target with drafts
WAYS = (VARIANT, BASELINE)  # what may be misconfigured first
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
class Piece:
    """Block number `index` of pass `number`, for one server."""

    number: int
    index: int
    way: str


@dataclass(frozen=True)
class Blocks:
    """The blocks of a cell, `repeats` passes over them, and the `folder` that keeps each as soon as a server has answered it."""

    load: Load
    parts: Sequence[Sequence[Prompt]]
    repeats: int
    folder: Path

    @classmethod
    def of(cls, load: Load, prompts: Sequence[Prompt], repeats: int, folder: Path) -> "Blocks":
        """Of all `prompts`."""
        if len(prompts) < load.concurrency:
            log.warning("only %d prompts for %d requests at a time: no more than these are ever under way", len(prompts), load.concurrency)
        (folder / "partial").mkdir(exist_ok=True)
        return cls(load, cut(prompts, load.concurrency), repeats, folder)

    def pieces(self) -> Iterator[Piece]:
        """All pieces in order; which of the two servers goes first takes turns."""
        for number in range(self.repeats):
            for index in range(len(self.parts)):
                for way in WAYS if (index + number) % 2 else WAYS[::-1]:
                    yield Piece(number, index, way)

    def path(self, piece: Piece) -> Path:
        """Where its answers are kept."""
        return self.folder / "partial" / f"{piece.number:03d}-{piece.index:04d}-{piece.way}.json"

    def left(self) -> list[str]:
        """The servers that have something left to answer."""
        missing = {piece.way for piece in self.pieces() if not self.path(piece).exists()}
        return [way for way in WAYS if way in missing]

    def measure(self, urls: Mapping[str, str], flush: Callable[[str], None]) -> None:
        """Let the servers of `urls` answer what is left to them; `flush` empties the cache of prompts of one of them.

        Every block starts from an empty cache: what another pass left there would be read for free.
        """
        pieces = list(self.pieces())
        todo = [piece for piece in pieces if not self.path(piece).exists()]
        size = [len(self.parts[piece.index]) for piece in pieces]
        progress = Progress(self.folder, sum(size), "answers", sum(size) - sum(len(self.parts[piece.index]) for piece in todo))
        here = [piece for piece in todo if piece.way in urls]
        for way in dict.fromkeys(piece.way for piece in here):
            self.warm(urls[way])
        for piece in here:
            flush(urls[piece.way])
            side = Side(*self.load.run(urls[piece.way], self.parts[piece.index]))
            write_json(self.path(piece), asdict(side))
            progress.add(len(side.talks), sum(len(turn.answer.ids) for talk in side.talks for turn in talk))

    def warm(self, url: str) -> None:
        """Let a server compile and allocate what batches up to the cell's size take: kernels are compiled for each power of two."""
        prompts, size = [prompt for part in self.parts for prompt in part], self.load.concurrency
        while size:
            short = Load(self.load.template, min(WARM_TOKENS, self.load.max_tokens), size, "first")
            short.run(url, prompts[: WARM_ROUNDS * size])
            size //= 2

    def read(self) -> list[list[Block]]:
        """All blocks, by pass, once nothing is left."""
        sides = {piece: Side.of(json.loads(self.path(piece).read_text())) for piece in self.pieces()}
        return [
            [Block(sides[Piece(number, index, BASELINE)], sides[Piece(number, index, VARIANT)]) for index in range(len(self.parts))]
            for number in range(self.repeats)
        ]


def cut(prompts: Sequence[Prompt], concurrency: int) -> list[Sequence[Prompt]]:
    """`prompts` in blocks of about the same size, each long enough that its end, where slots run empty, counts little."""
    size = max(BLOCK_PROMPTS, BLOCK_ROUNDS * concurrency)
    count = max(1, len(prompts) // size)
    borders = [len(prompts) * number // count for number in range(count + 1)]
    return [prompts[start:end] for start, end in pairwise(borders)]
