"""Stage prepare: accounting, ids, duplicates, sampling, and what it says when too little is left."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.chat.messages import Message
from scripts.lib.chat.signature import opening, signatures
from scripts.lib.formats.preparing import prepare
from scripts.lib.formats.scanning import hash_order
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import Job, run
from tests.tiny import save_tiny_target

Records = Sequence[dict[str, Any]]
PROMPT: dict[str, Any] = {"format": "columns", "columns": {"prompt": "p"}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifest of a tiny target; its template takes no tools, a token is a byte."""
    folder = save_tiny_target(tmp_path_factory.mktemp("target"))
    Manifest("target", {}, {}, Counts(0, 0)).write(folder)
    return folder / "manifest.json"


def raw(folder: Path, text: str, name: str = "a.jsonl") -> Path:
    """Manifest of a raw file with `text`."""
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    Manifest("fetch", {}, {}, Counts(1, 1), [Shard.of(folder / name, 0)], {"licence": "MIT"}).write(folder)
    return folder / "manifest.json"


def prepared(folder: Path, target: Path, records: Records | str, seed: int = 7, **dataset: Any) -> Path:
    """Run the stage over `records`, given as records or as the text of the file; the folder that it published."""
    text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
    name = "a.json" if isinstance(records, str) else "a.jsonl"
    inputs = {"raw": [raw(folder / "raw", text, name)], "target": [target]}
    job = Job("prepare", folder / "out", inputs, {"dataset": dataset, "name": "demo", "seed": seed}, work=folder / "work")
    run(job, prepare)
    return job.output


def rows(folder: Path) -> list[dict[str, Any]]:
    """The published rows."""
    return pl.read_parquet(folder / "rows-*.parquet").to_dicts()


def test_every_record_is_accounted_for(tmp_path: Path, target: Path) -> None:
    """Rows in equal rows out plus rejections by reason; rejected.parquet holds each with its value."""
    records: list[dict[str, Any]] = [
        {"id": "a", "conversations": [{"from": "human", "value": "One"}, {"from": "gpt", "value": "1"}]},
        {"id": "b", "conversations": []},
        {"id": "c", "conversations": [{"from": "human", "value": "Two"}, {"from": "laguna_s", "value": "2"}]},
        {"id": "d", "conversations": [{"from": "human", "value": "say <|im_end|> now"}]},
        {"id": "e", "conversations": [{"from": "human", "value": "one "}]},
        {"id": "f", "conversations": [{"from": "gpt", "value": "so"}, {"from": "human", "value": "x" * 90}]},
    ]
    out = prepared(tmp_path, target, records, format="sharegpt", max_prompt_tokens=100)
    manifest = read_manifest(out / "manifest.json", "prepare")
    assert manifest.counts == Counts(6, 2, {"duplicate": 1, "empty": 1, "too_long": 1, "unknown_role:laguna_s": 1})
    assert manifest.facts["leading_messages_dropped"] == 1
    assert manifest.facts["rejection_share"] == round(4 / 6, 4)
    rejected = pl.read_parquet(out / "rejected.parquet").to_dicts()
    assert [(row["source_row"], row["reason"]) for row in rejected] == [
        (1, "empty"),
        (2, "unknown_role:laguna_s"),
        (4, "duplicate"),
        (5, "too_long"),
    ]
    assert rejected[1]["value"] == "2"
    row, control = rows(out)
    assert control["messages"][0]["content"] == "say <|im_end|> now"  # text that spells a control token is text
    assert (row["id"], row["group"], row["source_row"], row["kind"], row["partition"], row["tools"]) == (
        "a",
        "a",
        0,
        "prompts",
        "short",
        None,
    )
    assert [message["content"] for message in row["messages"]] == ["One", "1"]
    # <|im_start|>system\nYou help.<|im_end|>\n, then user and the generation prompt: 19 + 11 + 11 one-byte tokens
    assert row["prompt_tokens"] == 41
    assert row["signature"] == signatures([opening([Message("user", "One")])])[0]
    assert manifest.shards[0].tokens == 41 + control["prompt_tokens"]


def test_ids_are_the_sources_own_only_where_unique(tmp_path: Path, target: Path) -> None:
    """A repeated id names neither row; the hash that replaces it does not depend on the answer or the place in the file."""
    records: list[dict[str, Any]] = [{"i": "u", "p": "A"}, {"i": "v", "p": "B", "r": "x"}, {"i": "v", "p": "C"}, {"i": None, "p": "D"}]
    dataset: dict[str, Any] = {"format": "columns", "columns": {"id": "i", "prompt": "p", "response": "r"}}
    first = {row["messages"][0]["content"]: row["id"] for row in rows(prepared(tmp_path / "1", target, records, **dataset))}
    changed = [{"i": "v", "p": "B", "r": "other"}, *records[2:], records[0]]
    second = {row["messages"][0]["content"]: row["id"] for row in rows(prepared(tmp_path / "2", target, changed, **dataset))}
    assert first == second
    assert first["A"] == "u"
    assert len({*first.values()}) == 4 and "v" not in first.values()


def test_sampling_follows_a_seeded_hash_of_the_id(tmp_path: Path, target: Path) -> None:
    """The same rows whatever their order in the file, others for another seed; the rest is counted, not listed."""
    records: list[dict[str, Any]] = [{"i": f"r{number}", "p": f"Question {number}" + "!" * (number % 3 * 40)} for number in range(60)]
    dataset: dict[str, Any] = {"format": "columns", "columns": {"id": "i", "prompt": "p"}, "samples": 20, "max_prompt_tokens": 100}
    first, turned, other = (
        prepared(tmp_path / place, target, data, seed, **dataset)
        for place, data, seed in (("1", records, 7), ("2", records[::-1], 7), ("3", records, 8))
    )
    ids = [[row["id"] for row in rows(out)] for out in (first, turned, other)]
    assert ids[0] == sorted(ids[0]) == ids[1] != ids[2]
    counts = read_manifest(first / "manifest.json", "prepare").counts
    assert counts.rows_in == 60 and counts.rows_out == 20
    assert set(counts.rejected) == {"not_sampled", "too_long"}
    assert len(pl.read_parquet(first / "rejected.parquet")) == counts.rejected["too_long"]


def test_rows_added_later_move_none_out(tmp_path: Path, target: Path) -> None:
    """More records, copies among them, change a sample only by those that take a place in it; the first N are never the sample."""
    records = [{"p": f"Question {number}"} for number in range(80)]
    more = [*records, *({"p": f"question  {number}"} for number in range(80)), *({"p": f"Extra {number}"} for number in range(10))]
    first, second = (prepared(tmp_path / place, target, data, **PROMPT, samples=30) for place, data in (("1", records), ("2", more)))
    before, after = ({row["messages"][0]["content"]: row["id"] for row in rows(out)} for out in (first, second))
    assert set(before.values()) != {row["id"] for row in rows(prepared(tmp_path / "3", target, records[:30], **PROMPT))}
    assert {prompt for prompt in after if not prompt.startswith("Extra")} <= set(before)
    assert 20 <= len(set(after) & set(before)) < 30
    assert read_manifest(second / "manifest.json", "prepare").counts.rejected == {"duplicate": 80, "not_sampled": 60}


def test_a_sample_is_that_of_looking_at_all_rows(tmp_path: Path, target: Path) -> None:
    """Half of the records are too long: reading on until enough pass gives the rows that tokenising all of them gives."""
    records = [{"p": f"Question {number}" + "!" * (number % 2 * 90)} for number in range(100)]
    dataset: dict[str, Any] = {**PROMPT, "max_prompt_tokens": 100}
    every = sorted(rows(prepared(tmp_path / "1", target, records, **dataset)), key=lambda row: hash_order(7, row["id"]))
    some = rows(prepared(tmp_path / "2", target, records, **dataset, samples=40))
    assert {row["id"] for row in some} == {row["id"] for row in every[:40]}


def test_ids_that_several_prompts_bear_are_replaced_in_every_place(tmp_path: Path, target: Path) -> None:
    """Rows of a Parquet file are found again by number; one run of a task has the task's id, several have hashes."""
    records = [{"i": f"task-{number // 2}", "p": f"Run {number}", "other": "x" * 50} for number in range(9)]
    (tmp_path / "raw").mkdir()
    pl.DataFrame(records).write_parquet(tmp_path / "raw/a.parquet", row_group_size=4)
    Manifest("fetch", {}, {}, Counts(1, 1), [Shard.of(tmp_path / "raw/a.parquet", 9)], {"licence": "MIT"}).write(tmp_path / "raw")
    settings = {"dataset": {"format": "columns", "columns": {"prompt": "p", "id": "i", "group": "i"}}, "name": "demo", "seed": 7}
    inputs = {"raw": [tmp_path / "raw/manifest.json"], "target": [target]}
    job = Job("prepare", tmp_path / "out", inputs, settings, work=tmp_path / "work")
    run(job, prepare)
    found = {row["messages"][0]["content"]: row for row in rows(job.output)}
    assert found["Run 8"]["id"] == "task-4"
    assert not any(found[f"Run {number}"]["id"].startswith("task") for number in range(8))
    assert [found[f"Run {number}"]["group"] for number in range(4)] == ["task-0", "task-0", "task-1", "task-1"]


def test_one_run_of_each_task(tmp_path: Path, target: Path) -> None:
    """`one_per_group` takes the first row of each group; the others are counted by a reason of their own and against no limit."""
    records: list[dict[str, Any]] = [{"t": f"task-{number % 3}", "p": f"Run {number}"} for number in range(9)]
    records += [{"t": None, "p": "Alone"}, {"t": "", "p": "Alone too"}]
    dataset: dict[str, Any] = {"format": "columns", "columns": {"prompt": "p", "group": "t"}, "max_rejected": 0.0}
    out = prepared(tmp_path, target, records, **dataset, one_per_group=True)
    assert {row["messages"][0]["content"] for row in rows(out)} == {"Run 0", "Run 1", "Run 2", "Alone", "Alone too"}
    assert read_manifest(out / "manifest.json", "prepare").counts == Counts(11, 5, {"same_group": 6})


@pytest.mark.parametrize("form", ["messages", "detect"])
def test_columns_with_the_names_of_template_options_are_data(tmp_path: Path, target: Path, form: str) -> None:
    """Only what the mapping names reaches a row: a column called chat_template changes no prompt."""
    record = {"messages": [{"role": "user", "content": "Hi", "chat_template": "x"}], "chat_template": "y", "add_generation_prompt": False}
    plain = {"messages": [{"role": "user", "content": "Hi"}]}
    columns: dict[str, Any] = {} if form == "detect" else {"columns": {"messages": "messages"}}
    first, second = (prepared(tmp_path / place, target, [data], format=form, **columns) for place, data in (("1", record), ("2", plain)))
    assert rows(first) == rows(second)


def test_detected_columns_are_recorded(tmp_path: Path, target: Path) -> None:
    """`detect` writes what it found into the manifest, and stops with the columns when it knows none of them."""
    out = prepared(tmp_path / "1", target, [{"instruction": "Write.", "thought": "t", "response": "r"}], format="detect")
    facts = read_manifest(out / "manifest.json", "prepare").facts
    assert (facts["format"], facts["columns"]) == ("columns", {"prompt": "instruction", "response": "response", "reasoning": "thought"})
    assert rows(out)[0]["messages"][1]["reasoning_content"] == "t"
    with pytest.raises(StageError, match="no known columns: bar, foo"):
        prepared(tmp_path / "2", target, [{"foo": "x", "bar": 1}], format="detect")


def test_equal_work_gives_equal_bytes(tmp_path: Path, target: Path) -> None:
    """Two runs agree to the byte."""
    records: list[dict[str, Any]] = [{"p": f"Question {number}"} for number in range(30)]
    one, two = (prepared(tmp_path / place, target, records, **PROMPT, samples=10) for place in "12")
    for name in ("rows-00000.parquet", "rejected.parquet"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_rejections_of_a_sample_stand_for_the_rest(tmp_path: Path, target: Path) -> None:
    """The share that max_rejected limits counts no row as rejected only because it was not sampled."""
    records: list[dict[str, Any]] = [{"p": f"Question {number}"} for number in range(100)] + [{"p": ""}] * 25
    out = prepared(tmp_path / "1", target, records, **PROMPT, samples=5, max_rejected=0.25)
    assert read_manifest(out / "manifest.json", "prepare").facts["rejection_share"] == 0.2
    with pytest.raises(StageError, match=r"rejection share 0.200 is over max_rejected 0.1"):
        prepared(tmp_path / "2", target, records, **PROMPT, samples=5, max_rejected=0.1)


def test_no_row_left_is_an_error_that_shows_the_mapping(tmp_path: Path, target: Path) -> None:
    """Nothing kept of something never passes in silence (NVIDIA/Model-Optimizer#2172)."""
    with pytest.raises(
        StageError, match=r"0 of 1 rows wanted from 2 records; columns seen: bar 2, foo 2; rejected: missing_column:p 2; .*\{prompt: p\}"
    ):
        prepared(tmp_path / "1", target, [{"bar": 1, "foo": "x"}] * 2, **PROMPT)
    odd = [{"conversations": [{"from": "laguna_s", "value": str(number)}]} for number in range(3)]
    with pytest.raises(
        StageError,
        match=r"labels seen: laguna_s 3; rejected: unknown_role:laguna_s 3; expected: format sharegpt, .*human: user.*"
        r"accept them: \{datasets: \{demo: \{roles: \{laguna_s: assistant\}\}\}\}",
    ):
        prepared(tmp_path / "2", target, odd, format="sharegpt")
    with pytest.raises(StageError, match=r"accept them: \{datasets: \{demo: \{format: columns, columns: \{prompt: question\}\}\}\}"):
        prepared(tmp_path / "5", target, [{"question": "Why?"}], **PROMPT)
    with pytest.raises(StageError, match=r"2 of 3 rows wanted from 2 records.*set `samples` to 2 or less"):
        prepared(tmp_path / "3", target, [{"p": "a"}, {"p": "b"}], **PROMPT, samples=3)
    with pytest.raises(StageError, match=r"demo: 0 records in its files \(a.jsonl\), 1 rows wanted; correct `source`"):
        prepared(tmp_path / "4", target, [], **PROMPT)


def test_tools_need_a_template_that_takes_them(tmp_path: Path, target: Path) -> None:
    """`keep` rejects by reason, `drop` counts, `system` writes them into the prompt."""
    records: list[dict[str, Any]] = [
        {"q": [[{"role": "user", "content": "Add 1 and 2."}]], "f": [{"name": "add", "parameters": {"type": "dict"}}]}
    ]
    dataset: dict[str, Any] = {"format": "messages", "columns": {"messages": "q", "tools": "f"}}
    with pytest.raises(StageError, match=r"template_without_tools 1"):
        prepared(tmp_path / "1", target, records, **dataset)
    dropped = prepared(tmp_path / "2", target, records, **dataset, tools="drop")
    assert read_manifest(dropped / "manifest.json", "prepare").facts["tools_dropped"] == 1
    (row,) = rows(prepared(tmp_path / "3", target, records, **dataset, tools="system"))
    assert row["messages"][0]["role"] == "system" and '"add"' in row["messages"][0]["content"]


def test_a_cut_file_stops_the_stage_unless_the_config_keeps_it(tmp_path: Path, target: Path) -> None:
    """Whole records of a cut file count only when asked for, and the manifest tells."""
    text = '[{"p": "One"}, {"p": "Two"}, {"p": "Thr'
    with pytest.raises(StageError, match=r"a.json ends inside a record that starts at byte 29, after 2 whole records; .*truncated: keep"):
        prepared(tmp_path / "1", target, text, **PROMPT)
    out = prepared(tmp_path / "2", target, text, **PROMPT, truncated="keep")
    manifest = read_manifest(out / "manifest.json", "prepare")
    assert manifest.facts["truncated"] == [{"file": "a.json", "byte_offset": 29, "records": 2}]
    assert manifest.counts == Counts(2, 2)


def test_an_altered_raw_file_is_refused(tmp_path: Path, target: Path) -> None:
    """Bytes other than the manifest's stop the stage."""
    path = raw(tmp_path / "raw", '{"p": "One"}\n')
    (path.parent / "a.jsonl").write_text('{"p": "Two"}\n')
    job = Job(
        "prepare",
        tmp_path / "out",
        {"raw": [path], "target": [target]},
        {"dataset": PROMPT, "name": "demo", "seed": 7},
        work=tmp_path / "work",
    )
    with pytest.raises(StageError, match=r"sha256"):
        run(job, prepare)
