"""Where the answers lie in a rendered conversation: by the template's own control tokens, which no message can spell.

`ChatTemplate.render` leaves no control token in a text but those that the template wrote. So the header that opens an
answer, and the token that ends it, are found by search, once per conversation instead of twice per answer. Whether that
holds for a template is tried on small conversations, against `turns_by_prefix`, which asks nothing of a template.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import NO_THINKING, PROBE_CALLS, ChatTemplate, RenderError

END_OF_THOUGHTS = "</think>"  # templates that cut thoughts out of a content look for it


@dataclass(frozen=True)
class TextTurn:
    """One assistant turn as rendered text: all that the target sees before it answers, and the answer with its end of turn."""

    number: int
    prompt: str
    output: str


@dataclass(frozen=True)
class NoTurn:
    """An assistant turn that the template cannot give, and why."""

    number: int
    reason: str
    value: str


@dataclass(frozen=True)
class Structure:
    """How a template lays out a conversation."""

    template: ChatTemplate

    def turns(self, messages: Sequence[Message], tools: str | None) -> Sequence[TextTurn | NoTurn]:
        """Every assistant turn of a conversation, in order."""
        stays = self.thoughts_stay if has_thoughts(messages) else self.answers_stay
        return (self.turns_by_search(messages, tools) if stays else None) or self.turns_by_prefix(messages, tools)

    def turns_by_search(self, messages: Sequence[Message], tools: str | None) -> list[TextTurn] | None:
        """Every assistant turn from one rendering; None when that fails, the headers are not one per answer, or an answer has no end."""
        try:
            text = self.template.render(messages, tools)
        except RenderError:
            return None
        answers = [message for message in messages if message.role == "assistant"]
        starts = [found.start() for found in re.finditer(re.escape(self.header), text)]
        if len(starts) != len(answers):
            return None
        turns = []
        for number, (answer, (start, limit)) in enumerate(zip(answers, pairwise([*starts, len(text)]), strict=True)):
            fitting = [self.openings[mode] for mode in self.modes(answer) if text.startswith(self.openings[mode], start)]
            begin = start + max(map(len, fitting), default=0)
            end = self.end_of_turn.search(text, begin, limit)
            if not fitting or end is None:
                return None
            turns.append(TextTurn(number, text[:begin], text[begin : end.end()]))
        return turns

    def turns_by_prefix(self, messages: Sequence[Message], tools: str | None) -> list[TextTurn | NoTurn]:
        """Every assistant turn as what the conversation up to it has beyond its prompt, whatever the template does with earlier turns."""
        indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return [self.turn_by_prefix(number, messages[: index + 1], tools) for number, index in enumerate(indices)]

    def turn_by_prefix(self, number: int, messages: Sequence[Message], tools: str | None) -> TextTurn | NoTurn:
        """The last of `messages` as a turn.

        A turn without thoughts may be what a reasoning template writes with thinking switched off. Then the longer prompt
        fits, which ends in an empty block of thoughts that the server gives and the target does not generate.
        """
        try:
            text = self.template.render(messages, tools)
            prompts = [
                self.template.render(messages[:-1], tools, add_generation_prompt=True, **MODES[mode]) for mode in self.modes(messages[-1])
            ]
        except RenderError as error:
            return NoTurn(number, "template_error", str(error))
        fitting = [prompt for prompt in prompts if text.startswith(prompt)]
        if not fitting:
            return NoTurn(number, "prompt_not_prefix", f"message {len(messages) - 1}")
        prompt = max(fitting, key=len)
        return TextTurn(number, prompt, self.up_to_end_of_turn(text[len(prompt) :]))

    def up_to_end_of_turn(self, text: str) -> str:
        """`text` up to and including the last end of turn: what follows is the template's text, which is never generated.

        All of it when there is none: such templates end a turn by the start of the next.
        """
        ends = [found.end() for found in self.end_of_turn.finditer(text)]
        return text[: ends[-1]] if ends else text

    def modes(self, answer: Message) -> list[str]:
        """The ways in which the target may have been asked for `answer`: keys of `MODES`."""
        return list(MODES) if answer.reasoning_content is None and self.template.switches_thinking else ["as it is"]

    @cached_property
    def end_of_turn(self) -> re.Pattern[str]:
        """Finds the token that ends a turn."""
        return re.compile("|".join(sorted(re.escape(self.template.decode([id_])) for id_ in self.template.eos_ids)))

    @cached_property
    def openings(self) -> dict[str, str]:
        """What the template writes before an answer, by mode; empty text where it rewrites what came before."""
        user = [Message("user", "x")]
        before = self.template.render(user)
        prompts = {mode: self.template.render(user, add_generation_prompt=True, **variables) for mode, variables in MODES.items()}
        return {mode: prompt[len(before) :] if prompt.startswith(before) else "" for mode, prompt in prompts.items()}

    @cached_property
    def header(self) -> str:
        """What all openings begin with."""
        least, most = min(self.openings.values()), max(self.openings.values())
        return next((least[:size] for size in range(len(least), 0, -1) if most.startswith(least[:size])), "")

    @cached_property
    def answers_stay(self) -> bool:
        """Whether search finds what prefixes give in conversations without thoughts."""
        return self._agree(self._probe())

    @cached_property
    def thoughts_stay(self) -> bool:
        """Whether search finds what prefixes give in conversations with thoughts in all answers, or in some."""
        with_thoughts = [replace(message, reasoning_content="t") if message.role == "assistant" else message for message in self._probe()]
        return self._agree(with_thoughts) and self._agree([*self._probe()[:2], *with_thoughts[2:]])

    def _agree(self, messages: Sequence[Message]) -> bool:
        try:
            own = any(token in self.header for token in self.template.special_tokens)
        except RenderError:
            return False
        ends_are_control = all(self.template.decode([id_]) in self.template.special_tokens for id_ in self.template.eos_ids)
        return own and ends_are_control and self.turns_by_search(messages, None) == self.turns_by_prefix(messages, None)

    def _probe(self) -> list[Message]:
        talk = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
        if not self.template.takes_tool_calls:
            return talk
        call = Message("assistant", "e", tool_calls=PROBE_CALLS)
        return [*talk, Message("user", "f"), call, Message("tool", "g"), Message("assistant", "h"), Message("user", "i"), talk[-1]]


MODES: dict[str, dict[str, Any]] = {"as it is": {}, "thinking off": NO_THINKING}


def has_thoughts(messages: Sequence[Message]) -> bool:
    """Whether an answer shows thoughts, of its own or in its text."""
    answers = [message for message in messages if message.role == "assistant"]
    return any(answer.reasoning_content is not None or END_OF_THOUGHTS in (answer.content or "") for answer in answers)
