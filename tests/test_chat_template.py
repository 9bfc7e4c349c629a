"""Chat templates: ids as the server sees them, and what a template can and cannot show."""

import json

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from scripts.lib.chat.messages import Message, from_rows, to_rows
from scripts.lib.chat.template import ChatTemplate, RenderError, flat_ids
from scripts.lib.ground.errors import StageError
from tests.chat_parts import CALLS_AS_ITEMS, CALLS_AS_JSON, CALLS_AS_TEXT, CALLS_JOINED, REASONING, save_target, talk, word_tokenizer
from tests.tiny import CHATML

TOOLS = json.dumps([{"type": "function", "function": {"name": "mul", "description": "", "parameters": {}}}])
KIMI_K2 = (
    "{%- for m in messages -%}{{- m.name or m.role -}}{{- ': ' -}}"
    "{%- if m.role == 'tool' -%}{{- '## Return of ' ~ m.tool_call_id ~ '\\n' -}}{%- endif -%}{{- m.content or '' -}}"
    "{%- for call in m.tool_calls or [] -%}{{- '[' ~ call['id'] ~ ']' -}}{%- endfor -%}{%- endfor -%}"
)
IDS = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


def load(folder, template=CHATML):
    return ChatTemplate.load(save_target(folder, template))


def calls(arguments):
    return Message("assistant", None, tool_calls=json.dumps([{"function": {"name": "mul", "arguments": arguments}}]))


@pytest.mark.parametrize(
    "value", [IDS, [IDS], tuple(IDS), torch.tensor([IDS]), np.array(IDS), {"input_ids": [IDS]}], ids=lambda value: type(value).__name__
)
def test_ids_are_unwrapped_whatever_the_tokenizer_returns(value):
    assert flat_ids(value) == IDS


def test_length_of_a_batch_encoding_is_its_tokens_not_its_fields():
    """https://github.com/NVIDIA/Model-Optimizer/pull/2172: every conversation looked two tokens long."""
    encoding = BatchEncoding({"input_ids": IDS, "attention_mask": [1] * 12})
    assert len(encoding) == 2
    assert len(flat_ids(encoding)) == 12


@pytest.mark.parametrize("value", ["text", [IDS, IDS], 3, None, [1.5]])
def test_anything_but_ids_of_one_text_is_an_error(value):
    with pytest.raises(StageError, match="list of ids"):
        flat_ids(value)


def test_the_prompt_ends_where_the_target_begins_to_answer(tmp_path):
    template = load(tmp_path)
    assert template.decode(template.prompt_ids(talk("hi"))).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert template.decode(template.conversation_ids(talk("hi", "yo"))).endswith("<|im_start|>assistant\nyo<|im_end|>\n")
    assert template.count("hi yo") == 5


def test_one_bos_where_both_template_and_tokenizer_write_it(tmp_path):
    """https://github.com/OpenRLHF/OpenRLHF/issues/393: the ids began with two."""
    words = ["<pad>", "<s>", "</s>", "?", "??", "u", "hi", "a", "yo"]
    turns = (
        "{{ '<s>' }}{% for m in messages %}{{ ' ' + m.role[0] + ' ' + m.content + (' </s>' if m.role == 'assistant' else '') }}{% endfor %}"
    )
    folder = save_target(tmp_path, turns + "{% if add_generation_prompt %}{{ ' a' }}{% endif %}", word_tokenizer(words))
    template = ChatTemplate.load(folder)
    assert template.tokenizer("u hi")["input_ids"][0] == 1  # this tokenizer does add one by itself
    assert template.prompt_ids(talk("hi")) == [1, 5, 6, 7]
    assert template.conversation_ids(talk("hi", "yo")) == [1, 5, 6, 7, 8, 2]


def test_end_of_turn_ids_come_from_configs_and_tokenizer(tmp_path):
    folder = save_target(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {"eos_token_id": 7}}))
    assert ChatTemplate.load(folder).eos_ids == {0, 2, 5, 7}


def test_a_target_without_template_is_refused(tmp_path):
    with pytest.raises(StageError, match="no chat template"):
        load(tmp_path, None)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StageError, match="no tokenizer"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("text", [CALLS_AS_JSON, CALLS_AS_ITEMS])
def test_arguments_as_text_or_mapping_render_alike_where_a_mapping_is_wanted(tmp_path, text):
    """https://github.com/oumi-ai/oumi/pull/2599: one came out as an escaped string, or crashed on `items`."""
    template = load(tmp_path, text)
    as_text, as_mapping = (template.render([*talk("go"), calls(value)]) for value in ('{"a": 3, "b": 18}', {"a": 3, "b": 18}))
    assert template.wants_mapping
    assert as_text == as_mapping
    assert ('[mul {"a": 3, "b": 18}]' if text is CALLS_AS_JSON else "[mul a=3;b=18;]") in as_text


@pytest.mark.parametrize("text", [CALLS_AS_TEXT, CALLS_JOINED])
def test_arguments_are_plain_json_where_text_is_wanted(tmp_path, text):
    template = load(tmp_path, text)
    for value in ('{"a": 3, "b": 18}', {"a": 3, "b": 18}):
        assert '[mul {"a": 3, "b": 18}]' in template.render([*talk("go"), calls(value)])
    assert "[mul not json]" in template.render([*talk("go"), calls("not json")])


def test_arguments_that_are_no_json_are_kept_or_refused_but_never_crash(tmp_path):
    assert '[mul "not json"]' in load(tmp_path / "json", CALLS_AS_JSON).render([*talk("go"), calls("not json")])
    with pytest.raises(RenderError, match="cannot render"):
        load(tmp_path / "items", CALLS_AS_ITEMS).render([*talk("go"), calls("not json")])


def test_a_tool_call_without_content_is_not_rendered_as_none(tmp_path):
    assert "None" not in load(tmp_path, CALLS_AS_JSON).render([*talk("go"), calls({})])


def test_results_of_tools_name_the_call_that_they_answer(tmp_path):
    """Kimi K2's template prints ids, which few datasets hold: unnamed calls are named as Kimi's servers do, results in their order."""
    template = load(tmp_path, KIMI_K2)
    both = Message("assistant", None, tool_calls=json.dumps([{"function": {"name": name, "arguments": {}}} for name in ("add", "mul")]))
    text = template.render([*talk("go"), both, Message("tool", "3"), Message("tool", "4"), calls({}), Message("tool", "5")])
    assert text.endswith("functions.mul:2]tool: ## Return of functions.mul:2\n5")
    assert "functions.add:0][functions.mul:1]tool: ## Return of functions.add:0\n3tool: ## Return of functions.mul:1\n4" in text
    own = Message("assistant", None, tool_calls=json.dumps([{"id": name, "function": {"name": "add", "arguments": {}}} for name in "ab"]))
    results = [Message("tool", "late", tool_call_id="b", name="add"), Message("tool", "rest")]
    assert template.render([*talk("go"), own, *results]).endswith("[a][b]add: ## Return of b\nlatetool: ## Return of a\nrest")


def test_what_a_template_cannot_show_is_an_error_not_left_out(tmp_path):
    template = load(tmp_path)
    assert not template.takes_tools
    with pytest.raises(RenderError, match="shows no tools"):
        template.prompt_ids(talk("go"), TOOLS)
    with pytest.raises(RenderError, match="shows no tool calls"):
        template.prompt_ids([*talk("go"), calls({})])
    with pytest.raises(RenderError, match=r"message 0 \(user\) has no content"):
        template.prompt_ids([Message("user")])


def test_tools_are_shown_where_the_template_takes_them(tmp_path):
    template = load(tmp_path, CALLS_AS_JSON)
    assert template.takes_tools
    assert '"name": "mul"' in template.decode(template.prompt_ids(talk("go"), TOOLS))


def test_an_error_that_the_template_raises_names_the_conversation(tmp_path):
    template = load(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RenderError, match="roles user, assistant: TemplateError: roles must alternate"):
        template.conversation_ids(talk("a", "b"))


def test_reasoning_is_kept_where_the_template_takes_it(tmp_path):
    messages = talk("2+2?", Message("assistant", "4", reasoning_content="add"))
    assert "<think>\nadd\n</think>\n\n4" in load(tmp_path / "r", REASONING).render(messages)
    assert load(tmp_path / "r", REASONING).takes_reasoning
    assert not load(tmp_path / "c").takes_reasoning


def test_messages_survive_the_way_through_a_table():
    messages = (
        Message("system", "s"),
        Message("user", "u"),
        calls({"a": 1}),
        Message("tool", "t", tool_call_id="c", name="n"),
        Message("assistant"),
    )
    assert from_rows(to_rows(messages)) == messages
    assert [message.pending for message in messages] == [False, False, False, False, True]


def test_special_tokens_and_digest(tmp_path):
    template = load(tmp_path)
    assert template.special_tokens == ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    assert template.digest != load(tmp_path / "other", REASONING).digest
    assert len(template.digest) == 64
