"""Text that spells a control token, such as a user's question about `<|im_end|>`: it must reach the target as text.

A chat template gives one string in which its own control tokens and such text look alike. So the text is written as one
private character per token while the template renders, and written out again, as plain text, when the result is tokenised.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property

from scripts.lib.chat.messages import Message

FIRST = 0xF0000  # the first character of Unicode's plane 15, which is for private use
LAST = 0xFFFFD
MARK = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")


@dataclass(frozen=True)
class ControlText:
    """The texts of a tokenizer's special tokens, sorted."""

    special: tuple[str, ...]

    @cached_property
    def spelt(self) -> re.Pattern[str]:
        """Finds a special token in a text, the longest that begins in a place; what it finds lies in group 1."""
        return re.compile(f"({'|'.join(map(re.escape, sorted(self.special, key=len, reverse=True)))})")

    def hide_in(self, message: Message) -> Message:
        """`message` with a private character in place of every special token that its texts spell."""
        texts = {name: text for name, text in vars(message).items() if name != "role" and text and self.spelt.search(text)}
        return replace(message, **{name: self.hide(text) for name, text in texts.items()}) if texts else message

    def hide(self, text: str) -> str:
        """`text` with a private character in place of every special token that it spells."""
        places = {token: chr(FIRST + place) for place, token in enumerate(self.special)}
        return self.spelt.sub(lambda found: places[found[1]], text)

    def show(self, text: str) -> str:
        """`text` with the special tokens spelt out again."""
        return MARK.sub(lambda found: self.special[ord(found[0]) - FIRST], text)

    def split(self, text: str) -> list[str]:
        """A rendered text cut at its special tokens: plain text and special tokens in turn, beginning and ending with plain text."""
        return self.spelt.split(text)


def has_marks(text: str) -> bool:
    """Whether `text` holds a private character."""
    return not text.isascii() and MARK.search(text) is not None
