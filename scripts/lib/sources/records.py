"""Records of raw files: JSON, JSON lines, both also gzipped, Parquet, CSV and YAML."""

import gzip
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow
import pyarrow.parquet
import yaml

from scripts.lib.ground.errors import StageError
from scripts.lib.sources.json_stream import KEY, Cut, json_records

Records = Iterator[dict[str, Any]]
ROWS_AT_ONCE = 1024


def read_records(path: Path, on_cut: Callable[[Cut], None], columns: Collection[str] | None = None) -> Records:
    """The records of the file at `path` in its order, by its suffix.

    An object of objects (JSON or YAML) gives one record per key, with the key in the column `_key`.
    Of a Parquet file only the named `columns` are read, where given. `on_cut` is called when a JSON file ends inside
    a record. Raises StageError on a file that cannot be read.
    """
    for _, record in chosen_records(path, None, on_cut, columns):
        yield record


def chosen_records(
    path: Path, rows: Sequence[int] | None, on_cut: Callable[[Cut], None], columns: Collection[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number within the file and record for each of the ascending `rows`, or for every row; the rest as `read_records` does."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = ((suffixes[:-1] if packed else suffixes)[-1:] or [""])[0]
    if kind in (".json", ".jsonl", ".ndjson"):
        return among(read_json(path, packed, kind != ".json", on_cut), rows)
    if kind == ".parquet" and not packed:
        return read_parquet(path, rows, columns)
    readers: dict[str, Callable[[Path], Records]] = {".csv": read_csv, ".yaml": read_yaml, ".yml": read_yaml}
    if packed or kind not in readers:
        known = ".json, .jsonl, .ndjson (also .gz), .parquet, .csv, .yaml"
        raise StageError(f"{path}: no reader for this kind of file; limit `members` to files of the kinds {known}")
    return among(readers[kind](path), rows)


def among(records: Records, rows: Sequence[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbered `records` that are among `rows`, not read further than the last of them."""
    if rows is None:
        yield from enumerate(records)
        return
    wanted, last = frozenset(rows), rows[-1] if rows else -1
    if last < 0:
        return
    for number, record in enumerate(records):
        if number in wanted:
            yield number, record
        if number == last:
            return


def column_names(path: Path) -> list[str] | None:
    """The columns of a file that has one schema for all rows; None for others."""
    return list(open_parquet(path).schema_arrow.names) if path.suffix.lower() == ".parquet" else None


def read_json(path: Path, packed: bool, lines: bool, on_cut: Callable[[Cut], None]) -> Records:
    """Records of a JSON or JSON lines file; which of both is seen from the text, because names mislead."""
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield from json_records(file, path, lines, on_cut)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise StageError(f"{path}: damaged gzip file ({error}); fetch it again") from error


def read_parquet(path: Path, rows: Sequence[int] | None, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of a Parquet file, a batch at a time; row groups without any of the ascending `rows` are not read."""
    file = open_parquet(path)
    names = [name for name in file.schema_arrow.names if columns is None or name in columns]
    start = 0
    try:
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if rows is None or bisect_left(rows, start) < bisect_left(rows, end):
                # A file without any wanted column still has its rows counted, so one column is read anyway.
                yield from batched_rows(file, group, start, rows, names or file.schema_arrow.names[:1])
            start = end
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # damaged, or values such as dates that Python cannot hold
        raise StageError(f"{path}: not a readable Parquet file ({error}); fetch it again, or leave it out by `exclude`") from error


def batched_rows(
    file: pyarrow.parquet.ParquetFile, group: int, start: int, rows: Sequence[int] | None, names: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows of one row group that starts at row `start`."""
    for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=names):
        end = start + batch.num_rows
        numbers: Sequence[int] = range(start, end)
        taken = batch
        if rows is not None:
            numbers = rows[bisect_left(rows, start) : bisect_left(rows, end)]
            taken = batch.take(pyarrow.array([number - start for number in numbers], pyarrow.int64()))
        yield from zip(numbers, taken.to_pylist(), strict=True)
        start = end


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """The Parquet file at `path`; StageError when it is none."""
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise StageError(f"{path}: not a readable Parquet file ({error}); fetch it again") from error


def read_csv(path: Path) -> Records:
    """Rows of a CSV file with a header; every value is text."""
    try:
        yield from pl.read_csv(path, infer_schema=False).iter_rows(named=True)
    except pl.exceptions.PolarsError as error:
        raise StageError(f"{path}: not a readable CSV file ({error}); repair it") from error


def read_yaml(path: Path) -> Records:
    """Records of a YAML file: a list of mappings, a mapping of mappings, or one mapping."""
    try:
        value = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StageError(f"{path}: not readable YAML ({error}); repair it") from error
    if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
        value = [{KEY: str(key), **item} for key, item in value.items()]
    records = value if isinstance(value, list) else [value]
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise StageError(f"{path}: record {index} is {type(record).__name__}, not a mapping; choose files whose records are mappings")
        yield record
