"""Keeps the servers full until every turn is answered or has failed for good."""

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate, RenderError
from scripts.lib.generation.backlog import Backlog, Pending
from scripts.lib.generation.client import Client, FailureError
from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.dialects import MAX_SEED, Answer, Question
from scripts.lib.generation.expectation import Expectation, length_class
from scripts.lib.generation.gathering import Gathering
from scripts.lib.generation.intake import Opened
from scripts.lib.generation.observing import Observer
from scripts.lib.generation.outcome import Outcome
from scripts.lib.generation.policy import Policy, Slots
from scripts.lib.generation.publishing import message_of
from scripts.lib.generation.segments import FLUSH_SECONDS, Segments
from scripts.lib.generation.settings import GenerateSettings

log = logging.getLogger(__name__)
ATTEMPTS = 2  # for an empty answer
NOBODY_READS = Message("assistant")
LOAD_SECONDS = 15.0  # between two looks at the servers' retractions


@dataclass(frozen=True)
class Prompts:
    """How a conversation becomes the ids before its next turn and how ids become text, and how many tokens the target takes."""

    render: Callable[[Conversation], Sequence[int]]
    template: ChatTemplate
    context: int


@dataclass
class Driver:
    """One run over all conversations."""

    settings: GenerateSettings
    policy: Policy
    prompts: Prompts
    client: Client
    segments: Segments
    outcome: Outcome
    observer: Observer

    def __post_init__(self) -> None:
        self.slots = {partition: Slots(most) for partition, most in self.policy.concurrency.items()}
        self.backlog = Backlog(self.slots, low=max(self.policy.window // 2, 2 * max(self.policy.concurrency.values())))
        self.gathering = {partition: Gathering(self.policy.gather) for partition in self.slots}
        self.expectation = Expectation()
        self.clock = asyncio.get_running_loop().time

    async def run(self, windows: Iterator[list[Opened]]) -> None:
        """Answer all turns of the conversations in `windows`. Raises StageError when that cannot be done."""
        try:
            async with asyncio.TaskGroup() as group:
                regular = [self.segments.write_always(), self._flush_regularly(), self._watch_load()]
                keepers = [group.create_task(keeper) for keeper in regular]
                group.create_task(self._feed(windows))
                slots = [(partition, slot) for partition, most in self.policy.concurrency.items() for slot in range(most)]
                await asyncio.wait([group.create_task(self._work(partition, slot)) for partition, slot in slots])
                for keeper in keepers:
                    keeper.cancel()
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        finally:
            self.client.close()
            self.segments.close()

    async def _feed(self, windows: Iterator[list[Opened]]) -> None:
        """Read window after window, whenever the backlog runs low."""
        while (window := await asyncio.to_thread(next, windows, None)) is not None:
            self.backlog.add([pending for pending in map(self._open, window) if pending])
            await self.backlog.wanted()
        self.backlog.close()

    def _open(self, opened: Opened) -> Pending | None:
        """What is left to do for a conversation once its earlier answers are in their places."""
        conversation = opened.conversation
        if not conversation.places:
            self._reject(conversation, "no_user_turn", "no message of role user")
            return None
        for record in opened.records:
            self.expectation.learn(conversation, len(record["output_ids"]))
            if not self._taken(conversation, record):
                return None
        if conversation.turn == len(conversation.places):
            return None
        return Pending(conversation, self.expectation.of(conversation))

    async def _work(self, partition: str, slot: int) -> None:
        """Ask for one turn after the other."""
        while (pending := await self._next_turn(partition, slot)) is not None:
            question = self._question(pending)
            if question is None:
                self.backlog.done()
                continue
            conversation = pending.conversation
            self.observer.on_start(pending.key, length_class(conversation, conversation.places[conversation.turn]))
            start = self.clock()
            try:
                answer = await self.client.ask(question)
            except FailureError as failure:
                self._failed(pending, failure, self.clock() - start)
            else:
                self._answered(pending, question, answer, self.clock() - start)

    async def _next_turn(self, partition: str, slot: int) -> Pending | None:
        """The turn for a slot that became free, None when all is done."""
        await self.gathering[partition].wait(self.slots[partition].together)
        return await self.backlog.take(partition, slot)

    def _question(self, pending: Pending) -> Question | None:
        """The request for the next turn, None once it is rejected because the target cannot take it."""
        conversation = pending.conversation
        try:
            prompt_ids = self.prompts.render(conversation)
        except RenderError as error:
            self._reject(conversation, "template", str(error))
            return None
        room = self.prompts.context - len(prompt_ids)
        if room < 1:
            self._reject(conversation, "context_full", f"{len(prompt_ids)} prompt tokens, the target takes {self.prompts.context}")
            return None
        most = min(room, self.settings.max_tokens[conversation.partition])
        return Question(conversation, prompt_ids, most, self.settings.temperature, self._seed(pending))

    def _seed(self, pending: Pending) -> int | None:
        """A seed of the request's own where answers are sampled; another one after an empty answer."""
        if self.settings.temperature == 0:
            return None
        name = f"{self.settings.seed}/{self.settings.name}/{pending.key}/{pending.discarded}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % MAX_SEED

    def _failed(self, pending: Pending, failure: FailureError, seconds: float) -> None:
        """Send the turn again later, or give it up."""
        pending.failures[failure.reason] += 1
        times = pending.failures[failure.reason]
        if failure.reason == "overload":
            self._shrink(f"{failure}")
        if self.policy.gives_up(failure.reason, times):
            self.observer.on_done(pending.key, 0, failure.reason, seconds)
            self._reject(pending.conversation, failure.reason, f"{times} times, last: {failure}", started=True)
            self.backlog.done()
            return
        self.outcome.repeated[failure.reason] += 1
        self.observer.on_retry(pending.key, failure.reason)
        gone = failure.reason == "server_gone"  # the client itself waits until a server is up
        self.backlog.again(pending, 0.0 if gone else failure.pause or self.policy.pause(times))

    def _answered(self, pending: Pending, question: Question, answer: Answer, seconds: float) -> None:
        """Keep the answer, and make the conversation's next turn the next to be asked."""
        conversation, slots = pending.conversation, self.slots[pending.conversation.partition]
        if slots.allowed < slots.most and slots.grow():
            self.backlog.opened()
        if not self._says_something(answer):
            self._empty(pending, answer, seconds)
            return
        record = record_of(pending, question, answer)
        self.segments.append(record)
        self.observer.on_done(pending.key, len(answer.output_ids), answer.finish_reason, seconds)
        self.expectation.learn(conversation, len(answer.output_ids))
        if self._taken(conversation, record) and conversation.turn < len(conversation.places):
            self.backlog.back(Pending(conversation, self.expectation.of(conversation)))
        else:
            self.backlog.done()

    def _empty(self, pending: Pending, answer: Answer, seconds: float) -> None:
        """Ask again for an answer that said nothing, or give it up."""
        pending.discarded += 1
        if pending.discarded < ATTEMPTS:
            self.outcome.repeated["empty_answer"] += 1
            self.observer.on_retry(pending.key, "empty_answer")
            self.backlog.back(pending)
            return
        self.observer.on_done(pending.key, len(answer.output_ids), "empty_answer", seconds)
        self._reject(pending.conversation, "empty_answer", f"{pending.discarded} attempts", started=True)
        self.backlog.done()

    def _says_something(self, answer: Answer) -> bool:
        """Whether there is more than an end-of-turn token."""
        return not self.prompts.template.eos_ids.issuperset(answer.output_ids)

    def _taken(self, conversation: Conversation, record: Mapping[str, Any]) -> bool:
        """Hand a kept answer to its conversation; whether later turns may build on it."""
        if record["finish_reason"] == "length" and self.settings.truncated == "drop":
            self._reject(conversation, "truncated", f"{len(record['output_ids'])} tokens, max_tokens {record['max_tokens']}", started=True)
            return False
        self.outcome.answers[record["finish_reason"]] += 1
        last = conversation.turn + 1 == len(conversation.places)  # nobody reads that one: its text is made when it is published
        conversation.answers.append(NOBODY_READS if last else message_of(record, self.prompts.template))
        if record["finish_reason"] == "length":
            self.outcome.check()
        return True

    def _reject(self, conversation: Conversation, reason: str, value: str, started: bool = False) -> None:
        """Give up the next turn of `conversation`, and with it those after; observers hear of those that were never asked."""
        lost = self.outcome.reject(conversation, reason, value)
        for turn, why in lost[1:] if started else lost:
            self.observer.on_start(f"{conversation.id}/{turn}")
            self.observer.on_done(f"{conversation.id}/{turn}", 0, why, 0.0)

    def _shrink(self, why: str) -> None:
        """Send fewer requests at once."""
        before = {partition: int(slots.allowed) for partition, slots in self.slots.items()}
        for slots in self.slots.values():
            slots.shrink(self.clock())
        after = {partition: int(slots.allowed) for partition, slots in self.slots.items()}
        if after != before:
            log.warning("overload: requests in flight %s instead of %s (%s)", after, before, why)

    async def _flush_regularly(self) -> None:
        """Bring what was appended to the disk every few seconds, beside the loop."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            descriptor = self.segments.descriptor()
            if descriptor is not None:
                try:
                    await asyncio.to_thread(os.fsync, descriptor)
                finally:
                    os.close(descriptor)

    async def _watch_load(self) -> None:
        """Send fewer requests when the servers push requests out of their KV cache."""
        await self.client.retractions()  # of the time before
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            if retracted := await self.client.retractions():
                self._shrink(f"{retracted:g} requests lost their place in the KV cache")


def record_of(pending: Pending, question: Question, answer: Answer) -> dict[str, Any]:
    """What is kept of one answer; `message` only where it came as text, as the ids hold all else."""
    conversation = pending.conversation
    return {
        "id": conversation.id,
        "turn": conversation.turn,
        "group": conversation.group,
        "prompt_hash": conversation.prompt_hash,
        "prompt_ids": question.prompt_ids,
        "output_ids": answer.output_ids,
        "finish_reason": answer.finish_reason,
        "attempts": pending.discarded + 1,
        "message": answer.message,
        "max_tokens": question.max_tokens,
        "seed": question.seed,
    }
