"""The target's chat template: conversations to exactly the ids that its server would see."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from scripts.lib.chat.control import ControlText, has_marks
from scripts.lib.chat.messages import TEXTS, Message
from scripts.lib.chat.wire import wire_messages
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import canonical, sha256_text

RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
PROBE = "aerie_probe"
PROBE_TOOLS = canonical(
    [{"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}}]
)
# Templates call it one or the other, and ignore what they do not know.
NO_THINKING: dict[str, Any] = {"enable_thinking": False, "thinking": False}
PROBE_CALLS = canonical([{"type": "function", "function": {"name": PROBE, "arguments": {"key_probe": 1}}}])


class RenderError(StageError):
    """The template cannot render this conversation; other conversations may be fine."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with its chat template.

    `eos_ids` are the ids that end a turn when the target generates. `source` names the folder in errors.
    What a template can do is found by rendering small probes, because templates do not declare it.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    source: str = "target"

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Read tokenizer and template from the HF layout in `folder`, without network.

        Raises StageError when the tokenizer cannot be read or holds no chat template.
        """
        try:
            tokenizer = read_tokenizer(folder)
        except (OSError, ValueError) as error:
            raise StageError(f"{folder}: no tokenizer that transformers can read ({error}); rebuild the target") from error
        if not tokenizer.chat_template:
            raise StageError(
                f"{folder}: the tokenizer has no chat template; choose an instruct model or add chat_template.jinja to the target"
            )
        return cls(tokenizer, frozenset(eos_ids(folder, tokenizer)), str(folder))

    @cached_property
    def digest(self) -> str:
        """sha256 of the template's text, of all its named templates when there are several."""
        template = self.tokenizer.chat_template
        return sha256_text(template if isinstance(template, str) else canonical(template))

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of every special token, sorted."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(added | set(self.tokenizer.all_special_tokens)))

    @cached_property
    def control(self) -> ControlText:
        """What tells the template's control tokens from text that spells them."""
        return ControlText(self.special_tokens)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows the tools to the target."""
        return PROBE in self._probe([Message("user", "x")], PROBE_TOOLS)

    @cached_property
    def takes_tool_calls(self) -> bool:
        """Whether the template shows the tool calls of earlier turns."""
        return any(PROBE in self._probe_calls(as_mapping) for as_mapping in (True, False))

    @cached_property
    def wants_mapping(self) -> bool:
        """Whether the arguments of a tool call are given as a mapping; else as JSON text.

        A template for text either fails on a mapping or prints it in Python's notation, with single quotes.
        """
        text = self._probe_calls(as_mapping=True)
        return PROBE in text and "'key_probe'" not in text

    @cached_property
    def takes_reasoning(self) -> bool:
        """Whether the template shows the reasoning of the last assistant turn."""
        return PROBE in self._probe([Message("user", "x"), Message("assistant", "y", reasoning_content=PROBE)])

    @cached_property
    def switches_thinking(self) -> bool:
        """Whether the generation prompt differs when thinking is switched off by a variable of the template."""
        user = [Message("user", "x")]
        on = self._probe(user, add_generation_prompt=True)
        off = self._probe(user, add_generation_prompt=True, **NO_THINKING)
        return on != off

    def prompt_ids(self, messages: Sequence[Message], tools: str | None = None, **variables: Any) -> list[int]:
        """Ids up to and including the generation prompt: what the target sees before it answers.

        `tools` is canonical JSON text, as a row holds it. Raises RenderError when the template cannot render them.
        """
        return self.tokenize(self.render(messages, tools, add_generation_prompt=True, **variables))

    def conversation_ids(self, messages: Sequence[Message], tools: str | None = None) -> list[int]:
        """Ids of the whole conversation, without a generation prompt. Raises RenderError like `prompt_ids`."""
        return self.tokenize(self.render(messages, tools, add_generation_prompt=False))

    def render(self, messages: Sequence[Message], tools: str | None = None, **variables: Any) -> str:
        """The conversation as text for `tokenize`, where a private character stands for text that spells a control token.

        Raises RenderError, naming what the template cannot show, instead of leaving it out.
        """
        for index, message in enumerate(messages):
            if message.content is None and message.tool_calls is None:
                raise RenderError(
                    f"{self.source}: message {index} ({message.role}) has no content to render; drop it or cut the conversation before it"
                )
        if tools is not None and not self.takes_tools:
            raise RenderError(
                f"{self.source}: the chat template shows no tools; set `tools: drop` for the dataset or choose another target"
            )
        if any(message.tool_calls is not None for message in messages) and not self.takes_tool_calls:
            raise RenderError(
                f"{self.source}: the chat template shows no tool calls; leave such conversations out or choose another target"
            )
        self._refuse_private_characters(messages, tools)
        hidden = wire_messages([self.control.hide_in(message) for message in messages], self.wants_mapping)
        return self._apply(hidden, tools and self.control.hide(tools), **variables)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a rendered `text`: the template has already written the BOS, so none is added."""
        (ids,) = self.tokenize_all([text])
        return ids.tolist()

    def tokenize_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int64 [N] per text: the ids of each as `tokenize` gives them, many at a time."""
        marked = {place: self._tokenize_marked(text) for place, text in enumerate(texts) if has_marks(text)}
        plain = iter(self._encode([text for place, text in enumerate(texts) if place not in marked]))
        return [marked[place] if place in marked else next(plain) for place in range(len(texts))]

    def count(self, text: str) -> int:
        """Number of tokens of `text`."""
        return len(self.tokenize(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokenize_marked(self, text: str) -> np.ndarray:
        """int64 [N]: ids of a text with private characters, whose special tokens are the template's own and all else is plain text."""
        parts = self.control.split(text)
        plain = iter(self._encode([self.control.show(part) for part in parts[::2]], control=False))
        special = iter(self._encode(parts[1::2]))
        return np.concatenate([next(special) if place % 2 else next(plain) for place in range(len(parts))])

    def _encode(self, texts: Sequence[str], control: bool = True) -> list[np.ndarray]:
        """int64 [N] per text; unless `control`, special tokens in it are plain text."""
        if not isinstance(self.tokenizer, PreTrainedTokenizerFast):
            options = {"add_special_tokens": False, "split_special_tokens": not control}
            return [np.array(flat_ids(self.tokenizer(text, **options)), dtype=np.int64) for text in texts]
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = not control
        backend.no_truncation()
        backend.no_padding()
        return [np.array(one.ids, dtype=np.int64) for one in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _refuse_private_characters(self, messages: Sequence[Message], tools: str | None) -> None:
        texts = [getattr(message, name) for message in messages for name in TEXTS]
        if any(text is not None and has_marks(text) for text in [*texts, tools]):
            raise RenderError(f"{self.source}: the text holds characters of Unicode's plane 15, which stand for control tokens here")

    def _apply(self, messages: list[dict[str, Any]], tools: str | None, **variables: Any) -> str:
        try:
            parsed = None if tools is None else json.loads(tools)
            return str(self.tokenizer.apply_chat_template(messages, tools=parsed, tokenize=False, **variables))
        except RENDER_ERRORS as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RenderError(
                f"{self.source}: the chat template cannot render the roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def _probe_calls(self, as_mapping: bool) -> str:
        call = Message("assistant", "", tool_calls=PROBE_CALLS)
        return self._probe([Message("user", "x"), call, Message("tool", "1"), Message("assistant", "y")], as_mapping=as_mapping)

    def _probe(self, messages: Sequence[Message], tools: str | None = None, as_mapping: bool = True, **variables: Any) -> str:
        """Rendered text of a probe, empty when the template refuses it."""
        try:
            return self._apply(wire_messages(messages, as_mapping), tools, **variables)
        except RenderError:
            return ""


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. A tokenizer.json says it all, and reading it needs no torch: seconds for a small stage."""
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def eos_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that stops generation by the configs in `folder` or by `tokenizer`.

    Raises StageError when there is none: no turn would ever end.
    """
    ids = {tokenizer.eos_token_id} - {None}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = json.loads(path.read_text()) if path.is_file() else {}
        for section in (config, config.get("text_config") or {}):
            value = section.get("eos_token_id")
            ids |= set(value) if isinstance(value, list) else {value} - {None}
    if not ids:
        raise StageError(f"{folder}: neither the configs nor the tokenizer name an eos token; set eos_token_id in generation_config.json")
    return ids


def flat_ids(value: Any) -> list[int]:
    """The ids in `value` as one flat list: a list, a tensor or array, a mapping with `input_ids`, or a batch of one of them.

    Tokenizers return any of these, by class and version; `len` of a mapping counts its fields, not its tokens.
    Raises StageError for anything else.
    """
    if isinstance(value, Mapping) or hasattr(value, "input_ids"):
        return flat_ids(value["input_ids"])
    if hasattr(value, "tolist"):
        return flat_ids(value.tolist())
    if isinstance(value, list | tuple) and len(value) == 1 and not isinstance(value[0], int):
        return flat_ids(value[0])
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return list(value)
    raise StageError(
        f"the tokenizer returned {type(value).__name__} ({str(value)[:80]}) where a list of ids was expected; "
        "use a tokenizer that transformers knows"
    )
