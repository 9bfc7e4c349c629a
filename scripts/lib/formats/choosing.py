"""Second pass: candidates in their random order, tokenised until enough of them pass."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from scripts.lib.chat.signature import opening, signatures
from scripts.lib.chat.template import ChatTemplate, RenderError
from scripts.lib.formats.conversation import Conversation
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.scanning import Reader, Scan
from scripts.lib.formats.settings import DatasetSettings

SPARE = 1.1  # candidates looked at, as a multiple of the rows still missing at the rate at which they passed so far
AT_ONCE = 256  # conversations tokenised together


@dataclass
class Choice:
    """Rows in the order of their hash, what was rejected on the way, and how many candidates were not needed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    not_sampled: int = 0

    def missing(self, wanted: int, left: int) -> int:
        """How many of the `left` candidates to look at next, so that most likely no further reading is needed."""
        looked_at = len(self.rows) + len(self.rejected)
        rate = max(len(self.rows) / looked_at, 0.1) if looked_at else 1.0
        return min(left, int((wanted - len(self.rows)) / rate * SPARE) + 16)


def choose(found: Scan, reader: Reader, template: ChatTemplate) -> Choice:
    """Take candidates in their order until `samples` rows pass, or all of them without `samples`."""
    queue, choice = found.order, Choice()
    wanted = len(queue) if reader.dataset.samples is None else reader.dataset.samples
    while queue and len(choice.rows) < wanted:
        size = choice.missing(wanted, len(queue))
        outcomes = dict(looked_at(reader.conversations(queue[:size]), found, reader.dataset, template))
        taken = 0
        while taken < size and len(choice.rows) < wanted:
            outcome = outcomes.pop(queue[taken])
            if isinstance(outcome, RejectedError):
                choice.rejected.append((queue[taken], outcome.reason, outcome.value))
            else:
                choice.rows.append(outcome)
            taken += 1
        queue = queue[taken:]
    choice.not_sampled = len(queue)
    sign(choice.rows)
    return choice


def rejection_share(found: Scan, choice: Choice) -> float:
    """Share of records that would be rejected if all were looked at: the second pass stands for those not sampled."""
    if not found.records:
        return 0.0
    passed_scan = (len(found.order) + found.same_group) / found.records
    looked_at = len(choice.rows) + len(choice.rejected)
    return 1.0 - passed_scan * (len(choice.rows) / looked_at if looked_at else 1.0)


def looked_at(
    conversations: Iterable[tuple[int, Conversation]], found: Scan, dataset: DatasetSettings, template: ChatTemplate
) -> Iterator[tuple[int, dict[str, Any] | RejectedError]]:
    """Source row, and prepared row or rejection, of each of the conversations."""
    stream = iter(conversations)
    while batch := list(islice(stream, AT_ONCE)):
        rendered: list[tuple[int, Conversation, str]] = []
        for row, conversation in batch:
            try:
                rendered.append((row, conversation, template.render(conversation.prompt, conversation.tools, add_generation_prompt=True)))
            except RenderError as error:
                yield row, RejectedError("template_refuses", error)
        lengths = map(len, template.tokenize_all([text for _, _, text in rendered]))
        for (row, conversation, _), tokens in zip(rendered, lengths, strict=True):
            if dataset.max_prompt_tokens is not None and tokens > dataset.max_prompt_tokens:
                yield row, RejectedError("too_long", tokens)
            else:
                yield row, prepared_row(row, found.row_id(conversation), conversation, tokens, dataset)


def prepared_row(row: int, row_id: str, conversation: Conversation, tokens: int, dataset: DatasetSettings) -> dict[str, Any]:
    """The row of docs/design.md §3; `signature` still holds the text that it is made from."""
    return {
        "id": row_id,
        "group": conversation.group or row_id,
        "source_row": row,
        "messages": [vars(message) for message in conversation.messages],
        "tools": conversation.tools,
        "kind": dataset.kind,
        "partition": dataset.partition,
        "prompt_tokens": tokens,
        "prompt_hash": conversation.prompt_hash,
        "signature": opening(conversation.messages),
    }


def sign(rows: list[dict[str, Any]]) -> None:
    """Put the signature of each row in the place of its text."""
    for row, signature in zip(rows, signatures([row["signature"] for row in rows]), strict=True):
        row["signature"] = signature
