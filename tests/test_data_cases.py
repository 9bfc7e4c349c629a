"""Reported failures of other pipelines, each with its input and the right result, through whole stages."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.chat.encode import encode
from scripts.lib.chat.messages import Message
from scripts.lib.formats import tables
from scripts.lib.formats.preparing import prepare
from tests.chat_parts import REASONING, manifest_of, prepared, published, run_stage, save_target, talk, word_tokenizer
from tests.test_odd_inputs import fates, lines, raw
from tests.tiny import CHATML

SHAREGPT: dict[str, Any] = {"format": "sharegpt"}


def chat(row_id: str, *turns: tuple[str, str]) -> dict[str, Any]:
    """A ShareGPT record."""
    return {"id": row_id, "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def prepare_rows(root: Path, records: list[dict[str, Any]], template: str = CHATML, **dataset: Any) -> Path:
    """Run stage `prepare` over `records`; the folder that it published."""
    manifest = root / "raw/manifest.json"
    manifest = manifest if manifest.exists() else raw(root / "raw", lines(*records), "a.jsonl")
    target = save_target(root / "target", template) / "manifest.json"
    settings = {"dataset": dataset, "name": "demo", "seed": 7}
    return run_stage(prepare, root, "prepare", {"raw": manifest, "target": target}, settings)


def roles(folder: Path) -> dict[str, list[str]]:
    """The roles of each row's messages, by id."""
    rows = pl.read_parquet(folder / "rows-*.parquet").to_dicts()
    return {row["id"]: [turn["role"] for turn in row["messages"]] for row in rows}


def test_speakers_with_other_labels_are_kept_or_named(tmp_path: Path) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3144: system turns and unknown speakers vanished while the row count stayed.

    A fix that took every unknown label for the assistant would train what tools say (vllm-project/speculators#907).
    """
    records = [
        chat("s1", ("system", "Answer in French."), ("human", "Say good day."), ("gpt", "Bonjour.")),
        chat("s2", ("user", "Ping"), ("bing", "Pong")),
        chat("s4", ("human", "Hi"), ("laguna_s", "Hello")),
        chat("s5", ("human", "Look."), ("observation", "nothing")),
    ]
    out = prepare_rows(tmp_path / "1", records, **SHAREGPT)
    assert roles(out) == {"s1": ["system", "user", "assistant"], "s2": ["user", "assistant"]}
    assert fates(out)[1] == {"unknown_role:laguna_s": 1, "unknown_role:observation": 1}
    agent = {"id": "s3", "trajectory": [{"role": "user", "text": "ls"}, {"role": "ai", "text": "```\nls\n```"}]}
    assert roles(prepare_rows(tmp_path / "2", [agent], format="trajectory", columns={"id": "id"})) == {"s3": ["user", "assistant"]}


def test_empty_and_answer_first_conversations(tmp_path: Path) -> None:
    """https://github.com/sgl-project/SpecForge/issues/368: an empty conversation ended the job with an IndexError."""
    records: list[dict[str, Any]] = [
        chat("e0"),
        chat("e1", ("gpt", "(continued) ...so x=2."), ("human", "Why?"), ("gpt", "Because 2+2=4.")),
        chat("e2", ("system", "Be brief.")),
        chat("e3", ("human", "Only a question")),
        {"id": "e4", "conversations": None},
    ]
    out = prepare_rows(tmp_path, records, **SHAREGPT)
    assert roles(out) == {"e1": ["user", "assistant"], "e3": ["user"]}
    assert fates(out) == (["Only a question", "Why?"], {"empty": 2, "no_user_turn": 1})


def test_what_the_template_refuses_is_one_row_with_a_reason(tmp_path: Path) -> None:
    """A template without system turns raises: that row is rejected, by name of the reason, and the others stay (SpecForge#777)."""
    no_system = "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}" + CHATML
    records = [chat("a", ("system", "Be brief."), ("human", "A")), chat("b", ("human", "B"))]
    out = prepare_rows(tmp_path, records, no_system, **SHAREGPT)
    assert fates(out) == (["B"], {"template_refuses": 1})
    assert "no system" in pl.read_parquet(out / "rejected.parquet")["value"][0]


def test_a_killed_stage_leaves_nothing_that_looks_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while writing left three of ten rows, which the next run took for all of them. Here the next run gives the same bytes."""
    monkeypatch.setattr(tables, "ROWS_PER_SHARD", 4)
    records = [chat(f"r{n}x", ("human", f"Question {n}")) for n in range(10)]
    whole = prepare_rows(tmp_path / "whole", records, **SHAREGPT)
    written: list[str] = []
    write_table = tables.write_table

    def dying(path: Path, frame: pl.DataFrame) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write_table(path, frame)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "write_table", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare_rows(tmp_path / "cut", records, **SHAREGPT)
    assert written == ["rejected.parquet", "rows-00000.parquet"] and not (tmp_path / "cut/out").exists()
    resumed = published(prepare_rows(tmp_path / "cut", records, **SHAREGPT))
    assert {name: data for name, data in resumed.items() if name != "manifest.json"} == {
        name: data for name, data in published(whole).items() if name != "manifest.json"
    }
    assert len(fates(tmp_path / "cut/out")[0]) == 10


def encoded(root: Path, conversation: list[Message], target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The token row of a native conversation, and the stage's facts."""
    settings = {"encode": {"max_length": 1000}, "name": "d", "kind": "native"}
    inputs = {"rows": prepared(root / "p", {"x": conversation}), "target": target / "manifest.json"}
    folder = run_stage(encode, root, "encode", inputs, settings)
    (row,) = pl.read_parquet(folder / "tokens-*.parquet").to_dicts()
    return row, manifest_of(folder)["facts"]


def test_the_end_of_turn_is_trained_also_where_it_is_the_padding(tmp_path: Path) -> None:
    """https://github.com/OpenRLHF/OpenRLHF/issues/393, huggingface/open-r1#462: two BOS, and the real end masked as padding."""
    words = ["<pad>", "<s>", "</s>", "?", "??", "u", "hi", "a", "yo"]
    tokenizer = word_tokenizer(words)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    turns = (
        "{{ '<s>' }}{% for m in messages %}{{ ' ' + m.role[0] + ' ' + m.content + (' </s>' if m.role == 'assistant' else '') }}{% endfor %}"
    )
    target = save_target(tmp_path / "t", turns + "{% if add_generation_prompt %}{{ ' a' }}{% endif %}", tokenizer)
    row, _ = encoded(tmp_path, talk("hi", "yo"), target)
    assert row["input_ids"] == [1, 5, 6, 7, 8, 2]
    assert row["loss_spans"] == [{"start": 4, "end": 6}]


def test_reasoning_that_the_template_does_not_show_is_counted(tmp_path: Path) -> None:
    """Answers whose reasoning a template leaves out are trained without it, and the manifest says how many; none where it is shown."""
    conversation = talk("2+2?", Message("assistant", "4", reasoning_content="add"), "3+3?", "6")
    _, facts = encoded(tmp_path / "1", conversation, save_target(tmp_path / "1/t"))
    assert (facts["shows_reasoning"], facts["answers_without_their_reasoning"]) == (False, 1)
    kept = talk("2+2?", Message("assistant", "4", reasoning_content="add"))
    _, facts = encoded(tmp_path / "2", kept, save_target(tmp_path / "2/t", REASONING))
    assert facts["shows_reasoning"] and "answers_without_their_reasoning" not in facts
