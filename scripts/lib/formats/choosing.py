"""Second pass: candidates in the order of a seeded hash, tokenised until enough of them pass."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.chat.messages import to_rows
from scripts.lib.chat.template import ChatTemplate, RenderError
from scripts.lib.formats.conversation import Conversation
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.scanning import Candidate, Reader
from scripts.lib.formats.settings import DatasetSettings

FIRST_POOL = 2  # candidates read at once, as a multiple of the samples wanted; doubles while too few pass


@dataclass
class Choice:
    """Rows in the order of their hash, what was rejected on the way, and how many candidates were never looked at."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    not_sampled: int = 0


def choose(candidates: Sequence[Candidate], reader: Reader, template: ChatTemplate) -> Choice:
    """Take candidates in hash order until `samples` rows pass, or all of them without `samples`."""
    dataset = reader.dataset
    queue = sorted(candidates, key=lambda candidate: hash_order(dataset.seed, candidate.id))
    wanted = len(queue) if dataset.samples is None else dataset.samples
    choice, size = Choice(), FIRST_POOL * wanted
    while queue and len(choice.rows) < wanted:
        pool, queue = queue[:size], queue[size:]
        conversations = reader.conversations([candidate.source_row for candidate in pool])
        while pool and len(choice.rows) < wanted:
            candidate = pool.pop(0)
            try:
                choice.rows.append(prepared_row(candidate, conversations[candidate.source_row], dataset, template))
            except RejectedError as rejected:
                choice.rejected.append((candidate.source_row, rejected.reason, rejected.value))
        choice.not_sampled = len(pool) + len(queue)
        size *= 2
    return choice


def hash_order(seed: int, row_id: str) -> bytes:
    """A place in a random order that only the seed and the row's own id decide."""
    return hashlib.sha256(f"{seed}/{row_id}".encode()).digest()


def prepared_row(candidate: Candidate, conversation: Conversation, dataset: DatasetSettings, template: ChatTemplate) -> dict[str, Any]:
    """The row of docs/design.md §3. Raises RejectedError when its first prompt is too long or the template refuses it."""
    try:
        tokens = len(template.prompt_ids(conversation.prompt, conversation.tools))
    except RenderError as error:
        raise RejectedError("template_refuses", error) from error
    if dataset.max_prompt_tokens is not None and tokens > dataset.max_prompt_tokens:
        raise RejectedError("too_long", tokens)
    return {
        "id": candidate.id,
        "group": conversation.group or candidate.id,
        "source_row": candidate.source_row,
        "messages": to_rows(conversation.messages),
        "tools": conversation.tools,
        "kind": dataset.kind,
        "partition": dataset.partition,
        "prompt_tokens": tokens,
        "prompt_hash": conversation.prompt_hash,
    }
