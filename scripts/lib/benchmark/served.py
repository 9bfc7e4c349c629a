"""The engine `sglang`: the target alone and the target with drafts on two servers side by side."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.lib.benchmark.answers import Measured, Pair
from scripts.lib.benchmark.blocks import Block, Servers, measure_blocks
from scripts.lib.benchmark.drafters import ServedDrafter, find_drafter
from scripts.lib.benchmark.flags import baseline_flags, check_alike, variant_flags
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
from scripts.lib.ground.files import canonical, sha256_file, sha256_text
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job
from scripts.lib.serving.asking import get, request
from scripts.lib.serving.keeper import Found, Wanted
from scripts.lib.serving.pool import Lease, pooled
from scripts.lib.serving.server import checked_version
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.speculation.verdict import Verdict

log = logging.getLogger(__name__)
CANARY_PROMPTS = 4
DEATH_SECONDS = 3.0  # a broken connection is seen before the process is gone
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

    def wanted(self) -> list[Wanted]:
        """The target alone and the target with drafts, each with half of the memory."""
        speculative = variant_flags(self.settings, self.server.on_cpu, self.folder.resolve() if self.folder else None)
        plain = baseline_flags(self.settings, self.server.on_cpu)
        return [self._wanted(plain, ""), self._wanted(speculative, self.drafter.identity if self.drafter else "")]

    def _wanted(self, flags: Sequence[str], drafter: str) -> Wanted:
        target = self.job.input("target")
        key = sha256_text(canonical([str(target.resolve()), sha256_file(target), list(flags), drafter]))[:16]
        log_file = self.job.work / "servers" / f"{key}.log"
        return Wanted(key, str(target.parent.resolve()), flags, str(log_file.resolve()), 0.5)

    def examine(self, lease: Lease, flags: Sequence[str], prompts: Sequence[Prompt]) -> list[Finding]:
        """What the doctor finds in the running servers, the second with `flags`. StageError for anything that would make figures wrong."""
        baseline, variant = lease.servers
        found = after_start(variant.url, self.target, self.folder, self.settings.algorithm, flags)
        refuse(found, variant.url)
        check_alike(variant.url, request(f"{baseline.url}/server_info"), request(f"{variant.url}/server_info"))
        found += canary(variant.url, [prompt.ids for prompt in prompts[:CANARY_PROMPTS]], self.settings.ceiling)
        refuse(found, str(self.folder or variant.url))
        return found


def measure_served(job: Job, settings: Settings, prompts: Sequence[Prompt], template: ChatTemplate, folder: Path) -> Measured:
    """All pairs of answers of both servers.

    Raises StageError before a server starts when the drafter would not be served as it was trained, and before anything is timed when the
    running server shows it.
    """
    served = Served.of(job, settings)
    wanted = served.wanted()
    found = preflight(served.target, served.folder, settings.algorithm, [*served.server.flags, *wanted[1].flags])
    refuse(found, str(served.folder or settings.variant))
    load = Load(template, settings.max_tokens, settings.concurrency, settings.turns)
    with pooled(served.server, wanted) as lease:
        baseline, variant = lease.servers
        try:
            version = checked_version(variant.url, served.target)
            found += served.examine(lease, wanted[1].flags, prompts)
            passes = measure_blocks(Servers(baseline.url, variant.url, flush), load, prompts, settings.repeats, folder)
            pairs = [paired(row, prompts) for row in passes]
            pairs[0] = [verdict_on(baseline.url, pair, settings.dtype) for pair in pairs[0]]
        except StageError:
            lease.check(DEATH_SECONDS)  # a server that died explains every other failure
            raise
    walls = [(sum(block.plain.seconds for block in row), sum(block.chain.seconds for block in row)) for row in passes]
    extra = described(served, baseline, variant, version, found) | {"simulated_accept_length": simulated(served, passes[0])}
    return Measured([[pair for pair, _ in row] for row in pairs], walls, extra)


def flush(url: str) -> None:
    """Empty the server's cache of prompts."""
    try:
        get(f"{url}/flush_cache")
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


def verdict_on(url: str, asked: Asked, dtype: str) -> Asked:
    """The pair with its verdict, for which the server of the target alone at `url` is asked where answers part."""
    pair, prompt = asked
    if pair.verdict.kind == "uncompared":
        return asked
    return replace(pair, verdict=judge(url, prompt, pair.plain.ids, pair.chain.ids, dtype)), prompt


def simulated(served: Served, blocks: Sequence[Block]) -> float | None:
    """Accept length of this run's drafter, in chains, on the target's own answers; the same at every concurrency, so told at 1 alone."""
    settings = served.settings
    if settings.concurrency > 1 or settings.topk > 1 or settings.draft_steps is None or not (served.drafter and served.drafter.own):
        return None
    from scripts.lib.benchmark.simulated import simulated_accept_length

    turns = [turn for block in blocks for talk in block.plain.talks for turn in talk]
    rows = [(turn.prompt_ids, turn.answer.ids) for turn in turns]
    return simulated_accept_length(served.target, served.drafter.folder, rows, settings.draft_steps, served.job.runtime["device"])


def described(served: Served, baseline: Found, variant: Found, version: str, found: Sequence[Finding]) -> dict[str, Any]:
    """The servers, as `cell.json` names them, and what the doctor found that is only worth knowing."""
    return {
        "server": {
            "version": version,
            "command": list(variant.command),
            "start_seconds": variant.start_seconds,
            "baseline_command": list(baseline.command),
            "baseline_start_seconds": baseline.start_seconds,
        },
        "server_packages": server_packages(served.server.interpreter()),
        "findings": [asdict(finding) for finding in found],
    }
