"""The assistant turns of a conversation as ids: as the target's server reported them, or rendered from a native dataset."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.lib.chat.messages import Message, from_rows
from scripts.lib.chat.rows import MIN_SPAN, Lost, Turn
from scripts.lib.chat.template import ChatTemplate, RenderError


def response_turns(rows: Iterable[Mapping[str, Any]]) -> list[Turn]:
    """The turns of one conversation's response rows, in order. The ids are the engine's own: nothing is rendered again."""
    return sorted((Turn(row["turn"], row["prompt_ids"], row["output_ids"]) for row in rows), key=lambda turn: turn.number)


def native_turns(row: Mapping[str, Any], template: ChatTemplate, max_length: int) -> tuple[list[Turn], list[Lost]]:
    """Every assistant turn of a prepared row by prefix rendering, and those that the template cannot give.

    A turn's output is what the conversation up to it has beyond its prompt; a template that rewrites earlier turns,
    as reasoning templates do, thereby gives prompts that do not extend each other. Other templates only lengthen a
    conversation, so nothing is rendered after a prompt that leaves no room for a trained token within `max_length`.
    """
    messages = from_rows(row["messages"])
    indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    turns: list[Turn] = []
    lost = [] if indices else [Lost(row["id"], 0, "no_assistant_turn", f"{len(messages)} messages")]
    room = True
    for number, index in enumerate(indices):
        if not room:
            lost.append(Lost(row["id"], number, "no_trained_position", f"message {index} lies past max_length {max_length}"))
            continue
        try:
            turn = native_turn(number, messages[: index + 1], row["tools"], template)
        except RenderError as error:
            lost.append(Lost(row["id"], number, "template_error", str(error)))
            continue
        if turn is None:
            lost.append(Lost(row["id"], number, "prompt_not_prefix", f"message {index}"))
        else:
            turns.append(turn)
            room = template.takes_reasoning or len(turn.prompt_ids) + MIN_SPAN <= max_length
    return turns, lost


def native_turn(number: int, messages: Sequence[Message], tools: str | None, template: ChatTemplate) -> Turn | None:
    """The last of `messages` as a turn; None when no generation prompt of the template is a prefix of the conversation.

    A turn without reasoning may be what a reasoning template writes with thinking switched off. Then the longer prompt
    fits, which ends in an empty reasoning block that the server gives and the target does not generate.
    """
    ids = template.conversation_ids(messages, tools)
    prompts = [template.prompt_ids(messages[:-1], tools)]
    if messages[-1].reasoning_content is None and template.switches_thinking:
        prompts.append(template.prompt_ids(messages[:-1], tools, enable_thinking=False))
    fitting = [prompt for prompt in prompts if ids[: len(prompt)] == prompt]
    if not fitting:
        return None
    prompt = max(fitting, key=len)
    return Turn(number, prompt, up_to_end_of_turn(ids[len(prompt) :], template.eos_ids))


def up_to_end_of_turn(ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """`ids` up to and including the last end-of-turn id: what follows is the template's text, which is never generated.

    All of `ids` when there is none: such templates end a turn by the start of the next.
    """
    ends = [index for index, token in enumerate(ids) if token in eos_ids]
    return list(ids[: ends[-1] + 1]) if ends else list(ids)
