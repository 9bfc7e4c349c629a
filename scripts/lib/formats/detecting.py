"""The format and columns of records that nobody has described yet, from their names and the shapes of their values."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scripts.lib.formats.record import Record, RejectedError
from scripts.lib.formats.tools import parsed_json
from scripts.lib.formats.turns_list import listed
from scripts.lib.ground.errors import StageError

SPEAKERS = ("role", "from", "speaker", "sender")
CONTENTS = ("content", "value", "text", "message")
LISTS = ("messages", "conversations", "conversation", "trajectory", "turns", "dialogue", "dialog")
PROMPTS = ("problem", "instruction", "prompt", "question", "input", "query", "task", "user")
RESPONSES = ("solution", "response", "output", "answer", "completion", "deepseek_solution", "assistant")
REASONING = ("thinking", "thought", "reasoning", "reasoning_content", "deepseek_reasoning")
TOOLS = ("tools", "functions", "function")
GROUPS = ("instance_id", "conversation_id", "task_id", "chat_id")


def detected(records: Sequence[Record], source: str) -> dict[str, Any]:
    """`format` and `columns` that read `records` of `source`. Raises StageError with the names there are when none of them is known."""
    if not records:
        raise StageError(f"{source}: no record in its files; choose others by `source`, `members` and `exclude`")
    found = from_list(records) or from_transcript(records) or from_columns(records) or from_json_text(records)
    if found is None:
        raise StageError(
            f"{source}: no known columns: {', '.join(sorted(names(records))) or 'none at all'}; set `format` and `columns` for this dataset"
        )
    columns = dict(found["columns"])
    return {"format": found["format"], "columns": {**common_columns(records, set(columns.values())), **columns}}


def names(records: Iterable[Record]) -> list[str]:
    """Every column of `records`, in the order of their first sight."""
    return list(dict.fromkeys(str(name) for record in records for name in record))


def values(records: Iterable[Record], name: str) -> list[Any]:
    """The values of a column that are neither null nor empty."""
    return [value for record in records if (value := record.get(name)) not in (None, "", [])]


def from_list(records: Sequence[Record]) -> dict[str, Any] | None:
    """A column that lists turns: of {speaker, content}, of lists of them, or of the user's texts alone."""
    known = names(records)
    for name in (*(name for name in LISTS if name in known), *(name for name in known if name not in LISTS)):
        turns = next((turns for value in values(records, name) if isinstance(turns := listed(value), list)), None)
        if turns and all(isinstance(turn, str) for turn in turns) and name == "turns":
            return {"format": "turns", "columns": {"messages": name}}
        nested = bool(turns and isinstance(turns[0], list))
        fields = list_fields(records, name, nested)
        speaker, content = (next((key for key in keys if key in fields), None) for keys in (SPEAKERS, CONTENTS))
        if speaker and content:
            return turns_format(name, speaker, content, fields)
    return None


def list_fields(records: Sequence[Record], name: str, nested: bool) -> list[str]:
    """The keys of the turns of a column."""
    lists = [turns for value in values(records, name) if isinstance(turns := listed(value), list)]
    inner = [turn for turns in lists for turn in (turns[0] if nested and isinstance(turns[0], list) else turns)]
    return names(turn for turn in inner if isinstance(turn, dict))


def turns_format(name: str, speaker: str, content: str, fields: Sequence[str]) -> dict[str, Any]:
    """The format that fits the keys of a list of turns."""
    keys = {"speaker": speaker, "content": content}
    if (speaker, content) == ("from", "value"):
        return {"format": "sharegpt", "columns": {} if name == "conversations" else {"messages": name}}
    if "system_prompt" in fields:
        return {"format": "trajectory", "columns": {"messages": name, **keys}}
    return {"format": "messages", "columns": {"messages": name, **(keys if (speaker, content) != ("role", "content") else {})}}


def from_transcript(records: Sequence[Record]) -> dict[str, Any] | None:
    """A whole chat as one text with USER: and ASSISTANT:."""
    for name in names(records):
        if any(isinstance(value, str) and value.lstrip().startswith("USER:") for value in values(records, name)):
            return {"format": "transcript", "columns": {"messages": name, "preamble": "system"}}
    return None


def from_columns(records: Sequence[Record]) -> dict[str, Any] | None:
    """A prompt in a column of its own, with answer and reasoning beside it where they have known names."""
    texts = [name for name in names(records) if any(isinstance(value, str) for value in values(records, name)) or not values(records, name)]
    prompt = next((name for name in PROMPTS if name in texts), None)
    if prompt is None:
        return None
    columns = {"prompt": prompt}
    for part, known in (("response", RESPONSES), ("reasoning", REASONING)):
        found = next((name for name in known if name in texts and name != prompt), None)
        columns |= {part: found} if found else {}
    if prompt == "instruction" and "input" in texts:
        columns["context"] = "input"
    return {"format": "columns", "columns": columns}


def from_json_text(records: Sequence[Record]) -> dict[str, Any] | None:
    """A column that holds the whole record as JSON text."""
    for name in names(records):
        inner = [value for value in map(parsed_object, values(records, name)) if value]
        if inner:
            found = from_list(inner) or from_transcript(inner) or from_columns(inner)
            if found:
                return {"format": found["format"], "columns": {"record": name, **found["columns"]}}
    return None


def parsed_object(value: Any) -> Mapping[str, Any] | None:
    """The object that `value` is or holds as text; None for anything else."""
    try:
        parsed = parsed_json(value, "") if isinstance(value, str) and value.lstrip().startswith("{") else value
    except RejectedError:
        return None
    return parsed if isinstance(parsed, Mapping) else None


def common_columns(records: Sequence[Record], taken: set[str]) -> dict[str, str]:
    """Columns for id, group, tools and system text, where their names and values say so."""
    free = [name for name in names(records) if name not in taken]
    columns: dict[str, str] = {}
    ids = [name for name in ("id", "uuid", *(name for name in free if name.endswith("_id") and name not in GROUPS)) if name in free]
    own = next((name for name in ids if distinct(values(records, name))), None)
    group = next((name for name in GROUPS if name in free), None)
    columns |= {"id": own} if own else {}
    columns |= {"group": group} if group else {}
    tools = next((name for name in TOOLS if name in free and values(records, name)), None)
    columns |= {"tools": tools} if tools else {}
    if "system" in free and any(isinstance(value, str) for value in values(records, "system")):
        columns["system"] = "system"
    return columns


def distinct(found: Sequence[Any]) -> bool:
    """Whether `found` holds values and none of them twice."""
    return bool(found) and len({str(value) for value in found}) == len(found)


def labels(records: Iterable[Record], columns: Mapping[str, str]) -> Counter[str]:
    """How often each speaker label stands in the turns of `records`; what is neither text nor a number is none."""
    spoken = (turn.get(columns.get("speaker", "")) for record in records for turn in turns_of(record, columns))
    return Counter(str(label) for label in spoken if isinstance(label, str | int))


def turns_of(record: Record, columns: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """The turns of one record, those of inner lists included."""
    if "record" in columns:
        record = {**record, **(parsed_object(record.get(columns["record"])) or {})}
    turns = listed(record.get(columns.get("messages", "")))
    for turn in turns if isinstance(turns, list) else ():
        yield from (inner for inner in (turn if isinstance(turn, list) else [turn]) if isinstance(inner, Mapping))
