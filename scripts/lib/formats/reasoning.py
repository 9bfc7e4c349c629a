"""Reasoning that stands in the text of an answer, and the answer without it."""

import re

TAGS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
ANSWER = ("<|begin_of_solution|>", "<|end_of_solution|>")
# A closing tag that ends its line, in a text that opens none: the template wrote the opening one into the prompt.
CLOSED_ONLY = re.compile(r"\s*</think>[ \t]*(?:\n|$)")


def split_reasoning(text: str | None) -> tuple[str | None, str | None]:
    """Reasoning and answer of `text`. A tag that is not closed leaves no answer; a tag inside the answer is text."""
    if not text or "<" not in text:
        return None, text
    stripped = text.lstrip()
    for opening, closing in TAGS:
        if stripped.startswith(opening):
            reasoning, closed, rest = stripped.removeprefix(opening).partition(closing)
            return (reasoning.strip() or None, without_marks(rest)) if closed else (None, None)
    if stripped.startswith("</think>"):
        return None, stripped.removeprefix("</think>").strip()
    closed_only = CLOSED_ONLY.search(stripped) if "</think>" in stripped and "<think>" not in stripped else None
    if closed_only:
        return stripped[: closed_only.start()].strip() or None, stripped[closed_only.end() :].strip()
    return None, without_marks(text) if stripped.startswith(ANSWER[0]) else text


def without_marks(text: str) -> str:
    """`text` without the marks that enclose the answer."""
    return text.strip().removeprefix(ANSWER[0]).removesuffix(ANSWER[1]).strip()
