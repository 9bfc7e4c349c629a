"""Stand-in targets for the tests of the token stages: real tokenizer classes, small templates of the kinds in use."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from scripts.lib.chat.messages import Message, to_rows
from scripts.lib.chat.rows import TOKEN_SCHEMA
from scripts.lib.chat.signature import opening, signatures
from scripts.lib.ground.files import canonical
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.ground.stage import Job, run
from tests.tiny import CHATML, tiny_tokenizer

MESSAGE = pl.Struct(dict.fromkeys(("role", "content", "reasoning_content", "tool_calls"), pl.String()))
# Drops the reasoning of turns before the last user message and shows an empty block when the last turn has none.
REASONING = (
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}"
    "{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)
CALLS_HEAD = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
    "{%- for call in m.tool_calls or [] -%}{{- '[' + call.function.name + ' ' -}}"
)
CALLS_TAIL = (
    "{{- ']' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
CALLS_AS_JSON = CALLS_HEAD + "{{- call.function.arguments | tojson -}}" + CALLS_TAIL
CALLS_AS_ITEMS = (
    CALLS_HEAD + "{%- for k, v in call.function.arguments | items -%}{{- k + '=' + (v | tojson) + ';' -}}{%- endfor -%}" + CALLS_TAIL
)
CALLS_AS_TEXT = CALLS_HEAD + "{{- call.function.arguments -}}" + CALLS_TAIL
CALLS_JOINED = CALLS_HEAD + "{{- '' + call.function.arguments -}}" + CALLS_TAIL


def save_target(folder: Path, template: str | None = CHATML, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """Write tokenizer, template, configs and a manifest, but no model, into `folder`."""
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 272, "eos_token_id": 2}))
    Manifest("target", {}, {}, Counts(0, 0)).write(folder)
    return folder


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Ids by place in `words`, which begin with <pad> <s> </s>; adds <s> to whatever it encodes, as Llama's tokenizers do."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.index("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def talk(*turns: str | Message) -> list[Message]:
    """User and assistant messages in turn."""
    return [turn if isinstance(turn, Message) else Message(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)]


def prepared(folder: Path, conversations: Mapping[str, Sequence[Message]], tools: Any = None, name: str = "own") -> Path:
    """Publish native rows as stage `prepare` would; the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": id_, "group": id_, "messages": to_rows(messages), "tools": tools and canonical(tools), "prompt_hash": f"hash {id_}"}
        | {"kind": "native", "signature": signatures([opening(messages)])[0]}
        for id_, messages in conversations.items()
    ]
    texts = dict.fromkeys(("id", "group", "tools", "prompt_hash", "kind"), pl.String())
    schema = texts | {"messages": pl.List(MESSAGE), "signature": pl.Binary()}
    return publish_rows(folder, "prepare", "rows-00000.parquet", pl.DataFrame(rows, schema=schema), {"name": name})


def responses(folder: Path, turns: Sequence[tuple[str, int, list[int], list[int]]], name: str = "responses-00000.parquet") -> Path:
    """Publish response rows (id, turn, prompt ids, output ids) as stage `generate` would, beside earlier files; the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": id_, "turn": turn, "group": id_, "prompt_hash": f"hash {id_}", "prompt_ids": prompt, "output_ids": output}
        for id_, turn, prompt, output in turns
    ]
    ids = pl.List(pl.Int64)
    schema = {"id": pl.String(), "turn": pl.Int64(), "group": pl.String(), "prompt_hash": pl.String(), "prompt_ids": ids, "output_ids": ids}
    return publish_rows(folder, "generate", name, pl.DataFrame(rows, schema=schema))


def tokens(folder: Path, rows: Sequence[Mapping[str, Any]], name: str) -> Path:
    """Publish token rows of data set `name` as stage `encode` would; the manifest's path.

    A row needs `id` and `input_ids`; all but the first token are trained and the row is a group of its own unless it says otherwise.
    The prepared rows behind it are published too, see `asked`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked(prepared_behind(folder / "manifest.json").parent, rows, name)
    own = ("asked", "kind")
    rows = [{key: value for key, value in row.items() if key not in own} for row in rows]
    full = [
        {
            "dataset": name,
            "group": row["id"],
            "prompt_hash": f"{name} {row['id']}",
            "loss_spans": [{"start": 1, "end": len(row["input_ids"])}],
            **row,
        }
        for row in rows
    ]
    return publish_rows(folder, "encode", "tokens-00000.parquet", pl.DataFrame(full, schema=TOKEN_SCHEMA), {"name": name})


def prepared_behind(manifest: Path) -> Path:
    """The manifest of the prepared rows that `tokens` published with the token rows of `manifest`."""
    return manifest.parent.with_name(f"{manifest.parent.name} prepared") / manifest.name


def asked(folder: Path, rows: Sequence[Mapping[str, Any]], name: str) -> Path:
    """Publish what stage `prepare` would of source `name`: the user turns in `asked`, answered in between; the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    full = []
    for row in rows:
        turns = row.get("asked", [f"{name} {row['id']}"])
        messages = talk(*[text for turn in turns for text in (turn, "so")])
        signature = signatures([turns[0]])[0]
        first = {"id": row["id"], "group": row.get("group", row["id"]), "kind": row.get("kind", "prompts"), "signature": signature}
        full.append(first | {"prompt_hash": row.get("prompt_hash", f"{name} {row['id']}"), "messages": to_rows(messages)})
    schema = {name: pl.String() for name in ("id", "group", "kind", "prompt_hash")} | {
        "signature": pl.Binary(),
        "messages": pl.List(MESSAGE),
    }
    return publish_rows(folder, "prepare", "rows-00000.parquet", pl.DataFrame(full, schema=schema), {"name": name})


def publish_rows(folder: Path, stage: str, name: str, frame: pl.DataFrame, settings: Mapping[str, Any] | None = None) -> Path:
    """Write `frame` beside the tables in `folder`, and a manifest of `stage` that lists them all; the manifest's path."""
    frame.write_parquet(folder / name)
    shards = [Shard.of(path, pl.read_parquet(path).height) for path in sorted(folder.glob("*.parquet"))]
    rows = sum(shard.rows for shard in shards)
    Manifest(stage, settings or {}, {}, Counts(rows, rows), shards).write(folder)
    return folder / "manifest.json"


def published(folder: Path) -> dict[str, bytes]:
    """Name to bytes of every file that must not differ between runs."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "cost.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest in `folder` as plain data."""
    return json.loads((folder / "manifest.json").read_text())


def run_stage(
    build, root: Path, stage: str, inputs: Mapping[str, Any], settings: Mapping[str, Any], *, output: str = "out", **consulted: Any
) -> Path:
    """Run `build` through the frame; the published folder."""
    paths = {name: tuple(value) if isinstance(value, list | tuple) else (value,) for name, value in inputs.items()}
    job = Job(stage=stage, output=root / output, inputs=paths, settings=settings, work=root / "work", consulted=consulted)
    run(job, build)
    return root / output
