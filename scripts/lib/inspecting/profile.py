"""What records hold: types, labels, turn patterns, lengths, scripts and likely duplicates."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.lib.chat.messages import Message
from scripts.lib.chat.near import Entry, NearIndex, bands
from scripts.lib.chat.signature import opening, signatures
from scripts.lib.formats.conversation import Conversation
from scripts.lib.formats.record import Record

DEPTH = 4
LETTERS = 400  # of one conversation, looked at for its script
NEAR = 0.8  # share of agreeing places from which on two prompts count as near duplicates
PATTERN = 6  # turns of a pattern that are spelt out


@dataclass(frozen=True)
class Column:
    """One column: what its values are, and in how many records it is null, empty or absent."""

    name: str
    kind: str
    nulls: int
    empty: int
    example: str


def column_profiles(records: Sequence[Record]) -> list[Column]:
    """Every column in the order of its first sight."""
    found = []
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        present = [value for value in values if value is not None]
        empty = sum(value in ("", [], {}) for value in present)
        example = next((str(value) for value in present if value not in ("", [], {})), "")
        found.append(Column(str(name), kind_of(present), len(values) - len(present), empty, " ".join(example.split())))
    return found


def kind_of(values: Sequence[Any], depth: int = DEPTH) -> str:
    """The types of `values`, nested: `text`, `[{from: text, value: text?}]`, several joined by `|`; `?` marks keys that may be null."""
    lists = [value for value in values if isinstance(value, list)]
    objects = [value for value in values if isinstance(value, dict)]
    plain = {plain_kind(value) for value in values if not isinstance(value, list | dict)}
    if lists:
        plain.add(f"[{kind_of([item for value in lists for item in value], depth - 1) if depth else '…'}]")
    if objects:
        plain.add(object_kind(objects, depth))
    return "|".join(sorted(plain - {"null"})) or "null"


def object_kind(objects: Sequence[dict[str, Any]], depth: int) -> str:
    """The keys of `objects` with the types of their values."""
    keys = list(dict.fromkeys(key for value in objects for key in value))[:12] if depth else []
    parts = []
    for key in keys:
        values = [value.get(key) for value in objects]
        mark = "?" if any(value is None for value in values) else ""
        parts.append(f"{key}: {kind_of([value for value in values if value is not None], depth - 1)}{mark}")
    return "{" + (", ".join(parts) or "…") + "}"


def plain_kind(value: Any) -> str:
    """The type of a value that holds no others."""
    names = {type(None): "null", str: "text", bool: "true/false", int: "integer", float: "number"}
    return names.get(type(value), type(value).__name__)


def pattern(roles: Sequence[str]) -> str:
    """Turns as `system user assistant`, long ones as their beginning, length and end."""
    if len(roles) <= PATTERN:
        return " ".join(roles)
    return f"{' '.join(roles[:3])} … {roles[-1]} ({len(roles)} turns)"


def quantiles(lengths: Sequence[int]) -> str:
    """Median, 90th percentile and longest."""
    if not lengths:
        return "none"
    middle, high, most = np.quantile(lengths, [0.5, 0.9, 1.0], method="lower")
    return f"median {middle:,}, 90 % up to {high:,}, longest {most:,}"


def scripts(conversations: Iterable[Conversation]) -> Counter[str]:
    """How many conversations are mostly in each script: a hint at the language, which no table of words is needed for."""
    return Counter(script(opening(conversation.messages)[:LETTERS]) for conversation in conversations)


def script(text: str) -> str:
    """The script that most letters of `text` belong to, by their Unicode names."""
    letters = Counter(unicodedata.name(letter, "UNKNOWN").split()[0].lower() for letter in text if letter.isalpha())
    return letters.most_common(1)[0][0] if letters else "no letters"


def duplicates(conversations: Sequence[Conversation]) -> tuple[int, int]:
    """How many conversations ask the same as an earlier one, and how many others nearly the same."""
    keys: set[str] = set()
    distinct = []
    for conversation in conversations:
        if conversation.duplicate_key not in keys:
            distinct.append(conversation)
        keys.add(conversation.duplicate_key)
    return len(conversations) - len(distinct), near_duplicates([opening(conversation.messages) for conversation in distinct])


def near_duplicates(texts: Sequence[str]) -> int:
    """How many `texts` share at least `NEAR` of their signature's places with an earlier one."""
    index, near, found = NearIndex(NEAR), 0, signatures(texts)
    hashes = bands(found, [0] * len(found), NEAR).tolist()
    for row, fields in enumerate(zip(found, hashes, strict=True)):
        entry = Entry(str(row), str(row), *fields)  # each text is a source of its own
        near += index.find(entry) is not None
        index.add(entry)
    return near


def lengths(conversations: Sequence[Conversation], count: Callable[[str], int]) -> tuple[list[int], list[int]]:
    """Length of the first prompt, and of the whole text, of each conversation."""
    prompts = [count(text_of(conversation.prompt)) for conversation in conversations]
    return prompts, [count(text_of(conversation.messages)) for conversation in conversations]


def text_of(messages: Iterable[Message]) -> str:
    """All that `messages` say, a line each."""
    return "\n".join(text for message in messages for text in (message.reasoning_content, message.content, message.tool_calls) if text)
