"""Whether two folders read and write text alike."""

import json
from collections.abc import Iterator
from pathlib import Path

from scripts.lib.chat.template import read_tokenizer
from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.repairs import finding
from scripts.lib.serving.health import PROBE


def same_tokens(one: Path, other: Path) -> bool:
    """Whether the tokenizers in both folders give a text the same ids."""
    first, second = read_tokenizer(one), read_tokenizer(other)
    alike = first.encode(PROBE, add_special_tokens=False) == second.encode(PROBE, add_special_tokens=False)
    return alike and first.get_vocab() == second.get_vocab()


def shared_vocabulary(target: Path, drafter: Path) -> Iterator[Finding]:
    """A drafter that is a whole model must write the target's ids: nothing translates between them."""
    sizes = [json.loads((folder / "config.json").read_text()).get("vocab_size") for folder in (drafter, target)]
    if sizes[0] != sizes[1]:
        yield finding("other_target", f"vocab_size is {sizes[0]}, the target's {sizes[1]}")
    elif not same_tokens(target, drafter):
        yield finding("tokenizer_differs", f"the tokenizer in {drafter} gives other ids than the target's in {target}")
