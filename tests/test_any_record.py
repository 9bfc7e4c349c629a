"""Seeded random records of any JSON shape: every format gives a conversation that can be written, or a rejection with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.chat.messages import ROLES
from scripts.lib.formats.conversation import read_conversation
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.registry import FORMATS
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.inspecting.inspecting import inspect
from scripts.lib.inspecting.sampling import Size
from scripts.lib.sources.settings import Address, SourceSettings

RECORDS = 3000
TEXTS = (
    "",
    " ",
    "hi",
    "USER: hi",
    "USER: a\n\n\nASSISTANT: <functioncall> {",
    "<think>a</think>b",
    '{"a": [',
    "[{}]",
    '[{"name": "f"}]',
    "null",
    "\ud83d",
    "é",
)
LEAVES: tuple[Any, ...] = (None, True, 0, -1, 10**30, 1.5, float("nan"), [], {}, *TEXTS)
KEYS = ("role", "content", "from", "value", "text", "name", "function", "arguments", "tool_calls", "reasoning", "type", "system_prompt")
SPEAKERS = ("user", "human", "assistant", "gpt", "ai", "tool", "system", "bot")


def anything(draw: random.Random, depth: int = 3) -> Any:
    """A value of any shape, turns with some likeness to real ones among them."""
    kind = draw.random() if depth else 1.0
    if kind < 0.25:
        return [anything(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind < 0.4:
        return {draw.choice(KEYS): anything(draw, depth - 1) for _ in range(draw.randint(0, 4))}
    if kind < 0.7:
        return [turn(draw) for _ in range(draw.randint(1, 3))]
    return draw.choice(LEAVES)


def turn(draw: random.Random) -> dict[str, Any]:
    """Something like a turn under every name that formats have for speaker and text, one part of it odd."""
    said = dict.fromkeys(("content", "value", "text"), "hi") | {name: draw.choice(SPEAKERS) for name in ("role", "from", "speaker")}
    return said | {draw.choice((*said, "tool_calls", "reasoning")): draw.choice(LEAVES)}


def settings(form: str) -> DatasetSettings:
    """Every column that the format knows, under its own name or the format's default."""
    shape = FORMATS[form]
    names = {name: shape.defaults.get(name, name) for name in shape.known() if name != "record"}
    return DatasetSettings.of({"dataset": {"format": form, "columns": names}, "name": "d", "seed": 1})


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_conversation_or_a_reason(form: str) -> None:
    """Nothing else is raised, and what is kept has a user turn, known roles, and texts that a file can hold."""
    draw, dataset = random.Random(form), settings(form)
    rare = {dataset.columns[name] for name in ("id", "group", "system", "tools")}
    kept = 0
    for _ in range(RECORDS):
        record = {column: anything(draw) for column in dataset.columns.values() if draw.random() < (0.3 if column in rare else 0.95)}
        try:
            found = read_conversation(record, dataset)
        except RejectedError as rejected:
            assert rejected.reason and len(rejected.reason) <= 60 and len(rejected.value) <= 200
            (rejected.reason + rejected.value).encode()
            continue
        kept += 1
        roles = [message.role for message in found.messages]
        assert "user" in roles and set(roles) <= set(ROLES)
        json.dumps([vars(message) for message in found.messages], ensure_ascii=False).encode()
        assert len(found.side_hash) == 16 == len(found.prompt_hash)
    assert kept


@pytest.mark.parametrize("seed", range(6))
def test_a_page_or_a_sentence(tmp_path: Path, seed: int) -> None:
    """`inspect_source` on records of any shape shows them, or says in one sentence that it knows none of their columns."""
    draw = random.Random(seed)
    names = ("id", "messages", "conversations", "prompt", "tools", "system", "chat", "function")
    records = [{name: anything(draw) for name in names if draw.random() < 0.8} for _ in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        page = inspect(SourceSettings(Address("path", f"{tmp_path}/a.jsonl"), "source", 7), Size(), tmp_path, show_rows=True)
    except StageError as error:
        assert "no known columns" in str(error)
        return
    page.encode()
    assert "datasets:" in page and " rows, " in page
