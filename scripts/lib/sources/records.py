"""Records of raw files: JSON, JSON lines, both also gzipped, Parquet, CSV and YAML."""

import gzip
from collections.abc import Callable, Iterator
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


def read_records(path: Path, on_cut: Callable[[Cut], None]) -> Records:
    """The records of the file at `path` in its order, by its suffix.

    An object of objects (JSON or YAML) gives one record per key, with the key in the column `_key`.
    `on_cut` is called when a JSON file ends inside a record. Raises StageError on a file that cannot be read.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = (suffixes[:-1] if packed else suffixes)[-1:]
    if kind in ([".json"], [".jsonl"], [".ndjson"]):
        return read_json(path, packed, kind != [".json"], on_cut)
    readers: dict[str, Callable[[Path], Records]] = {".parquet": read_parquet, ".csv": read_csv, ".yaml": read_yaml, ".yml": read_yaml}
    if packed or not kind or kind[0] not in readers:
        known = ".json, .jsonl, .ndjson (also .gz), .parquet, .csv, .yaml"
        raise StageError(f"{path}: no reader for this kind of file; limit `members` to files of the kinds {known}")
    return readers[kind[0]](path)


def read_json(path: Path, packed: bool, lines: bool, on_cut: Callable[[Cut], None]) -> Records:
    """Records of a JSON or JSON lines file; which of both is seen from the text, because names mislead."""
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield from json_records(file, path, lines, on_cut)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile) as error:
        raise StageError(f"{path}: damaged gzip file ({error}); fetch it again") from error


def read_parquet(path: Path) -> Records:
    """Rows of a Parquet file, a batch at a time."""
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()
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
