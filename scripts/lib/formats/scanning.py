"""First pass over the records: every rejection that needs no tokenizer, and a name for each candidate."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.conversation import Conversation, read_conversation
from scripts.lib.formats.record import Record, RejectedError
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.sources.json_stream import Cut
from scripts.lib.sources.records import read_records


@dataclass(frozen=True)
class Candidate:
    """A record that may become a row; its id does not depend on where it lies in the files."""

    id: str
    source_row: int


@dataclass
class Scan:
    """What the first pass saw. `columns` counts the records that hold each column."""

    records: int = 0
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    columns: Counter[str] = field(default_factory=Counter)
    cuts: list[Cut] = field(default_factory=list)
    leading_messages_dropped: int = 0
    tools_dropped: int = 0


class Reader:
    """The records of a dataset's files, as often as they are asked for."""

    def __init__(self, paths: Sequence[Path], dataset: DatasetSettings) -> None:
        self.paths, self.dataset = paths, dataset
        self.cuts: list[Cut] = []

    def records(self) -> Iterator[tuple[int, Record]]:
        """(source_row, record) over the files in their order."""
        self.cuts, row = [], 0
        for path in self.paths:
            for record in read_records(path, self.on_cut):
                yield row, record
                row += 1

    def on_cut(self, cut: Cut) -> None:
        """Note a cut file where the config says so; StageError elsewhere."""
        if self.dataset.truncated != "keep":
            raise StageError(
                f"{self.dataset.name}: {cut.file} ends inside a record that starts at byte {cut.byte_offset}, after {cut.records} whole "
                f"records; fetch it again, or set `truncated: keep` to use the whole ones"
            )
        self.cuts.append(cut)

    def conversations(self, rows: Collection[int]) -> dict[int, Conversation]:
        """The conversations of the records at `rows`, each of which the first pass could read."""
        wanted, found = set(rows), {}
        for row, record in self.records():
            if row in wanted:
                found[row] = read_conversation(record, self.dataset)
                if len(found) == len(wanted):
                    break
        return found


class Screen:
    """Rejects, one after the other, what the target's template cannot hold and what was there before."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.special = re.compile("|".join(map(re.escape, template.special_tokens)))
        self.seen: set[str] = set()

    def check(self, conversation: Conversation) -> None:
        """Raise RejectedError with the first reason against `conversation`."""
        if conversation.tools and not self.template.takes_tools:
            raise RejectedError("template_without_tools", conversation.tools)
        if any(message.tool_calls for message in conversation.messages) and not self.template.takes_tool_calls:
            raise RejectedError("template_without_tool_calls")
        control = self.special.search(conversation.text)
        if control:
            raise RejectedError("control_token", control[0])
        key = conversation.duplicate_key
        if key in self.seen:
            raise RejectedError("duplicate", key)
        self.seen.add(key)


def scan(reader: Reader, template: ChatTemplate) -> Scan:
    """Read all records once and sort out what needs no tokenizer."""
    found, screen = Scan(), Screen(template)
    named: list[tuple[int, str | None, str]] = []
    for row, record in reader.records():
        found.records += 1
        found.columns.update(map(str, record))
        try:
            conversation = read_conversation(record, reader.dataset)
            screen.check(conversation)
        except RejectedError as rejected:
            found.rejected.append((row, rejected.reason, rejected.value))
            continue
        found.leading_messages_dropped += conversation.dropped
        found.tools_dropped += conversation.tools_dropped
        named.append((row, conversation.own_id, conversation.side_hash))
    found.cuts = reader.cuts
    uses = Counter(own for _, own, _ in named)
    found.candidates = [Candidate(own if own is not None and uses[own] == 1 else side, row) for row, own, side in named]
    return found
