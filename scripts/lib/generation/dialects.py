"""What is said to a server: SGLang's own endpoint with ids in and ids out, or an OpenAI-compatible one with text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.chat.wire import wire_messages
from scripts.lib.generation.conversation import Conversation
from scripts.lib.generation.http import Reply
from scripts.lib.ground.files import canonical

ENDED = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}
MAX_SEED = 2**31


class Question(NamedTuple):
    """The next turn of a conversation: its prompt as ids, and how to sample. `seed` is None where sampling is greedy."""

    conversation: Conversation
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int | None


class Answer(NamedTuple):
    """One turn as it came back: ids of the server's own, or the message that a server of text sent, with ids read from it."""

    output_ids: list[int]
    finish_reason: str
    message: Message | None = None


class BadReplyError(Exception):
    """The server answered with something that is no answer; `reason` names what, in one word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Dialect(Protocol):
    """One kind of endpoint."""

    @property
    def path(self) -> str:
        """Where questions go."""

    def body(self, question: Question) -> bytes:
        """The request's body."""

    def answer(self, question: Question, reply: Reply) -> Answer:
        """The answer in a reply of status 200. Raises BadReplyError."""


@dataclass(frozen=True)
class Native:
    """SGLang's `/generate`: the prompt's ids go in and the engine's own ids come out."""

    template: ChatTemplate
    path: str = "/generate"

    def body(self, question: Question) -> bytes:
        """The request's body. A seed counts only where the server runs with deterministic inference; else it is ignored."""
        sampling: dict[str, Any] = {"max_new_tokens": question.max_tokens, "temperature": question.temperature}
        sampling["stop_token_ids"] = sorted(self.template.eos_ids)
        if question.seed is not None:
            sampling["sampling_seed"] = question.seed
        return orjson.dumps({"input_ids": question.prompt_ids, "sampling_params": sampling})

    def answer(self, question: Question, reply: Reply) -> Answer:
        """The answer with the ids that the server reports, an end-of-turn id included if it was generated."""
        try:
            data = orjson.loads(reply.body)
            output_ids, finish = data["output_ids"], data["meta_info"]["finish_reason"]
            kind = ENDED[finish["type"]]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise unusable(reply, error) from error
        return Answer(output_ids, kind)


@dataclass(frozen=True)
class OpenAI:
    """`/v1/chat/completions`: messages go in and text comes out, which is then tokenised as the template renders it."""

    template: ChatTemplate
    model: str
    path: str = "/v1/chat/completions"

    def body(self, question: Question) -> bytes:
        """The request's body."""
        messages = wire_messages(question.conversation.history(), as_mapping=False)
        request = {"model": self.model, "messages": messages, "max_tokens": question.max_tokens, "temperature": question.temperature}
        if question.conversation.tools is not None:
            request["tools"] = orjson.loads(question.conversation.tools)
        if question.seed is not None:
            request["seed"] = question.seed
        return orjson.dumps(request)

    def answer(self, question: Question, reply: Reply) -> Answer:
        """The answer with ids read from its text. An answer that was cut gets no end-of-turn id."""
        try:
            choice = orjson.loads(reply.body)["choices"][0]
            message, kind = choice["message"], ENDED[choice["finish_reason"]]
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise unusable(reply, error) from error
        calls = canonical(message["tool_calls"]) if message.get("tool_calls") else None
        text = message.get("content") or (None if calls else "")
        said = Message("assistant", text, reasoning_of(message), calls)
        empty = not (text or calls or said.reasoning_content)
        return Answer([] if empty else self._ids(question, said, kind), kind, said)

    def _ids(self, question: Question, said: Message, finish_reason: str) -> list[int]:
        """What the template writes after the prompt for the message `said`."""
        prompt = list(question.prompt_ids)
        whole = self.template.conversation_ids([*question.conversation.history(), said], question.conversation.tools)
        if whole[: len(prompt)] != prompt:
            raise BadReplyError("not_rendered", "the template's text of the answered conversation does not begin with the prompt")
        ids = whole[len(prompt) :]
        ends = [place for place, token in enumerate(ids) if token in self.template.eos_ids]
        if not ends:
            return ids  # such templates end a turn by the start of the next
        return ids[: ends[-1]] if finish_reason == "length" else ids[: ends[-1] + 1]  # what follows is never generated


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning of a chat message, under either name that servers use; an empty one stays, a missing one is None."""
    found = [message[name] for name in ("reasoning_content", "reasoning") if message.get(name) is not None]
    return found[0] if found else None


def unusable(reply: Reply, error: Exception) -> BadReplyError:
    """The error for a reply that holds no finished answer: aborted by the server, or not in the endpoint's form."""
    detail = reply.body[:200].decode(errors="replace")
    if isinstance(error, KeyError) and error.args == ("abort",):
        return BadReplyError("aborted", detail)
    return BadReplyError("bad_reply", f"{type(error).__name__} {error}: {detail}")
