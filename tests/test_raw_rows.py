"""Every quirk of ten public datasets: raw records to the messages, tools, ids and groups that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.lib.chat.messages import Message
from scripts.lib.formats.conversation import Conversation, read_conversation
from scripts.lib.formats.detecting import detected
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from tests.raw_rows import RAW

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "configs/kimi-k2.5.yaml").read_text())["datasets"]
READ = ("format", "columns", "roles", "kind", "partition", "tools")
Shown = list[tuple[str, str | None]]


def read(name: str, place: int, **changes: Any) -> Conversation:
    """Record `place` of a dataset, read as the config of the flagship mix says."""
    entry = {key: CONFIG[name][key] for key in READ if key in CONFIG[name]} | changes
    if entry["format"] == "detect":
        entry |= detected([RAW[name][place]], name)
    return read_conversation(RAW[name][place], DatasetSettings.of({"dataset": entry, "name": name, "seed": 7}))


def shown(conversation: Conversation) -> Shown:
    """Role and content of each message."""
    return [(message.role, message.content) for message in conversation.messages]


def text(name: str, place: int, column: str) -> str:
    """A raw value."""
    return str(RAW[name][place][column])


CASES: list[tuple[str, int, Shown]] = [
    ("deepswe_kimi", 0, [(turn["role"], turn["content"]) for turn in RAW["deepswe_kimi"][0]["messages"]]),
    (
        "deepswe_kimi",
        1,
        [("user", "Explain the token <|im_middle|> in one line."), ("assistant", "It separates role and text.")],
    ),
    ("kimi_2000x", 0, [("user", text("kimi_2000x", 0, "problem")), ("assistant", "24")]),
    ("kimi_2000x", 1, [("user", "Write one line on rain."), ("assistant", "Rain taps the tin roof.")]),
    ("kimi_2000x", 2, [("user", "Hi"), ("assistant", "Hello")]),
    (
        "glaive",
        0,
        [
            ("system", "You may use these functions -"),
            ("user", "Tip on 40 at Joe's?"),
            ("assistant", None),
            ("tool", '{"tip": 6}'),
            ("assistant", "Six."),
        ],
    ),
    (
        "glaive",
        1,
        [
            ("system", "You are helpful, with no access to external functions."),
            ("user", "Hello"),
            ("assistant", "Hi!"),
            ("user", "Bye"),
        ],
    ),
    ("opencode_instruct", 0, [("user", "Write f(n) that doubles n."), ("assistant", text("opencode_instruct", 0, "output"))]),
    ("opencode_instruct", 1, [("user", "Reverse a string."), ("assistant", None)]),
    ("magicoder", 0, [("user", text("magicoder", 0, "instruction")), ("assistant", "b=[x*x for x in a]")]),
    ("mixture_of_thoughts", 0, [("user", "Is 91 prime?"), ("assistant", "No, 91 = 7 x 13.")]),
    ("mixture_of_thoughts", 1, [("user", "Prove it."), ("assistant", None)]),
    ("openthoughts", 0, [("user", "Return your final response within \\boxed{}. 5*6?"), ("assistant", "\\boxed{30}")]),
    ("ultrachat", 0, [("user", "Name a river."), ("assistant", "The Po."), ("user", "Where is it?"), ("assistant", "Italy.")]),
    ("ultrachat", 1, [("user", "Write a haiku.")]),
    ("sharegpt", 1, [("user", "Go on"), ("assistant", "Step 4 is to test."), ("user", "ok")]),
    ("sharegpt", 2, [("system", "Reply in German."), ("user", "Hello"), ("assistant", "Hallo!")]),
    ("sharegpt", 3, [("user", "why"), ("assistant", None)]),
    (
        "swe_agent",
        0,
        [
            ("system", "You control a shell. One command per turn."),
            ("user", "ISSUE: parse('') crashes."),
            ("assistant", "Look first.\n```\nls\n```"),
            ("user", "parse.py\n(Open file: n/a)\n(Current directory: /lib)\nbash-$"),
            ("assistant", "```\nsubmit\n```"),
        ],
    ),
    ("swe_agent", 1, [("user", "ISSUE: parse('') crashes."), ("assistant", None)]),
]


@pytest.mark.parametrize(("name", "place", "messages"), CASES, ids=[f"{name}-{place}" for name, place, _ in CASES])
def test_messages(name: str, place: int, messages: Shown) -> None:
    """No turn is lost, none is made up; a turn without a usable text is one that the target has still to write."""
    assert shown(read(name, place)) == messages


def test_rejections() -> None:
    """What gives no row says why."""
    with pytest.raises(RejectedError, match="empty"):
        read("sharegpt", 0)
    with pytest.raises(StageError, match=r"no known columns: bar, foo; set `format`"):
        read("kimi_2000x", 3)
    with pytest.raises(RejectedError, match="no_answer"):
        read("swe_agent", 1, kind="native")


def test_reasoning_tools_ids_and_groups() -> None:
    """Reasoning is split off, calls keep their apostrophes, ids are the source's own where it has one, pieces share a group."""
    assert read("mixture_of_thoughts", 0).messages[1].reasoning_content == "7*13=91."
    assert read("openthoughts", 0).messages[1].reasoning_content == "thirty"
    assert [read("kimi_2000x", place).messages[1].reasoning_content for place in range(3)] == ["8 each, 3*8.", "keep it short", "greet"]
    glaive = read("glaive", 0)
    (call,) = json.loads(str(glaive.messages[2].tool_calls))
    assert call["function"] == {"name": "tip", "arguments": {"bill": 40, "who": "Joe's"}}
    assert [tool["function"]["name"] for tool in json.loads(str(glaive.tools))] == ["tip"]
    assert read("glaive", 1).tools is None
    assert [read("opencode_instruct", place).own_id for place in range(2)] == ["oc1", None]
    assert read("ultrachat", 0).own_id == "9f01"
    assert [read("sharegpt", place).group for place in (1, 2)] == ["Kq7", "Zz1"]
    assert {read("swe_agent", place).group for place in range(2)} == {"acme__lib-12"}
    first, second = read("magicoder", 0), read("magicoder", 1)
    assert first.duplicate_key == second.duplicate_key and first.own_id is None


def test_the_system_column_is_kept_or_dropped_as_the_config_says() -> None:
    """A system text in a column is a message only where `columns.system` names it."""
    kept = read("openthoughts", 0, columns={"system": "system"})
    assert shown(kept)[0] == ("system", text("openthoughts", 0, "system"))
    assert len(kept.messages) == 1 + len(read("openthoughts", 0).messages)
    metadata = {"format": "columns", "columns": {"prompt": "problem", "response": "deepseek_solution", "reasoning": "deepseek_reasoning"}}
    found = read("openthoughts", 1, **metadata)
    assert found.messages == (Message("user", "Sort a list."), Message("assistant", "sorted(x)", "use sorted"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepswe_kimi", "messages"),
        ("glaive", "transcript"),
        ("opencode_instruct", "columns"),
        ("magicoder", "columns"),
        ("mixture_of_thoughts", "messages"),
        ("ultrachat", "messages"),
        ("sharegpt", "sharegpt"),
        ("swe_agent", "trajectory"),
    ],
)
def test_columns_tell_the_format(name: str, form: str) -> None:
    """`detect` finds the format and names the columns that the config names by hand."""
    found = detected(RAW[name], name)
    assert found["format"] == form
    dataset = DatasetSettings.of({"dataset": found, "name": name, "seed": 7})
    mapped = DatasetSettings.of({"dataset": {key: CONFIG[name][key] for key in READ if key in CONFIG[name]}, "name": name, "seed": 7})
    for part in ("messages", "prompt", "response", "preamble", "group"):
        assert dataset.columns.get(part) == mapped.columns.get(part)


def test_an_eleventh_dataset_needs_no_code() -> None:
    """Other names for everything: labels, keys, a record in JSON text, a list in JSON text, context beside the prompt."""
    turns = [{"speaker": "customer", "text": "Hi"}, {"speaker": "model", "text": "Hello"}]
    entry: dict[str, Any] = {"format": "messages", "roles": {"customer": "user", "model": "assistant"}}
    columns = {"messages": "chat", "speaker": "speaker", "content": "text"}
    for record, extra in (
        ({"chat": turns}, {}),
        ({"chat": json.dumps(turns)}, {}),
        ({"row": json.dumps({"chat": turns})}, {"record": "row"}),
        ({"row": str({"chat": turns})}, {"record": "row"}),
    ):
        dataset = DatasetSettings.of({"dataset": {**entry, "columns": columns | extra}, "name": "x", "seed": 7})
        assert shown(read_conversation(record, dataset)) == [("user", "Hi"), ("assistant", "Hello")]
    with pytest.raises(RejectedError, match="bad_record"):
        read_conversation({"row": "[1"}, dataset)
    alpaca = DatasetSettings.of({"dataset": {"format": "columns", "columns": {"prompt": "i", "context": "c"}}, "name": "x", "seed": 7})
    assert shown(read_conversation({"i": "Sum it.", "c": "1 2"}, alpaca)) == [("user", "Sum it.\n\n1 2")]
    assert shown(read_conversation({"i": "Sum it.", "c": ""}, alpaca)) == [("user", "Sum it.")]


def test_tool_calls_however_they_are_written() -> None:
    """JSON text, an object, Python's notation, apostrophes escaped: equal calls are equal; what a tool gave may be an object."""
    want = {"name": "say", "arguments": {"to": "O'Neil", "n": 1}}
    texts: list[Any] = [
        [{"function": want}],
        json.dumps([{"function": want}]),
        str([{"function": want}]),
        [{"function": {"name": "say", "arguments": '{"to": "O\\\'Neil", "n": 1}'}}],
        [{"function": {"name": "say", "arguments": str(want["arguments"])}}],
    ]
    dataset = DatasetSettings.of({"dataset": {"format": "messages", "columns": {"messages": "m"}}, "name": "x", "seed": 7})
    found = set()
    for calls in texts:
        turns = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        found.add(read_conversation({"m": [*turns, {"role": "tool", "content": {"ok": True}}]}, dataset).messages[1:])
    ((call, answer),) = found
    assert json.loads(str(call.tool_calls)) == [{"type": "function", "function": want}]
    assert answer == Message("tool", '{"ok":true}')
