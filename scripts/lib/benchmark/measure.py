"""The engine `transformers`: every prompt by both ways in this process, alternating, timed one at a time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from scripts.lib.benchmark.answers import Answer, Measured, Pair
from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.benchmark.settings import Settings
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.eagle3.export import check_target, load_drafter
from scripts.lib.eagle3.model import Drafter
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job
from scripts.lib.sharing.leaving import make_room
from scripts.lib.speculation.decoding import ChainRun, PlainRun, decode_chain, decode_plain
from scripts.lib.speculation.figures import histogram
from scripts.lib.speculation.limits import Limits
from scripts.lib.speculation.lossless import compare
from scripts.lib.speculation.verdict import Verdict


@dataclass(frozen=True)
class Bench:
    """A target and a drafter, ready to answer."""

    model: PreTrainedModel
    drafter: Drafter
    draft_steps: int
    limits: Limits
    template: ChatTemplate
    turns: str

    def pairs(self, prompt: Prompt, chain_first: bool) -> list[Pair]:
        """Answer `prompt` by both ways; which goes first takes turns, so that caches and clocks favour neither."""
        early = self.chain(prompt) if chain_first else None
        plain = self.plain(prompt)
        chain = early or self.chain(prompt)
        pairs: list[Pair] = []
        for turn, (mine, theirs) in enumerate(zip(plain, chain, strict=True)):
            same = all(pair.verdict.kind == "identical" for pair in pairs)
            verdict = compare(mine, theirs.output_ids, self.model.lm_head) if same else Verdict("uncompared")
            tokens = len(prompt.ids_after([run.output_ids for run in plain[:turn]], self.template))
            pairs.append(Pair(prompt.id, plain_answer(mine), chain_answer(theirs, self.draft_steps), verdict, turn, tokens))
        return pairs

    def plain(self, prompt: Prompt) -> list[PlainRun]:
        """The target's own answer to every turn."""
        runs: list[PlainRun] = []
        for _ in prompt.turns(self.turns):
            ids = prompt.ids_after([run.output_ids for run in runs], self.template)
            runs.append(decode_plain(self.model, ids, self.limits))
        return runs

    def chain(self, prompt: Prompt) -> list[ChainRun]:
        """The answer with drafts to every turn, after those with drafts to the turns before."""
        runs: list[ChainRun] = []
        for _ in prompt.turns(self.turns):
            ids = prompt.ids_after([run.output_ids for run in runs], self.template)
            runs.append(decode_chain(self.model, self.drafter, self.draft_steps, ids, self.limits))
        return runs


def plain_answer(run: PlainRun) -> Answer:
    """What is kept of an answer of the target alone."""
    return Answer(run.output_ids, run.prefill_seconds, run.decode_seconds)


def chain_answer(run: ChainRun, draft_steps: int) -> Answer:
    """What is kept of an answer with drafts."""
    counts = tuple(histogram(run.accepted, draft_steps))
    return Answer(run.output_ids, run.prefill_seconds, run.decode_seconds, len(run.accepted), sum(run.accepted), counts)


def measure_in_process(job: Job, settings: Settings, prompts: Sequence[Prompt], template: ChatTemplate, folder: Path) -> Measured:
    """All pairs, of a loop that shares nothing but the model with a server."""
    make_room(job.runtime["device"])
    torch.set_num_threads(job.runtime["threads"])
    bench = load_bench(job, settings, template)
    return Measured(measure(bench, prompts, settings.repeats, folder))


def load_bench(job: Job, settings: Settings, template: ChatTemplate) -> Bench:
    """Target and drafter in the variant's dtype. StageError when they do not belong together."""
    read_manifest(job.input("target"), "target")
    read_manifest(job.input("drafter"), "train")
    dtype, device, folder = getattr(torch, settings.dtype), job.runtime["device"], job.input("drafter").parent
    model = load_target(job.input("target").parent, dtype, device)
    check_target(folder, model.config)
    assert settings.draft_steps is not None  # the config's check
    limits = Limits(template.eos_ids, settings.max_tokens)
    return Bench(model, load_drafter(folder, dtype, device), settings.draft_steps, limits, template, settings.turns)


def measure(bench: Bench, prompts: Sequence[Prompt], repeats: int, folder: Path) -> list[list[Pair]]:
    """All pairs, by pass. Each prompt's are kept in `folder` as soon as they are measured, and not measured again by a resumed job.

    The first prompt is answered once more before the clock counts: first calls allocate and compile.
    """
    partial = folder / "partial"
    partial.mkdir(exist_ok=True)
    files = [[partial / f"{number:03d}-{index:06d}.json" for index in range(len(prompts))] for number in range(repeats)]
    done = sum(path.exists() for row in files for path in row)
    progress = Progress(folder, repeats * len(prompts), "prompts", done)
    bench.pairs(prompts[0], chain_first=False)
    for number, row in enumerate(files):
        for index, (path, prompt) in enumerate(zip(row, prompts, strict=True)):
            if not path.exists():
                pairs = bench.pairs(prompt, chain_first=(index + number) % 2 == 1)
                write_json(path, [pair.json() for pair in pairs])
                progress.add(1, sum(len(pair.plain.ids) + len(pair.chain.ids) for pair in pairs))
    return [[Pair.of(data) for path in row for data in json.loads(path.read_text())] for row in files]
