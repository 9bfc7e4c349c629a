"""Format `columns`: the prompt in one column and, where there is one, the old answer in another.

`context` is a column with a text that belongs to the prompt, such as the `input` beside an `instruction`.
"""

import math
from collections.abc import Mapping
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record, RejectedError, text_of
from scripts.lib.formats.turns_list import answer
from scripts.lib.ground.files import canonical


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record. An empty old answer is no reason to lose the prompt."""
    prompt = text_of(record[columns["prompt"]])
    if prompt is None:
        raise RejectedError("empty_content", columns["prompt"])
    context = text_of(record.get(columns["context"])) if "context" in columns else None
    messages = [Message("user", f"{prompt}\n\n{context}" if context else prompt)]
    if "response" in columns:
        reasoning = record.get(columns["reasoning"]) if "reasoning" in columns else None
        messages.append(answer(written(record.get(columns["response"])), {"reasoning": reasoning}))
    return Draft(messages)


def written(value: Any) -> str | None:
    """An old answer as text; a number, as problems in mathematics have it, as JSON writes it, NaN as none."""
    if isinstance(value, int | float):
        return None if math.isnan(value) else canonical(value)
    return text_of(value)


FORMAT = Format(convert, ("prompt",), optional=("context", "response", "reasoning"))
