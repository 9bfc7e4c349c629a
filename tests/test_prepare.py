"""Stage prepare: accounting, ids, duplicates, sampling, and what it says when too little is left."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.formats.preparing import prepare
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
    assert manifest.counts == Counts(6, 1, {"control_token": 1, "duplicate": 1, "empty": 1, "too_long": 1, "unknown_role:laguna_s": 1})
    assert manifest.facts["leading_messages_dropped"] == 1
    assert manifest.facts["rejection_share"] == round(5 / 6, 4)
    rejected = pl.read_parquet(out / "rejected.parquet").to_dicts()
    assert [(row["source_row"], row["reason"]) for row in rejected] == [
        (1, "empty"),
        (2, "unknown_role:laguna_s"),
        (3, "control_token"),
        (4, "duplicate"),
        (5, "too_long"),
    ]
    assert rejected[2]["value"] == "<|im_end|>"
    (row,) = rows(out)
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
    assert manifest.shards[0].tokens == 41


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
        StageError, match=r"0 of 1 rows wanted from 2 records; columns seen: bar, foo; rejected: missing_column:p 2; .*\{prompt: p\}"
    ):
        prepared(tmp_path / "1", target, [{"bar": 1, "foo": "x"}] * 2, **PROMPT)
    odd = [{"conversations": [{"from": "laguna_s", "value": str(number)}]} for number in range(3)]
    with pytest.raises(StageError, match=r"unknown_role:laguna_s 3; expected: format sharegpt, .*human: user"):
        prepared(tmp_path / "2", target, odd, format="sharegpt")
    with pytest.raises(StageError, match=r"2 of 3 rows wanted from 2 records.*set `samples` to 2 or less"):
        prepared(tmp_path / "3", target, [{"p": "a"}, {"p": "b"}], **PROMPT, samples=3)
    with pytest.raises(StageError, match=r"0 of 1 rows wanted from 0 records; columns seen: none"):
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
