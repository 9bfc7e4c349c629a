"""What holds for every conversation under every style of template, tried on seeded random ones."""

import random

import numpy as np
import polars as pl
import pytest

from scripts.lib.chat.messages import Message, to_rows
from scripts.lib.chat.rows import Source, token_rows
from scripts.lib.chat.structure import Structure
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.chat.turns import Native
from tests.chat_parts import save_target
from tests.template_styles import STYLES, spaced
from tests.tiny import CHATML

CONVERSATIONS = 60
PLAIN = [
    "yes",
    " no",
    "maybe\n\n",
    "\n",
    "  ",
    "the answer is 42",
    "def f(x):\n    return x",
    "é",
    "ß 你好",
    "🙂",
    "user",
    "assistant",
    "\t",
    "<",
    "|>",
]


def text(draw: random.Random, special: list[str], most: int = 6) -> str:
    """Words, spaces, line breaks, and now and then what looks like a template's own text; never empty."""
    quoted = [*special, *(f"{special[0]}assistant\n", f"{special[-1]}\n{special[0]}user\n", "".join(special))]
    parts = [draw.choice(quoted if draw.random() < 0.2 else PLAIN) for _ in range(draw.randint(1, most))]
    return "".join(parts) if "".join(parts).strip() else "so"


def conversation(draw: random.Random, special: list[str], thoughts: bool) -> list[Message]:
    """One to four questions and answers, perhaps after a system message."""
    messages = [Message("system", text(draw, special))] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        thought = text(draw, special, 3) if thoughts and draw.random() < 0.5 else None
        messages += [Message("user", text(draw, special)), Message("assistant", text(draw, special), reasoning_content=thought)]
    return messages


@pytest.fixture(scope="module", params=sorted(STYLES))
def case(request, tmp_path_factory):
    """A style, its template, and random conversations."""
    style = STYLES[request.param]
    folder = save_target(tmp_path_factory.mktemp("style"), style.template, style.tokenizer)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    draw = random.Random(request.param)
    return style, ChatTemplate.load(folder), [conversation(draw, list(style.special), style.thoughts) for _ in range(CONVERSATIONS)]


def encoded(template, conversations):
    """The token rows of each conversation."""
    rows = [{"id": str(i), "group": "g", "prompt_hash": "h", "messages": to_rows(m), "tools": None} for i, m in enumerate(conversations)]
    for found in Native(template).conversations(pl.DataFrame(rows, schema_overrides={"tools": pl.String})):
        kept, untrained = token_rows(Source(found.id, "d", "g", "h"), found.rows, 10**6)
        yield kept, [*found.lost, *untrained]


def trained_texts(rows, template):
    return [template.decode(row.input_ids[span.start : span.end].tolist()) for row in rows for span in row.spans]


def test_decoded_spans_are_the_answers_and_their_end_of_turn(case):
    style, template, conversations = case
    for messages, (rows, lost) in zip(conversations, encoded(template, conversations), strict=True):
        answers = [style.written(message) + style.end for message in messages if message.role == "assistant"]
        assert trained_texts(rows, template) == answers
        assert lost == []


def test_control_tokens_are_the_templates_own_and_text_that_spells_them_is_text(case):
    style, template, conversations = case
    special = set(template.tokenizer.convert_tokens_to_ids(list(style.special)))
    plain = [[Message(m.role, "so", m.reasoning_content and "so") for m in messages] for messages in conversations]
    for (rows, _), (tame, _), messages in zip(encoded(template, conversations), encoded(template, plain), conversations, strict=True):
        for row, other in zip(rows, tame, strict=True):
            assert sum(id_ in special for id_ in row.input_ids) == sum(id_ in special for id_ in other.input_ids)
        whole = template.control.show(template.render(messages, None))
        assert whole.startswith(template.decode(rows[-1].input_ids.tolist()))


def test_exactly_one_bos_where_the_template_writes_one(case):
    style, template, conversations = case
    for rows, _ in encoded(template, conversations):
        for row in rows:
            found = np.flatnonzero(row.input_ids == template.tokenizer.bos_token_id) if style.bos else [0]
            assert list(found) == [0]


def test_a_prompt_is_tokenised_for_the_target_as_in_its_row(case):
    _, template, conversations = case
    for messages, (rows, _) in zip(conversations, encoded(template, conversations), strict=True):
        first = [message.role for message in messages].index("assistant")
        thinking_off = (
            {} if messages[first].reasoning_content or not template.switches_thinking else {"enable_thinking": False, "thinking": False}
        )
        prompt = template.prompt_ids(messages[:first], **thinking_off)
        assert rows[0].input_ids[: rows[0].spans[0].start].tolist() == prompt


def test_search_finds_what_prefix_rendering_gives_wherever_it_is_used(case):
    style, template, conversations = case
    structure = Structure(template)
    assert structure.answers_stay != (style is STYLES["thinking"])
    assert structure.thoughts_stay != style.thoughts
    searched = 0
    for messages in conversations:
        if structure.answers_stay and not any(message.reasoning_content for message in messages):
            assert structure.turns_by_search(messages, None) == structure.turns_by_prefix(messages, None)
            searched += 1
    assert searched or not structure.answers_stay


def test_a_tokenizer_that_writes_a_space_first_gives_whole_rows(tmp_path):
    folder = save_target(tmp_path, CHATML, spaced())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    template = ChatTemplate.load(folder)
    draw = random.Random(0)
    conversations = [[Message("user", draw.choice(["yes", "no"])), Message("assistant", "the answer is 42")] for _ in range(3)]
    assert Native(template).adds_to_pieces
    for messages, (rows, lost) in zip(conversations, encoded(template, conversations), strict=True):
        assert lost == []
        assert rows[0].input_ids.tolist() == template.tokenize(template.render(messages, None).removesuffix("\n"))
        assert trained_texts(rows, template)[0].strip() == "the answer is 42<|im_end|>"


def test_private_characters_of_a_text_are_refused_not_taken_for_control_tokens(tmp_path):
    template = ChatTemplate.load(save_target(tmp_path, CHATML))
    bad = [Message("user", "a \U000f0001"), Message("assistant", "b")]
    ((rows, lost),) = encoded(template, [bad])
    assert (rows, [turn.reason for turn in lost]) == ([], ["template_error"])
    assert "plane 15" in lost[0].value
