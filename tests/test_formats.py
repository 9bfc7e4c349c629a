"""Records of every format to typed messages: public bug reports and rows in the shape of real data sets."""

import json
from typing import Any

import pytest

from scripts.lib.chat.messages import Message, answerable
from scripts.lib.chat.signature import normalise
from scripts.lib.formats.conversation import Conversation, normalised, read_conversation
from scripts.lib.formats.record import RejectedError
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.formats.tools import canonical_calls
from scripts.lib.ground.errors import StageError


def settings(form: str, columns: dict[str, str] | None = None, **rest: Any) -> DatasetSettings:
    """Settings of a dataset of one format."""
    return DatasetSettings.of({"dataset": {"format": form, "columns": columns or {}, **rest}, "name": "demo", "seed": 7})


def read(record: dict[str, Any], form: str, columns: dict[str, str] | None = None, **rest: Any) -> Conversation:
    """One record as a conversation."""
    return read_conversation(record, settings(form, columns, **rest))


def pairs(conversation: Conversation) -> list[tuple[str, str | None]]:
    """Role and content of each message."""
    return [(message.role, message.content) for message in conversation.messages]


def reason(record: dict[str, Any], form: str, columns: dict[str, str] | None = None, **rest: Any) -> str:
    """Why a record is rejected."""
    with pytest.raises(RejectedError) as rejected:
        read(record, form, columns, **rest)
    return rejected.value.reason


def chat(*turns: tuple[str, str | None], row_id: str = "x_0") -> dict[str, Any]:
    """A ShareGPT record."""
    return {"id": row_id, "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def test_no_speaker_vanishes() -> None:
    """System turns stay, known labels are mapped, an unknown one rejects the row by name (NVIDIA-NeMo/Automodel#3144)."""
    french = chat(("system", "Answer in French."), ("human", "Say good day."), ("gpt", "Bonjour."))
    assert [role for role, _ in pairs(read(french, "sharegpt"))] == ["system", "user", "assistant"]
    assert pairs(read(chat(("user", "Ping"), ("bing", "Pong")), "sharegpt")) == [("user", "Ping"), ("assistant", "Pong")]
    odd = chat(("human", "Hi"), ("laguna_s", "Hello"))
    assert reason(odd, "sharegpt") == "unknown_role:laguna_s"
    assert pairs(read(odd, "sharegpt", roles={"laguna_s": "assistant"})) == [("user", "Hi"), ("assistant", "Hello")]


def test_other_names_for_the_keys_of_a_turn() -> None:
    """A trajectory with role and text, its agent called ai, is a list of messages too."""
    record = {"id": "s3", "trajectory": [{"role": "user", "text": "ls"}, {"role": "ai", "text": "```\nls\n```"}]}
    columns = {"messages": "trajectory", "content": "text"}
    assert pairs(read(record, "messages", columns)) == [("user", "ls"), ("assistant", "```\nls\n```")]


def test_all_turns_of_a_long_conversation_are_kept() -> None:
    """Six messages come out as six, in order, with the source's id, and each answer can be asked for anew (ai-dynamo/aiperf#798)."""
    texts = ["Name a fruit.", "Pear.", "Another?", "Fig.", "Last one?", "Plum."]
    turns = [{"content": text, "role": ("user", "assistant")[number % 2]} for number, text in enumerate(texts)]
    found = read({"prompt": texts[0], "prompt_id": "p1", "messages": turns}, "messages", {"id": "prompt_id", "messages": "messages"})
    assert [content for _, content in pairs(found)] == texts
    assert found.own_id == "p1"
    assert list(answerable(found.messages)) == [1, 3, 5]


def test_conversations_that_start_or_end_oddly() -> None:
    """Empty ones are rejected, a leading answer is dropped, a lone question is kept (lm-sys/FastChat clean_sharegpt)."""
    assert reason({"id": "e0", "conversations": []}, "sharegpt") == "empty"
    continued = read(chat(("gpt", "(continued) ...so x=2."), ("human", "Why?"), ("gpt", "Because 2+2=4.")), "sharegpt")
    assert (pairs(continued), continued.dropped) == ([("user", "Why?"), ("assistant", "Because 2+2=4.")], 1)
    assert reason(chat(("system", "Be brief.")), "sharegpt") == "no_user_turn"
    assert pairs(read(chat(("human", "Only a question")), "sharegpt")) == [("user", "Only a question")]
    assert reason({"id": "e4", "conversations": None}, "sharegpt") == "empty"
    assert reason(chat(("human", " \n")), "sharegpt") == "empty_user_turn"


def test_pieces_of_one_chat_share_a_group() -> None:
    """x_0 and x_2 are rows of one conversation; a last user turn stays as a prompt."""
    record = chat(("gpt", "...step 3."), ("human", "Go on"), ("bing", "Step 4 is to test."), ("human", "ok"), row_id="Kq7_2")
    found = read(record, "sharegpt")
    assert [role for role, _ in pairs(found)] == ["user", "assistant", "user"]
    assert (found.own_id, found.group) == ("Kq7_2", "Kq7")
    assert read(chat(("human", "hi"), row_id="plain"), "sharegpt").group is None


def test_apostrophes_in_single_quoted_arguments() -> None:
    """Arguments in single quotes keep their apostrophes; role words inside a tool's answer are text (camel-ai/camel#541)."""
    record = {
        "system": 'SYSTEM: You may use these functions -\n{"name": "forecast", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}\n\n{"name": "tide", "parameters": {"type": "object", "properties": {}}}',
        "chat": 'USER: Forecast for St John\'s?\n\n\nASSISTANT: <functioncall> {"name": "forecast", "arguments": \'{"city": "St John\'s", '
        '"days": 2}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"note": "USER: none. ASSISTANT: none.", "sky": "clear"}\n\n\n'
        "ASSISTANT: Clear skies. <|endoftext|>\n\n\nUSER: Thanks\n\n\nASSISTANT: Any time. <|endoftext|>\n\n\n",
    }
    found = read(record, "transcript")
    assert [role for role, _ in pairs(found)] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    call = json.loads(found.messages[2].tool_calls or "")[0]
    assert call["function"] == {"name": "forecast", "arguments": {"city": "St John's", "days": 2}}
    assert [tool["function"]["name"] for tool in json.loads(found.tools or "")] == ["forecast", "tide"]
    text = " ".join(content or "" for _, content in pairs(found))
    assert not any(mark in text for mark in ("<|endoftext|>", "SYSTEM:", "Any time. "))
    assert found.messages[3].content == '{"note": "USER: none. ASSISTANT: none.", "sky": "clear"}'


def test_transcript_without_functions_ends_on_a_prompt() -> None:
    """No schema means no tools, not an empty list."""
    found = read(
        {"system": "SYSTEM: You are helpful.", "chat": "USER: Hello\n\n\nASSISTANT: Hi! <|endoftext|>\n\n\nUSER: Bye"}, "transcript"
    )
    assert pairs(found) == [("system", "You are helpful."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "Bye")]
    assert found.tools is None
    broken = {"system": "", "chat": "USER: a\n\n\nASSISTANT: <functioncall> {name: b}"}
    assert reason(broken, "transcript") == "bad_tool_call"


def test_tool_calls_have_one_form() -> None:
    """Arguments as text and as an object give equal text; text that is no JSON stays (oumi-ai/oumi#2599)."""
    text = canonical_calls([{"function": {"name": "mul", "arguments": '{"b": 18, "a": 3}'}}])
    assert text == canonical_calls('[{"type": "function", "function": {"name": "mul", "arguments": {"a": 3, "b": 18}}}]')
    assert json.loads(text or "")[0]["function"]["arguments"] == {"a": 3, "b": 18}
    raw = canonical_calls([{"function": {"name": "say", "arguments": "not json"}}])
    assert json.loads(raw or "")[0]["function"]["arguments"] == "not json"
    with pytest.raises(RejectedError, match="bad_tool_call"):
        canonical_calls([{"arguments": {}}])


def test_results_of_tools_keep_the_call_that_they_answer() -> None:
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "mul", "arguments": "{}"}}]},
        {"role": "tool", "content": {"value": 3}, "tool_call_id": "c1", "name": "mul"},
        {"role": "tool", "content": "4"},
    ]
    results = read({"messages": turns}, "messages", {"messages": "messages"}).messages[2:]
    assert [(result.content, result.tool_call_id, result.name) for result in results] == [('{"value":3}', "c1", "mul"), ("4", None, None)]


def test_turns_in_lists_of_lists() -> None:
    """bfcl: each inner list is a turn and an answer follows it; Python's type names become JSON schema's."""
    function = {"name": "f", "description": "d", "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}}}
    record = {
        "id": "multi_0",
        "question": [[{"role": "user", "content": "One"}], [{"role": "user", "content": "Two"}]],
        "function": [function],
    }
    columns = {"id": "id", "messages": "question", "tools": "function"}
    found = read(record, "messages", columns)
    assert pairs(found) == [("user", "One"), ("assistant", None), ("user", "Two"), ("assistant", None)]
    assert all(message.pending for message in found.messages[1::2])
    assert found.prompt == (Message("user", "One"),)
    parameters = json.loads(found.tools or "")[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"x": {"type": "number"}}}
    dropped = read(record, "messages", columns, tools="drop")
    assert (dropped.tools, dropped.tools_dropped) == (None, True)
    written = read(record, "messages", columns, tools="system")
    assert written.tools is None and written.messages[0].role == "system" and '"name":"f"' in str(written.messages[0].content)
    assert reason({**record, "function": "[{]"}, "messages", columns) == "bad_tools"


def test_plain_string_and_parts() -> None:
    """A string is one user turn; text parts are joined; other parts are no text."""
    columns = {"messages": "input"}
    assert pairs(read({"input": "Tell a joke."}, "messages", columns)) == [("user", "Tell a joke.")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert pairs(read({"input": [{"role": "user", "content": parts}]}, "messages", columns)) == [("user", "ab")]
    assert reason({"input": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", columns) == "not_text"
    assert reason({"input": {"word": "at"}}, "messages", columns) == "not_a_list_of_turns"
    assert reason({"input": ["a"]}, "messages", columns) == "not_a_turn"
    assert reason({"other": 1}, "messages", columns) == "missing_column:input"
    assert reason({"input": None}, "messages", columns) == "empty"
    assert reason({"input": [{"role": "user", "content": None}]}, "messages", columns) == "empty_content"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\n7*13=91.\n</think>\n\nNo, 91 = 7 x 13.", "7*13=91.", "No, 91 = 7 x 13."),
        ("<think>\nassume that", None, None),
        ("</think>\n\nIt separates role and text.", None, "It separates role and text."),
        ("Use <think> tags.</think>", None, "Use <think> tags.</think>"),
        ("", None, None),
        (None, None, None),
    ],
)
def test_reasoning_before_the_answer(text: str | None, reasoning: str | None, content: str | None) -> None:
    """Closed reasoning is split off; an unclosed one leaves a turn to be written, and the prompt stays."""
    turns = [{"role": "user", "content": "Is 91 prime?"}, {"role": "assistant", "content": text}]
    found = read({"messages": turns}, "messages", {"messages": "messages"})
    assert found.messages[1] == Message("assistant", content, reasoning)


def test_columns_of_prompt_and_answer() -> None:
    """Old answers and reasoning have their own columns; an empty answer costs nothing; the system may be a column."""
    columns = {"id": "id", "prompt": "problem", "response": "solution", "reasoning": "thinking", "system": "system"}
    record = {"id": "q_17", "problem": "How many legs have 3 spiders?", "thinking": "8 each, 3*8.", "solution": "24", "system": "Count."}
    found = read(record, "columns", columns)
    assert found.messages == (Message("system", "Count."), Message("user", record["problem"]), Message("assistant", "24", "8 each, 3*8."))
    empty = read({"id": "", "input": "Reverse a string.", "output": ""}, "columns", {"id": "id", "prompt": "input", "response": "output"})
    assert (empty.own_id, empty.messages[1].pending) == (None, True)
    answers = {3: "3", 1.5: "1.5", float("nan"): None}
    for value, text in answers.items():
        assert pairs(read({"input": "1+2?", "output": value}, "columns", {"prompt": "input", "response": "output"}))[1] == (
            "assistant",
            text,
        )
    assert pairs(read({"task_id": "HumanEval/0", "prompt": "def f():\n"}, "columns", {"prompt": "prompt"})) == [("user", "def f():\n")]
    assert reason({"prompt": None}, "columns", {"prompt": "prompt"}) == "empty_content"
    assert reason({"prompt": 3}, "columns", {"prompt": "prompt"}) == "not_text"
    assert reason({"foo": "x", "bar": 1}, "columns", {"prompt": "prompt"}) == "missing_column:prompt"


def test_copies_of_a_prompt_share_their_key() -> None:
    """A trailing space, case or the old answer make no new prompt; another later turn does."""
    columns = {"prompt": "instruction", "response": "response"}
    first = read({"instruction": "Turn this loop:\nfor x in a: b.append(x*x)", "response": "b=[x*x for x in a]"}, "columns", columns)
    second = read({"instruction": "turn this loop:\nfor x in a: b.append(x*x) ", "response": "Use: …"}, "columns", columns)
    assert first.duplicate_key == second.duplicate_key == first.prompt_hash
    assert len(first.prompt_hash) == 16
    longer = [read({"turns": ["Hello", last]}, "turns", {"messages": "turns"}) for last in ("a", "b")]
    assert longer[0].prompt_hash == longer[1].prompt_hash
    assert longer[0].duplicate_key != longer[1].duplicate_key


@pytest.mark.parametrize(
    "text", ["", " a\t B\r\n c\x1c\x1fD  ", "Zürich\u00a0 \u2003Ｗ ß", "x" * 9 + " " * 9 + "Y\x0b\x0cz", "\x85 a", "`{[\\]}~"]
)
def test_one_normal_form(text: str) -> None:
    """The fast path for ASCII text and the general one agree."""
    assert normalised(text) == normalise(text)


def test_dialogue_of_two_people() -> None:
    """The first to speak is the user; bursts are joined, also over list borders; a third speaker rejects the row."""
    say = [("p", "Hello"), ("p", "How are you?"), ("q", "fine"), ("p", "ok")]
    bursts = [[{"sender": sender, "text": text, "timestamp": "2018-05-02T19:38:15Z"} for sender, text in say[:2]]]
    bursts += [[{"sender": sender, "text": text}] for sender, text in say[2:]]
    columns = {"id": "_key", "messages": "messages", "speaker": "sender", "content": "text"}
    found = read({"_key": "c1", "messages": bursts, "ratings": {}}, "dialogue", columns)
    assert pairs(found) == [("user", "Hello\nHow are you?"), ("assistant", "fine"), ("user", "ok")]
    assert found.own_id == "c1"
    third = {"messages": [*bursts, [{"sender": "r", "text": "hi"}]]}
    assert reason(third, "dialogue", columns) == "more_than_two_speakers"
    assert reason({"messages": []}, "dialogue", columns) == "empty"


def test_turns_of_the_user_alone() -> None:
    """mt_bench: both turns are kept, the answers are still to be written."""
    found = read({"question_id": 81, "turns": ["Write.", "Rewrite."]}, "turns", {"id": "question_id", "messages": "turns"})
    assert pairs(found) == [("user", "Write."), ("assistant", None), ("user", "Rewrite."), ("assistant", None)]
    assert found.own_id == "81"
    assert reason({"turns": [["a"]]}, "turns", {"messages": "turns"}) == "not_a_list_of_texts"


def test_native_rows_need_answers() -> None:
    """A dataset used as it is has no turn left to write."""
    assert reason(chat(("human", "Why?")), "sharegpt", kind="native") == "no_answer"
    assert reason(chat(("human", "Why?"), ("gpt", "")), "sharegpt", kind="native") == "no_answer"
    assert len(read(chat(("human", "Why?"), ("gpt", "So.")), "sharegpt", kind="native").messages) == 2


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"format": "alpaca"}, "unknown format 'alpaca'; choose one of messages, sharegpt"),
        ({"format": "messages", "columns": {}}, "columns lacks messages; this format takes messages, speaker, content"),
        ({"format": "columns", "columns": {"prompt": "a", "anwser": "b"}}, "unknown anwser"),
        ({"format": "sharegpt", "roles": {"laguna_s": "bot"}}, "'laguna_s' to 'bot'; choose one of system, user"),
    ],
)
def test_settings_that_are_refused(dataset: dict[str, Any], words: str) -> None:
    """Each error says what the format takes."""
    with pytest.raises(StageError, match=words):
        DatasetSettings.of({"dataset": dataset, "name": "demo", "seed": 7})
