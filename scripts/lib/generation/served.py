"""The engine `sglang`: all turns of one dataset asked from the servers that `runtime.server` names or starts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.engines.settings import TargetShape
from scripts.lib.generation.client import Client
from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.driver import Driver, Prompts
from scripts.lib.generation.intake import Intake
from scripts.lib.generation.observing import Observer
from scripts.lib.generation.outcome import Outcome
from scripts.lib.generation.policy import Policy
from scripts.lib.generation.publishing import publish_answers, publish_failed
from scripts.lib.generation.segments import Segments
from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest
from scripts.lib.ground.stage import Job, Result
from scripts.lib.serving.pool import shared
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.watching.observed import Plan
from scripts.lib.watching.watcher import Watcher

log = logging.getLogger(__name__)


def generate_served(job: Job, settings: GenerateSettings, folder: Path) -> Result:
    """Let the servers write every turn, one row out per turn or one in `failed.parquet`.

    Jobs of several datasets share one server, one after the other. None is started when an earlier attempt got all answers.
    Raises StageError when too many turns failed, or all.
    """
    target = job.input("target").parent
    policy = Policy.of(job.runtime)
    intake = Intake(job.input("prepared"), settings.turns, policy.window)
    template, context = ChatTemplate.load(target), TargetShape.of(target).context
    work = Work(settings, policy, intake, Segments(folder / "partial"), template, context)
    watcher = Watcher(folder, settings.name, work.plan())
    if work.complete:
        uvloop.run(work.answer((), lambda: None, watcher))
    else:
        with watcher, shared(ServerSettings.of(job.runtime), job.input("target"), server_flags(settings), job.work) as running:
            uvloop.run(work.answer(running.urls, running.check, watcher))
    return published(job, folder, work, watcher)


@dataclass
class Work:
    """One dataset's turns: what is there already, and what the servers have still to answer."""

    settings: GenerateSettings
    policy: Policy
    intake: Intake
    segments: Segments
    template: ChatTemplate
    context: int

    def __post_init__(self) -> None:
        self.index = self.segments.index()
        self.classes = self.intake.classes()
        self.outcome = Outcome(self.classes.total(), self.policy.stop_at)

    def plan(self) -> Plan:
        """What an observer has to know."""
        partition = self.intake.partition()
        most = self.settings.max_tokens[partition]
        return Plan(dict(self.classes), self.index.height, most, self.policy.concurrency[partition])

    @property
    def complete(self) -> bool:
        """Whether an earlier attempt got an answer to every turn."""
        return self.index.height == self.outcome.turns

    async def answer(self, urls: Sequence[str], check: Callable[[], None], observer: Observer) -> None:
        """Answer what is left."""
        client = await Client.connect(urls, self.template, self.policy, check)
        prompts = Prompts(self.prompt_ids, self.template, self.context)
        driver = Driver(self.settings, self.policy, prompts, client, self.segments, self.outcome, observer)
        await driver.run(self.intake.windows(self.segments, self.index))
        log.info("%s", self.outcome.table())

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """The ids before the next turn, as the served template renders them."""
        return self.template.prompt_ids(conversation.history(), conversation.tools)


def server_flags(settings: GenerateSettings) -> list[str]:
    """What a server that the stage starts must be told beyond `runtime.server.flags`."""
    return ["--dtype", settings.dtype, "--enable-metrics"]


def published(job: Job, folder: Path, work: Work, watcher: Watcher) -> Result:
    """Write the tables and account for every turn. Raises StageError when none was answered."""
    written = publish_answers(folder, work.segments, work.template, work.settings.truncated)
    publish_failed(folder, work.outcome.failed)
    rejected = dict(sorted(work.outcome.reasons.items()))
    if not written.rows:
        remedy = "look at generate.max_tokens and the target's chat template"
        raise StageError(f"{job.output}: none of {len(work.outcome.failed)} turns got an answer ({rejected}); {remedy}")
    return Result(
        Manifest(
            stage="generate",
            settings=job.settings,
            inputs=job.input_digests(),
            counts=Counts(work.outcome.turns, written.rows, rejected),
            shards=written.shards,
            facts=written.facts(),
        ),
        cost={
            "generated_tokens": watcher.tokens,
            "tokens_per_second": round(watcher.tokens / watcher.seconds, 1),
            "sent_again": dict(sorted(work.outcome.repeated.items())),
        },
    )
