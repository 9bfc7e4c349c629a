"""Format `trajectory`: the steps of an agent as a list of {role, text}; the agent is called ai, what it saw is a user turn.

The system entry may have its words under a key of its own, with null as its text. Several runs of one task are one group.
"""

from collections.abc import Mapping
from typing import Any

from scripts.lib.formats.record import ROLE_NAMES, Draft, Format, Record
from scripts.lib.formats.turns_list import listed, typed_messages


def convert(record: Record, columns: Mapping[str, str], roles: Mapping[str, str]) -> Draft:
    """Read one record."""
    steps, content = listed(record[columns["messages"]]), columns["content"]
    if isinstance(steps, list):
        steps = [with_words(step, content, columns["instructions"]) for step in steps]
    return Draft(typed_messages(steps, columns["speaker"], content, roles))


def with_words(step: Any, content: str, instructions: str) -> Any:
    """`step` with its instructions as its content when it has no other."""
    if isinstance(step, dict) and step.get(content) is None and step.get(instructions) is not None:
        return {**step, content: step[instructions]}
    return step


DEFAULTS = {"messages": "trajectory", "speaker": "role", "content": "text", "instructions": "system_prompt", "group": "instance_id"}
FORMAT = Format(convert, ("messages",), ("speaker", "content", "instructions"), defaults=DEFAULTS, roles=ROLE_NAMES)
