"""First pass over the records: every rejection that needs no tokenizer, and a place in a random order for each candidate.

What is kept of a record are four numbers, so that memory does not grow with what the records hold.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import polars as pl

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.formats.conversation import Conversation, read_conversation
from scripts.lib.formats.record import Record, RejectedError
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.sources.json_stream import Cut
from scripts.lib.sources.records import chosen_records, column_names, read_records

HEAD = 200  # records looked at where columns are to be guessed or shown


@dataclass
class Scan:
    """What the first pass saw. `columns` counts the records that hold each column.

    `order` holds the source rows of the candidates in their random order, `shared` the hashes of own ids that several
    conversations bear, which therefore name none of them.
    """

    records: int = 0
    rejected: list[tuple[int, str, str]] = field(default_factory=list)
    order: Sequence[int] = ()
    shared: frozenset[int] = frozenset()
    columns: Counter[str] = field(default_factory=Counter)
    cuts: list[Cut] = field(default_factory=list)
    same_group: int = 0  # rejected for `one_per_group`: sound rows, which count against no limit
    leading_messages_dropped: int = 0
    tools_dropped: int = 0

    def row_id(self, conversation: Conversation) -> str:
        """The source's own id where it names one conversation, else the hash of the prompt side: neither depends on the place."""
        own = conversation.own_id
        return conversation.side_hash if own is None or number(own) in self.shared else own


class Reader:
    """The records of a dataset's files, as often as they are asked for."""

    def __init__(self, paths: Sequence[Path], dataset: DatasetSettings) -> None:
        self.paths, self.dataset = paths, dataset
        self.cuts: list[Cut] = []
        self.starts: list[int] = []  # source row of the first record of each file, known after the first pass
        self.names = None if "record" in dataset.columns else frozenset(dataset.columns.values())

    def records(self) -> Iterator[tuple[int, Record]]:
        """(source_row, record) over the files in their order."""
        self.cuts, self.starts, row = [], [], 0
        for path in self.paths:
            self.starts.append(row)
            for _, record in chosen_records(path, None, self.on_cut, self.names):
                yield row, record
                row += 1

    def conversations(self, rows: Sequence[int]) -> Iterator[tuple[int, Conversation]]:
        """The conversations of the records at `rows`, each of which the first pass could read, in the order of the files."""
        wanted = sorted(rows)
        for path, start, end in zip(self.paths, self.starts, [*self.starts[1:], None], strict=True):
            here = [row - start for row in wanted if row >= start and (end is None or row < end)]
            for place, record in chosen_records(path, here, lambda _: None, self.names) if here else ():
                yield start + place, read_conversation(record, self.dataset)

    def on_cut(self, cut: Cut) -> None:
        """Note a cut file where the config says so; StageError elsewhere."""
        if self.dataset.truncated != "keep":
            raise StageError(
                f"{self.dataset.name}: {cut.file} ends inside a record that starts at byte {cut.byte_offset}, after {cut.records} whole "
                f"records; fetch it again, or set `truncated: keep` to use the whole ones"
            )
        self.cuts.append(cut)

    def columns_seen(self, counted: Counter[tuple[str, ...]]) -> Counter[str]:
        """How many records hold each column, by the files' schemas where they have one, else by the `counted` sets of columns."""
        ends = [*self.starts[1:], sum(counted.values())]
        schemas = [column_names(path) for path in self.paths]
        seen: Counter[str] = Counter()
        if all(schema is not None for schema in schemas):
            for schema, start, end in zip(schemas, self.starts, ends, strict=True):
                seen.update(dict.fromkeys(schema or (), end - start))
        else:
            for names, count in counted.items():
                seen.update(dict.fromkeys(names, count))
        return seen


@dataclass
class Numbers:
    """One entry per candidate: source row, hash of what it asks, hashes of its own id and group (0 for none), its place."""

    rows: "array[int]" = field(default_factory=lambda: array("Q"))
    keys: "array[int]" = field(default_factory=lambda: array("Q"))
    owns: "array[int]" = field(default_factory=lambda: array("Q"))
    groups: "array[int]" = field(default_factory=lambda: array("Q"))
    places: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, row: int, conversation: Conversation, seed: int) -> None:
        """Append one candidate. Its place is that of its own id, which most sources keep unique."""
        own = conversation.own_id
        self.rows.append(row)
        self.keys.append(int(conversation.duplicate_key, 16))
        self.owns.append(0 if own is None else number(own))
        self.groups.append(0 if conversation.group is None else number(conversation.group))
        self.places.append(hash_order(seed, conversation.side_hash if own is None else own))

    def table(self) -> pl.DataFrame:
        """The entries as a table of u64 columns row, key, own, group, place."""
        columns = {"row": self.rows, "key": self.keys, "own": self.owns, "group": self.groups, "place": self.places}
        return pl.DataFrame({name: pl.Series(values, dtype=pl.UInt64) for name, values in columns.items()})


def scan(reader: Reader, template: ChatTemplate) -> Scan:
    """Read all records once and sort out what needs no tokenizer."""
    found, numbers = Scan(), Numbers()
    counted: Counter[tuple[str, ...]] = Counter()
    for row, record in reader.records():
        found.records += 1
        counted[tuple(record)] += 1
        try:
            conversation = read_conversation(record, reader.dataset)
            check_template(conversation, template)
        except RejectedError as rejected:
            found.rejected.append((row, rejected.reason, rejected.value))
            continue
        found.leading_messages_dropped += conversation.dropped
        found.tools_dropped += conversation.tools_dropped
        numbers.add(row, conversation, reader.dataset.seed)
    found.cuts, found.columns = reader.cuts, reader.columns_seen(counted)
    put_in_order(found, numbers.table(), reader)
    return found


def check_template(conversation: Conversation, template: ChatTemplate) -> None:
    """Raise RejectedError when the target's template cannot hold `conversation`."""
    if conversation.tools and not template.takes_tools:
        raise RejectedError("template_without_tools", conversation.tools)
    if not template.takes_tool_calls and any(message.tool_calls for message in conversation.messages):
        raise RejectedError("template_without_tool_calls")


def put_in_order(found: Scan, table: pl.DataFrame, reader: Reader) -> None:
    """Fill `order` and `shared`; of rows that ask the same, the first in the files stays and the others are rejected.

    A row that is added later moves no other. Were it the first in the order that stays, a prompt would be sampled the more
    likely the more copies of it there are.
    """
    named = table.filter(pl.col("own") != 0)
    shared = named.group_by("own").agg(pl.col("key").n_unique()).filter(pl.col("key") > 1).select("own")
    if shared.height:
        rows = named.join(shared, on="own", how="semi")["row"].to_list()
        places = [(row, hash_order(reader.dataset.seed, conversation.side_hash)) for row, conversation in reader.conversations(rows)]
        moved = pl.DataFrame(places, schema={"row": pl.UInt64, "place": pl.UInt64}, orient="row")
        table = table.update(moved, on="row")
    table = without_copies(found, table.sort("row"), "key", "duplicate")
    if reader.dataset.one_per_group:
        alone, grouped = table.filter(pl.col("group") == 0), table.filter(pl.col("group") != 0)
        once = without_copies(found, grouped, "group", "same_group")
        found.same_group = grouped.height - once.height
        table = pl.concat([alone, once])
    found.order, found.shared = table.sort("place", "row")["row"].to_list(), frozenset(shared["own"].to_list())


def without_copies(found: Scan, table: pl.DataFrame, column: str, reason: str) -> pl.DataFrame:
    """The first row of each value in `column`; the others are rejected with `reason`."""
    first = table.unique(column, keep="first", maintain_order=True)
    copies = table.join(first.select("row"), on="row", how="anti").select("row", column)
    found.rejected += [(row, reason, f"{value:016x}") for row, value in copies.iter_rows()]
    return first


def hash_order(seed: int, row_id: str) -> int:
    """A place in a random order that only the seed and the row's own id decide."""
    return number(f"{seed}/{row_id}")


def number(text: str) -> int:
    """The first 64 bits of the sha256 of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def head_records(paths: Sequence[Path]) -> list[Record]:
    """The first records of the files, with all of their columns."""
    return list(islice(chain.from_iterable(read_records(path, lambda _: None) for path in paths), HEAD))
