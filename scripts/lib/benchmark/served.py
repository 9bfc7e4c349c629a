"""The engine `sglang`: the target alone and the target with drafts on two servers, side by side or one after the other."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.lib.benchmark.answers import Measured, Pair
from scripts.lib.benchmark.blocks import BASELINE, VARIANT, WAYS, Block, Blocks
from scripts.lib.benchmark.drafters import ServedDrafter, find_drafter
from scripts.lib.benchmark.flags import baseline_flags, check_alike, told, variant_flags
from scripts.lib.benchmark.judging import judge
from scripts.lib.benchmark.load import Load
from scripts.lib.benchmark.machine import server_packages
from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.benchmark.settings import Settings
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.findings import Finding, refuse
from scripts.lib.doctor.preflight import preflight
from scripts.lib.doctor.served import after_start, canary
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job
from scripts.lib.serving.asking import get, request
from scripts.lib.serving.keeper import Found, Wanted
from scripts.lib.serving.pool import pooled
from scripts.lib.serving.server import checked_version
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.speculation.verdict import Verdict

CANARY_PROMPTS = 4
STARTED_OTHERWISE = "change algorithm, attention_backend or flags of the variant, or runtime.server, or leave the variant out"
DEATH_SECONDS = 3.0  # a broken connection is seen before the process is gone
IDLE_SECONDS = 60  # of the longest step that a server may still have under way
Asked = tuple[Pair, tuple[int, ...]]  # a pair, and the prompt that the target alone was given


@dataclass(frozen=True)
class Served:
    """What a cell serves, and how: flags of both servers, and the drafter if there is one."""

    job: Job
    settings: Settings
    server: ServerSettings
    target: Path
    drafter: ServedDrafter | None

    @classmethod
    def of(cls, job: Job, settings: Settings) -> "Served":
        """From the job. StageError when the drafter is not where the config says."""
        read_manifest(job.input("target"), "target")
        return cls(job, settings, ServerSettings.of(job.runtime), job.input("target").parent, find_drafter(job, settings))

    @property
    def folder(self) -> Path | None:
        """The drafter's."""
        return self.drafter.folder if self.drafter else None

    def wanted(self) -> dict[str, Wanted]:
        """The target with drafts and the target alone; side by side each has half of the memory."""
        speculative = variant_flags(self.settings, self.server.on_cpu, self.folder.resolve() if self.folder else None)
        plain = baseline_flags(self.settings, self.server.on_cpu)
        return {VARIANT: self._wanted(speculative, self.drafter.identity if self.drafter else ""), BASELINE: self._wanted(plain, "")}

    def _wanted(self, flags: Sequence[str], drafter: str) -> Wanted:
        share = 0.5 if self.server.side_by_side else 1.0
        return replace(Wanted.of(self.job.input("target"), flags, self.job.work, share, drafter), remedy=STARTED_OTHERWISE)

    def look(self, way: str, running: Found, flags: Sequence[str]) -> "Seen":
        """A server that is up, with what the doctor finds in the one with drafts. StageError for what would make figures wrong."""
        found: list[Finding] = []
        if way == VARIANT:
            found = after_start(running.url, self.target, self.folder, self.settings.algorithm, flags)
            refuse(found, running.url)
        return Seen(running, checked_version(running.url, self.target), told(request(f"{running.url}/server_info")), tuple(found))

    def canary(self, seen: "Seen", prompts: Sequence[Prompt]) -> "Seen":
        """The server with drafts once it has answered a few prompts. StageError when no draft is accepted."""
        found = canary(seen.running.url, [prompt.ids for prompt in prompts[:CANARY_PROMPTS]], self.settings.ceiling)
        refuse(found, str(self.folder or seen.running.url))
        return replace(seen, findings=(*seen.findings, *found))


@dataclass(frozen=True)
class Seen:
    """A server that was up: how it was started, its version, what it reports of what must be alike, and what the doctor remarked."""

    running: Found
    version: str
    report: Mapping[str, Any]
    findings: Sequence[Finding] = ()

    @classmethod
    def read(cls, path: Path) -> "Seen":
        """As an earlier attempt wrote it."""
        data = json.loads(path.read_text())
        return cls(Found(**data["running"]), data["version"], data["report"], tuple(Finding(**one) for one in data["findings"]))


def measure_served(job: Job, settings: Settings, prompts: Sequence[Prompt], template: ChatTemplate, folder: Path) -> Measured:
    """All pairs of answers of both servers.

    Raises StageError before a server starts when the drafter would not be served as it was trained, and before anything is timed when the
    running server shows it.
    """
    served = Served.of(job, settings)
    found = preflight(served.target, served.folder, settings.algorithm, [*served.server.flags, *served.wanted()[VARIANT].flags])
    refuse(found, str(served.folder or settings.variant))
    blocks = Blocks.of(Load(template, settings.max_tokens, settings.concurrency, settings.turns), prompts, settings.repeats, folder)
    seen = {way: Seen.read(path) for way in WAYS if (path := seen_path(folder, way)).exists()}
    pairs = None
    while pairs is None:
        pairs = visit(served, blocks, seen, prompts)
    passes = blocks.read()
    walls = [(sum(block.plain.seconds for block in row), sum(block.chain.seconds for block in row)) for row in passes]
    extra = described(served, seen, found) | {"simulated_accept_length": simulated(served, passes[0])}
    return Measured(pairs, walls, extra)


def visit(served: Served, blocks: Blocks, seen: dict[str, Seen], prompts: Sequence[Prompt]) -> list[list[Pair]] | None:
    """Let the servers that may be up at once answer what is left to them, and judge once nothing is; None while something is."""
    wanted, both = served.wanted(), served.server.side_by_side
    ways = list(WAYS) if both else blocks.left() or [BASELINE]
    with pooled(served.server, [wanted[way] for way in ways], one=not both) as lease:
        try:
            up = {way: found for way in ways for found in lease.servers if found.key == wanted[way].key}
            for way, running in up.items():
                seen[way] = served.look(way, running, wanted[way].flags)
            if len(seen) == len(WAYS):
                check_alike(seen[VARIANT].running.url, seen[BASELINE].report, seen[VARIANT].report)
            if VARIANT in up:
                seen[VARIANT] = served.canary(seen[VARIANT], prompts)
            for way in up:
                write_json(seen_path(blocks.folder, way), asdict(seen[way]))
            blocks.measure({way: running.url for way, running in up.items()}, flush)
            # Either server can judge: the first token after a prompt is prefill's, in which drafts have no part.
            judge_url = up[BASELINE if BASELINE in up else VARIANT].url
            return None if blocks.left() else judged(blocks.read(), prompts, judge_url, served.settings.dtype)
        except StageError:
            lease.check(DEATH_SECONDS)  # a server that died explains every other failure
            raise


def seen_path(folder: Path, way: str) -> Path:
    """Where what a server said is kept for an attempt that does not start it again."""
    return folder / "partial" / f"{way}.json"


def flush(url: str) -> None:
    """Empty the server's cache of prompts, once it is idle: it answers the last request a moment before it is done with it."""
    try:
        get(f"{url}/flush_cache?timeout={IDLE_SECONDS}")
    except OSError as error:
        raise StageError(f"{url}: its cache of prompts cannot be emptied ({error}); finished blocks are kept: start again") from error


def paired(blocks: Sequence[Block], prompts: Sequence[Prompt]) -> list[Asked]:
    """The turns of one pass by both ways, with what the target alone was asked; not judged yet."""
    plain = [talk for block in blocks for talk in block.plain.talks]
    chain = [talk for block in blocks for talk in block.chain.talks]
    pairs = []
    for prompt, mine, theirs in zip(prompts, plain, chain, strict=True):
        for turn, (own, drafted) in enumerate(zip(mine, theirs, strict=True)):
            kind: Any = "identical" if own.prompt_ids == drafted.prompt_ids else "uncompared"
            pairs.append((Pair(prompt.id, own.answer, drafted.answer, Verdict(kind), turn, len(own.prompt_ids)), own.prompt_ids))
    return pairs


def judged(passes: Sequence[Sequence[Block]], prompts: Sequence[Prompt], url: str, dtype: str) -> list[list[Pair]]:
    """The pairs by pass; those of the first with their verdicts, for which the server at `url` is asked where answers part."""
    first, *rest = (paired(row, prompts) for row in passes)
    return [[verdict_on(url, asked, dtype) for asked in first], *([pair for pair, _ in row] for row in rest)]


def verdict_on(url: str, asked: Asked, dtype: str) -> Pair:
    """The pair with its verdict."""
    pair, prompt = asked
    if pair.verdict.kind == "uncompared":
        return pair
    return replace(pair, verdict=judge(url, prompt, pair.plain.ids, pair.chain.ids, dtype))


def simulated(served: Served, blocks: Sequence[Block]) -> float | None:
    """Accept length of this run's drafter, in chains, on the target's own answers; the same at every concurrency, so told at 1 alone."""
    settings = served.settings
    if settings.concurrency > 1 or settings.topk > 1 or settings.draft_steps is None or not (served.drafter and served.drafter.own):
        return None
    from scripts.lib.benchmark.simulated import simulated_accept_length

    turns = [turn for block in blocks for talk in block.plain.talks for turn in talk]
    rows = [(turn.prompt_ids, turn.answer.ids) for turn in turns]
    return simulated_accept_length(served.target, served.drafter.folder, rows, settings.draft_steps, served.job.runtime["device"])


def described(served: Served, seen: Mapping[str, Seen], found: Sequence[Finding]) -> dict[str, Any]:
    """The servers, as `cell.json` names them, and what the doctor `found` before and in them that is only worth knowing."""
    variant, baseline = (seen[way].running for way in WAYS)
    return {
        **({"cuda_graphs": None} if served.server.on_cpu else {}),
        "server": {
            "version": seen[VARIANT].version,
            "command": list(variant.command),
            "start_seconds": variant.start_seconds,
            "baseline_command": list(baseline.command),
            "baseline_start_seconds": baseline.start_seconds,
            "side_by_side": served.server.side_by_side,
        },
        "server_packages": server_packages(served.server.interpreter()),
        "findings": [asdict(finding) for finding in (*found, *seen[VARIANT].findings)],
    }
