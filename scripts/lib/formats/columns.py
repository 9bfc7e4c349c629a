"""Format `columns`: the prompt in one column and, where there is one, the old answer in another.

`context` is a column with a text that belongs to the prompt, such as the `input` beside an `instruction`.
"""

from collections.abc import Mapping

from scripts.lib.chat.messages import Message
from scripts.lib.formats.record import Draft, Format, Record, RejectedError, text_of
from scripts.lib.formats.turns_list import answer


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record. An empty old answer is no reason to lose the prompt."""
    prompt = text_of(record[columns["prompt"]])
    if prompt is None:
        raise RejectedError("empty_content", columns["prompt"])
    context = text_of(record.get(columns["context"])) if "context" in columns else None
    messages = [Message("user", f"{prompt}\n\n{context}" if context else prompt)]
    if "response" in columns:
        reasoning = record.get(columns["reasoning"]) if "reasoning" in columns else None
        messages.append(answer(text_of(record.get(columns["response"])), {"reasoning": reasoning}))
    return Draft(messages)


FORMAT = Format(convert, ("prompt",), optional=("context", "response", "reasoning"))
