"""Inputs that nobody wrote a format for: each ends in rows, in a rejection with its reason, or in one sentence that names the file."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow
import pyarrow.parquet
import pytest

from scripts.lib.formats.preparing import prepare
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.inspecting.inspecting import inspect
from scripts.lib.inspecting.sampling import Size
from scripts.lib.sources.settings import Address, SourceSettings
from tests.tiny import save_tiny_target

REPO = Path(__file__).parents[1]
PROMPT: dict[str, Any] = {"format": "columns", "columns": {"id": "i", "prompt": "p"}}
CHAT: dict[str, Any] = {"format": "sharegpt"}
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifest of a tiny target; its template takes no tools, a token is a byte."""
    folder = save_tiny_target(tmp_path_factory.mktemp("target"))
    Manifest("target", {}, {}, Counts(0, 0)).write(folder)
    return folder / "manifest.json"


def raw(folder: Path, data: bytes, name: str) -> Path:
    """Manifest of a raw file."""
    folder.mkdir(parents=True)
    (folder / name).write_bytes(data)
    Manifest("fetch", {}, {}, Counts(1, 1), [Shard.of(folder / name, 0)], {"licence": None}).write(folder)
    return folder / "manifest.json"


def prepared(root: Path, target: Path, data: bytes, name: str = "a.jsonl", **dataset: Any) -> Path:
    """Run the stage over a file of `data`; the folder that it published."""
    settings = {"dataset": dataset, "name": "demo", "seed": 7}
    inputs = {"raw": [raw(root / "raw", data, name)], "target": [target]}
    run(Job("prepare", root / "out", inputs, settings, work=root / "work"), prepare)
    return root / "out"


def lines(*records: Any) -> bytes:
    """JSON lines; text is taken as it is."""
    return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records).encode()


def parquet(path: Path, **columns: Any) -> bytes:
    """The bytes of a Parquet file."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path.read_bytes()


def fates(out: Path) -> tuple[list[str], Counter[str]]:
    """The first user turn of every row, and how often each reason; they add up to the records, and rejected.parquet lists each."""
    counts = read_manifest(out / "manifest.json", "prepare").counts
    rows = pl.read_parquet(out / "rows-*.parquet")
    rejected = pl.read_parquet(out / "rejected.parquet")
    assert (rows.height, dict(Counter(rejected["reason"]))) == (counts.rows_out, dict(counts.rejected))
    assert counts.rows_in == rows.height + rejected.height
    assert rejected["source_row"].n_unique() == rejected.height and (rejected["value"].str.len_chars() <= 200).all()
    prompts = [next(turn["content"] for turn in messages if turn["role"] == "user") for messages in rows["messages"].to_list()]
    return sorted(prompts), Counter(counts.rejected)


def test_values_of_every_type_in_one_column(tmp_path: Path, target: Path) -> None:
    """Ids of mixed types, not a number, huge or twice; prompts that are null, no text, or absent."""
    records = [
        {"i": 1, "p": "A"},
        {"i": "1", "p": "B"},
        {"i": 10**30, "p": "C"},
        {"i": float("nan"), "p": "D"},
        {"i": float("nan"), "p": "E"},
        {"i": None, "p": None},
        {"i": [1], "p": 3},
        {"i": {}, "p": float("nan")},
        {"i": "x"},
        {"p": ""},
    ]
    out = prepared(tmp_path, target, lines(*records), **PROMPT)
    assert fates(out) == (list("ABCDE"), {"empty_content": 1, "not_text": 2, "missing_column:p": 1, "empty_user_turn": 1})
    ids = {row["messages"][0]["content"]: row["id"] for row in pl.read_parquet(out / "rows-*.parquet").to_dicts()}
    assert ids["C"] == str(10**30)
    assert {len(ids[prompt]) for prompt in "ABDE"} == {16}  # hashes: these ids name no row


def test_half_a_character_rejects_its_row(tmp_path: Path, target: Path) -> None:
    """A chat cut through an emoji: such text can be neither written nor tokenised."""
    whole, half = "\\ud83d\\ude00", "\\ud83d"
    records = (
        f'{{"id": "a", "conversations": [{{"from": "human", "value": "so {whole}"}}]}}',
        f'{{"id": "b", "conversations": [{{"from": "human", "value": "so {half}"}}]}}',
        f'{{"id": "c", "conversations": [{{"from": "human", "value": "c"}}, {{"from": "gpt", "value": "{half}"}}]}}',
        f'{{"id": "d{half}", "conversations": [{{"from": "human", "value": "d"}}]}}',
        f'{{"id": "e", "conversations": [{{"from": "bot{half}", "value": "e"}}]}}',
    )
    prompts, reasons = fates(prepared(tmp_path, target, lines(*records), **CHAT))
    assert (prompts, reasons) == (["so 😀"], {"half_a_character": 3, "unknown_role:bot?": 1})


def test_turns_that_are_no_turns(tmp_path: Path, target: Path) -> None:
    """Nested nulls, numbers as speakers, labels of any length: each row has its reason."""
    chats: list[Any] = [
        [{"from": "human", "value": "A"}, None],
        [{"from": None, "value": "B"}],
        [{"value": "C"}],
        [{"from": "human", "value": None}],
        [{"from": ["human"], "value": "D"}],
        [{"from": "x" * 500 + "\n", "value": "E"}],
        [{"from": 0, "value": "F"}, {"from": 1, "value": "f"}],
        [None],
        {"from": "human"},
        "human: hi",
        [],
        None,
        [{"from": "human", "value": "ok"}],
    ]
    data = lines(*({"id": f"r{place}x", "conversations": chat} for place, chat in enumerate(chats)))
    prompts, reasons = fates(prepared(tmp_path, target, data, **CHAT, roles={"0": "user", "1": "assistant"}))
    assert prompts == ["F", "ok"]
    assert reasons == {
        "not_a_turn": 3,
        "no_speaker": 2,
        "empty_content": 1,
        f"unknown_role:{'x' * 47}": 1,
        "not_a_list_of_turns": 2,
        "empty": 2,
    }


def test_speakers_of_a_dialogue_and_text_before_a_transcript(tmp_path: Path, target: Path) -> None:
    """Formats of their own reject what they cannot read instead of failing or leaving text out."""
    dialogue: dict[str, Any] = {"format": "dialogue", "columns": {"messages": "m", "speaker": "s", "content": "t"}}
    turns: list[Any] = [[{"s": "a", "t": "hi"}], [{"t": "hi"}], ["hi"], [{"s": {}, "t": "hi"}], [{"s": "a", "t": 3}], [{"s": 1}]]
    found = fates(prepared(tmp_path / "1", target, lines(*({"m": turn} for turn in turns)), **dialogue))
    assert found == (["hi"], {"not_a_turn": 3, "not_text": 1, "empty_user_turn": 1})
    chats = ["USER: A", "Note.\n\n\nUSER: B", "", 'USER: C\n\n\nASSISTANT: <functioncall> {"name": ' + DEEP]
    found = fates(prepared(tmp_path / "2", target, lines(*({"system": "", "chat": chat} for chat in chats)), format="transcript"))
    assert found == (["A"], {"text_before_first_turn": 1, "empty": 1, "bad_tool_call": 1})


def test_tools_that_are_none_or_no_json(tmp_path: Path, target: Path) -> None:
    """Empty lists as text are no calls; schemas may each be text; what nests too deep or holds a date has its reason."""
    columns = {"messages": "m", "tools": "f"}

    def row(name: str, tools: Any = None, calls: Any = None) -> dict[str, Any]:
        return {"m": [{"role": "user", "content": name}, {"role": "assistant", "content": "a", "tool_calls": calls}], "f": tools}

    records = [row("A", "[]", "[]"), row("B", " ", "null"), row("C", [json.dumps({"name": "f"})]), row("D", DEEP), row("E", None, DEEP)]
    out = prepared(tmp_path, target, lines(*records), format="messages", columns=columns, tools="drop")
    assert fates(out) == (["A", "B", "C"], {"bad_tools": 1, "bad_tool_call": 1})
    assert read_manifest(out / "manifest.json", "prepare").facts["tools_dropped"] == 1
    assert all(turn["tool_calls"] is None for messages in pl.read_parquet(out / "rows-*.parquet")["messages"] for turn in messages)


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"", "a.jsonl", r"demo: 0 records in its files \(a.jsonl\), 1 rows wanted; correct `source`"),
        (b"\n \n", "a.json", "demo: 0 records"),
        (b"[]", "a.json", "demo: 0 records"),
        (b"", "a.parquet", r"a.parquet: not a readable Parquet file .*; fetch it again"),
        (b"", "a.csv", r"a.csv: not a readable CSV file"),
        (b"p\n", "a.csv", "demo: 0 records"),
        (b"", "a.yaml", "a.yaml: record 0 is NoneType, not a mapping"),
        (b'{"p": "A"}\nnull\n', "a.jsonl", "a.jsonl: record 1 is NoneType, not an object"),
        (b'{"p": ' + b"9" * 5000 + b"}", "a.jsonl", "a.jsonl: byte 0: the record there cannot be held in memory"),
        (b'{"p": ' + DEEP.encode(), "a.jsonl", "a.jsonl: byte 0: the record there cannot be held in memory"),
        (b'{"p": ' + DEEP.encode(), "a.json", "a.json: byte 0: the record there cannot be held in memory"),
        (b'{"p": "A"}'.decode().encode("utf-16"), "a.jsonl", "a.jsonl: not UTF-8 near byte 0; convert"),
        # Without mtime the name of the test would hold the time at which a worker read this file, and two workers would hold two tests.
        (gzip.compress(b'{"p": "A"}\n' * 99, mtime=0)[:-20] + b"\0" * 20, "a.jsonl.gz", "a.jsonl.gz: damaged gzip file .*; fetch it again"),
        (b"x", "README.md", "README.md: no reader for this kind of file; limit `members`"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, target: Path, data: bytes, name: str, words: str) -> None:
    """The sentence names file, place and remedy, and nothing is published."""
    with pytest.raises(StageError, match=words):
        prepared(tmp_path, target, data, name, format="columns", columns={"prompt": "p"})
    assert not (tmp_path / "out").exists()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, target: Path) -> None:
    """Files that were saved by an editor that writes one."""
    files = {"a.jsonl": lines({"p": "A"}, {"p": "B"}), "a.json": b'[{"p": "A"}, {"p": "B"}]', "a.csv": b"p\nA\nB\n"}
    for name, data in files.items():
        assert fates(prepared(tmp_path / name, target, b"\xef\xbb\xbf" + data, name, **PROMPT)) == (["A", "B"], {})


def test_parquet_columns_that_python_cannot_hold(tmp_path: Path, target: Path) -> None:
    """A date far off in a column that is not read costs nothing; looked at as a whole, the file is refused by name."""
    far = pyarrow.array([10**17], pyarrow.timestamp("ms"))
    data = parquet(tmp_path / "a.parquet", p=["A"], when=far)
    assert fates(prepared(tmp_path / "1", target, data, "a.parquet", **PROMPT)) == (["A"], {})
    with pytest.raises(StageError, match=r"a.parquet: not a readable Parquet file"):
        look(tmp_path / "a.parquet")
    none = parquet(tmp_path / "b.parquet", p=pyarrow.array([], pyarrow.string()))
    with pytest.raises(StageError, match=r"demo: 0 records in its files \(b.parquet\)"):
        prepared(tmp_path / "2", target, none, "b.parquet", **PROMPT)


def look(path: Path) -> str:
    """The page on a file."""
    return inspect(SourceSettings(Address("path", str(path)), "source", 7), Size(), path.parent, show_rows=True)


def test_the_look_at_odd_rows(tmp_path: Path) -> None:
    """Null speakers are no label to map; half a character is shown as a question mark; rejections are on the page."""
    chats: list[Any] = [[{"from": "human", "value": "A"}], [{"from": None, "value": "B"}], [{"from": "human", "value": "\ud83d"}], [], None]
    (tmp_path / "a.jsonl").write_bytes(lines(*({"id": 10**40, "n": float("nan"), "conversations": chat} for chat in chats)))
    page = look(tmp_path / "a.jsonl")
    assert "labels: human 2" in page and "roles" not in page
    for words in ("1 rows, 4 rejected", "rejected 1: no_speaker", "rejected 1: half_a_character", "rejected 2: empty"):
        assert words in page
    with pytest.raises(StageError, match="--head -1 looks at no record; give 1 or more"):
        Size(head=-1)
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(StageError, match=r"path:.*b.jsonl: no record in its files"):
        look(tmp_path / "b.jsonl")


def test_most_rows_in_one_group_are_pointed_out(tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ids such as row_0, row_1 look like the pieces of one chat, and one chat falls into one split."""
    data = lines(*({"id": f"row_{n}", "conversations": [{"from": "human", "value": f"Question {n}"}]} for n in range(30)))
    prepared(tmp_path, target, data, **CHAT)
    assert "30 of 30 rows are of group 'row'; if they are no one conversation, set columns: {group: …}" in caplog.text
    caplog.clear()
    prepared(tmp_path / "2", target, data, **CHAT, columns={"group": "id"})
    assert "are of group" not in caplog.text


def test_the_last_line_is_one_sentence(tmp_path: Path, target: Path) -> None:
    """Both commands end with exit 1 and one line that says what to do, without a traceback."""
    manifest = raw(tmp_path / "raw", lines({"q": "A"}, {"q": "B"}), "a.jsonl")
    settings = json.dumps({"dataset": PROMPT, "name": "demo", "seed": 7})
    stage = ["prepare", "--raw", manifest, "--target", target, "--output", tmp_path / "out/manifest.json", "--settings", settings]
    for command, words in (
        ([*stage, "--work", tmp_path / "work"], ("columns seen: q 2", "missing_column:p 2", "scripts.inspect_source", "rejected.parquet")),
        (["inspect_source", f"path:{tmp_path}/no*.json"], ("no file there", "holds")),
    ):
        module = [sys.executable, "-m", f"scripts.{command[0]}"]
        done = subprocess.run([*module, *map(str, command[1:])], cwd=REPO, capture_output=True, text=True, check=False)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and "Traceback" not in done.stderr and "ERROR" in last
        assert all(word in last for word in words), last
