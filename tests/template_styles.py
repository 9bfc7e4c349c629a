"""Chat templates in the styles of the models in use, with small tokenizers trained on the spot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from scripts.lib.chat.messages import Message
from tests.chat_parts import REASONING
from tests.tiny import CHATML

LLAMA3 = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}"
    "{{- m.content | trim + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
# Shows the thoughts of answers after the last user message alone; all other answers begin with an empty block.
KIMI = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' -}}{%- if m.role == 'assistant' -%}"
    "{{- '<think>' + ((m.reasoning_content or '') if loop.index0 > ns.last else '') + '</think>' -}}{%- endif -%}"
    "{{- m.content + '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}"
    "{{- '<think></think>' if thinking is defined and thinking is false else '<think>' -}}{%- endif -%}"
)
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "kimi": ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"],
}
CORPUS = ["yes no maybe\n\n", "the answer is 42\n", "def f(x):\n    return x\n\n", "system user assistant think"] * 4


@dataclass(frozen=True)
class Style:
    """A template, the tokens that it writes, the one that ends a turn, and what of an answer the target generates."""

    template: str
    special: tuple[str, ...]
    end: str
    written: Callable[[Message], str]
    thoughts: bool = False
    bos: str | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level BPE with this style's special tokens; one with a BOS adds it to whatever it encodes."""
        return trained(self.special, self.end, self.bos)


@lru_cache
def trained(special: tuple[str, ...], end: str, bos: str | None) -> PreTrainedTokenizerFast:
    """Trained on a few lines, so that it has merges across words and line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=bos)


def spaced() -> PreTrainedTokenizerFast:
    """A BPE that writes spaces as ▁, one of them before every text: pieces of a text are not what they are in it."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted({letter for line in CORPUS for letter in line} | set("▁?éß你好<|>_/."))
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, initial_alphabet=letters, special_tokens=["?"], show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL["chatml"]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


STYLES = {
    "chatml": Style(CHATML, tuple(SPECIAL["chatml"]), "<|im_end|>", lambda m: m.content or ""),
    "llama3": Style(LLAMA3, tuple(SPECIAL["llama3"]), "<|eot_id|>", lambda m: (m.content or "").strip(), bos="<|begin_of_text|>"),
    "kimi": Style(
        KIMI,
        tuple(SPECIAL["kimi"]),
        "<|im_end|>",
        lambda m: (f"{m.reasoning_content}</think>" if m.reasoning_content else "") + (m.content or ""),
        True,
    ),
    "thinking": Style(
        REASONING,
        tuple(SPECIAL["chatml"]),
        "<|im_end|>",
        lambda m: (f"<think>\n{m.reasoning_content}\n</think>\n\n" if m.reasoning_content else "") + (m.content or ""),
        True,
    ),
}
