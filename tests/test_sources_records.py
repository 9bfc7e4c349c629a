"""Raw files to records: every kind of file, streamed, and cut files told apart from broken ones."""

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.sources import json_stream
from scripts.lib.sources.json_stream import Cut
from scripts.lib.sources.records import chosen_records, column_names, read_records

RECORDS = [{"id": f"r{n}", "text": 'Zürich, "quoted" {[ \\ ' + "x" * n} for n in range(50)]


def read(path: Path) -> list[dict[str, object]]:
    """All records of a file that is not cut."""
    return list(read_records(path, on_cut=lambda cut: pytest.fail(f"cut: {cut}")))


@pytest.fixture(params=[11, 2**20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces of a few bytes, so that every boundary falls somewhere bad, and in the usual ones."""
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("array.json", json.dumps(RECORDS, ensure_ascii=False)),
        ("array.json", json.dumps(RECORDS, indent=2)),
        ("lines.json", "\n".join(json.dumps(record) for record in RECORDS)),
        ("lines.jsonl", "\n\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\n"),
        ("really_an_array.jsonl", json.dumps(RECORDS)),
        ("pretty.jsonl", "\n".join(json.dumps(record, indent=1) for record in RECORDS)),
    ],
)
def test_json_in_every_shape(tmp_path: Path, name: str, text: str) -> None:
    """Arrays and lines give the same records, whatever the name says."""
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name) == RECORDS
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(packed) == RECORDS


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("indent", [None, 2])
def test_object_of_objects_gives_its_keys(tmp_path: Path, indent: int | None) -> None:
    """A dictionary of records exposes the key as a column."""
    path = tmp_path / "keyed.json"
    path.write_text(json.dumps({"a": {"x": 1}, "b": {"x": 2, "y": {"z": 3}}}, indent=indent))
    assert read(path) == [{"_key": "a", "x": 1}, {"_key": "b", "x": 2, "y": {"z": 3}}]


def test_one_object_and_lines_of_objects_are_no_dictionary_of_records(tmp_path: Path) -> None:
    """An object with a plain value is a record; in JSON lines an object of objects is a record too."""
    (tmp_path / "one.json").write_text('{"a": {"x": 1}, "b": 2}')
    (tmp_path / "lines.jsonl").write_text('{"input": {"word": "at"}}\n')
    (tmp_path / "lines.json").write_text('{"input": {"word": "at"}}\n{"input": {"word": "to"}}\n')
    assert read(tmp_path / "one.json") == [{"a": {"x": 1}, "b": 2}]
    assert read(tmp_path / "lines.jsonl") == [{"input": {"word": "at"}}]
    assert len(read(tmp_path / "lines.json")) == 2


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_cut_files_name_the_place(tmp_path: Path, suffix: str) -> None:
    """Cut at any byte, a file gives its whole records and the byte where the broken one starts."""
    whole = json.dumps(RECORDS[:3], ensure_ascii=False).encode() if suffix == "json" else "\n".join(map(json.dumps, RECORDS[:3])).encode()
    path = tmp_path / f"cut.{suffix}"
    third = whole.index(b'{"id": "r2"')
    for size in range(third + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        cuts: list[Cut] = []
        assert list(read_records(path, cuts.append)) == RECORDS[:2]
        assert cuts == [Cut(path.name, third, 2)]


def test_an_array_that_is_only_not_closed_is_cut_too(tmp_path: Path) -> None:
    """All records whole, the bracket missing: still reported."""
    path = tmp_path / "open.json"
    path.write_text('[{"a": 1}, {"a": 2}')
    cuts: list[Cut] = []
    assert list(read_records(path, cuts.append)) == [{"a": 1}, {"a": 2}]
    assert cuts == [Cut("open.json", 19, 2)]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("bad.jsonl", b'{"a": 1}\n{"a": oops oops oops}\n{"a": 3}\n', "byte 9"),
        ("bad.json", b'[{"a": 1} {"a": 2}, {"a": 3}]', "byte 10"),
        ("more.json", b'[{"a": 1}]\n[]', "after the end of the array"),
        ("latin.json", '[{"a": "Zürich und Umgebung"}]'.encode("latin-1"), "UTF-8"),
        ("lists.json", b"[[1, 2]]", "record 0 is list"),
        ("notes.txt", b"hello", "no reader"),
        ("bad.json.gz", b"no gzip", "gzip"),
        ("bad.parquet", b"no parquet", "Parquet"),
        ("bad.yaml", b"a: [1, 2", "YAML"),
        ("list.yaml", b"- 1\n- 2\n", "record 0 is int"),
    ],
)
def test_broken_files_are_errors_with_the_place(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    """What is no cut but broken stops the stage."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(StageError, match=words) as error:
        read(path)
    assert name in str(error.value)


def test_chosen_rows_and_columns(tmp_path: Path) -> None:
    """Rows by number from any kind of file; a Parquet file is read only where they lie, and only the columns asked for."""
    rows = [{"id": str(number), "x": number, "y": "z"} for number in range(10)]
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet", row_group_size=3)
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("t.parquet", "t.jsonl"):
        found = list(chosen_records(tmp_path / name, [1, 7, 8], lambda _: None, {"id", "absent"}))
        assert [(number, record["id"]) for number, record in found] == [(1, "1"), (7, "7"), (8, "8")]
        assert list(chosen_records(tmp_path / name, [], lambda _: None)) == []
    assert set(found[0][1]) == {"id", "x", "y"}
    parquet = list(chosen_records(tmp_path / "t.parquet", [9], lambda _: None, {"id"}))
    assert parquet == [(9, {"id": "9"})]
    assert len(list(read_records(tmp_path / "t.parquet", lambda _: None, {"absent"}))) == 10
    assert column_names(tmp_path / "t.parquet") == ["id", "x", "y"] and column_names(tmp_path / "t.jsonl") is None


def test_lines_that_turn_into_something_else(tmp_path: Path) -> None:
    """Lines are read one by one for as long as each is a record; then values are read wherever they end."""
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n{"a":\n {"b": 3}}\n{"a": 4} {"a": 5}\n')
    assert [record["a"] for record in read(path)] == [1, 2, {"b": 3}, 4, 5]


def test_tables_and_yaml(tmp_path: Path) -> None:
    """Parquet keeps types and nulls, CSV gives text, YAML gives a list, a dictionary of records or one record."""
    rows = [{"id": "1", "turns": ["a", "b"]}, {"id": "2", "turns": None}]
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text('id,text\n007,"two\nlines"\n')
    (tmp_path / "list.yml").write_text("- {a: 1}\n- {a: 2}\n")
    (tmp_path / "keyed.yaml").write_text("x: {a: 1}\ny: {a: 2}\n")
    assert read(tmp_path / "t.parquet") == rows
    assert read(tmp_path / "t.csv") == [{"id": "007", "text": "two\nlines"}]
    assert read(tmp_path / "list.yml") == [{"a": 1}, {"a": 2}]
    assert read(tmp_path / "keyed.yaml") == [{"_key": "x", "a": 1}, {"_key": "y", "a": 2}]
