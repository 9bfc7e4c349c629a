"""Every prompt by both ways, alternating, timed one at a time."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.files import write_json
from scripts.lib.ground.progress import Progress
from scripts.lib.speculation.decoding import decode_chain, decode_plain
from scripts.lib.speculation.limits import Limits
from scripts.lib.speculation.lossless import Verdict, compare


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer and what they took; `accepted` holds a number a verify step, nothing for the target alone."""

    ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Answer":
        """From its JSON."""
        return cls(tuple(data["ids"]), data["prefill_seconds"], data["decode_seconds"], tuple(data["accepted"]))


@dataclass(frozen=True)
class Pair:
    """One prompt in one pass: by the target alone and with drafts, and whether both say the same."""

    id: str
    plain: Answer
    chain: Answer
    verdict: Verdict

    @classmethod
    def read(cls, path: Path) -> "Pair":
        """As an earlier attempt wrote it."""
        data = json.loads(path.read_text())
        return cls(data["id"], Answer.of(data["plain"]), Answer.of(data["chain"]), Verdict(**data["verdict"]))


@dataclass(frozen=True)
class Bench:
    """A target and a drafter, ready to answer."""

    model: PreTrainedModel
    drafter: Drafter
    draft_steps: int
    limits: Limits

    def pair(self, prompt: Prompt, chain_first: bool) -> Pair:
        """Answer `prompt` by both ways; which goes first takes turns, so that caches and clocks favour neither."""
        early = decode_chain(self.model, self.drafter, self.draft_steps, prompt.ids, self.limits) if chain_first else None
        plain = decode_plain(self.model, prompt.ids, self.limits)
        chain = early or decode_chain(self.model, self.drafter, self.draft_steps, prompt.ids, self.limits)
        return Pair(
            prompt.id,
            Answer(plain.output_ids, plain.prefill_seconds, plain.decode_seconds),
            Answer(chain.output_ids, chain.prefill_seconds, chain.decode_seconds, chain.accepted),
            compare(plain, chain.output_ids, self.model.lm_head),
        )


def measure(bench: Bench, prompts: Sequence[Prompt], repeats: int, folder: Path) -> list[list[Pair]]:
    """All pairs, by pass. Each is kept in `folder` as soon as it is measured, and not measured again by a resumed job.

    The first prompt is answered once more before the clock counts: first calls allocate and compile.
    """
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    files = [[partial / f"{number:03d}-{index:06d}.json" for index in range(len(prompts))] for number in range(repeats)]
    done = sum(path.exists() for row in files for path in row)
    progress = Progress(folder, repeats * len(prompts), "prompts", done)
    bench.pair(prompts[0], chain_first=False)
    for number, row in enumerate(files):
        for index, (path, prompt) in enumerate(zip(row, prompts, strict=True)):
            if not path.exists():
                pair = bench.pair(prompt, chain_first=(index + number) % 2 == 1)
                write_json(path, asdict(pair))
                progress.add(1, len(pair.plain.ids) + len(pair.chain.ids))
    return [[Pair.read(path) for path in row] for row in files]
