"""Stage fetch: what is pinned, from each kind of source, and what each kind refuses."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.sources import hub
from scripts.lib.sources.fetching import fetch
from scripts.lib.sources.generators import task_seed
from tests.wheel import only_from, write_wheel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fetched(folder: Path, name: str = "demo", **source: Any) -> Manifest:
    """Run the stage for one source and read back what it published."""
    job = Job("fetch", folder / "raw" / name, {}, {"source": source, "name": name, "seed": 7}, work=folder / "work")
    run(job, fetch)
    return read_manifest(job.output / "manifest.json", "fetch")


def names(manifest: Manifest) -> list[str]:
    """Names of the published files."""
    return [shard.name for shard in manifest.shards]


def test_wheel_members_and_excludes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matching members come out, with their paths, their hashes and the wheel's own."""
    files = {"demo/data/a/x.jsonl": b'{"n": 1}\n', "demo/data/b/x.jsonl": b"{}\n", "demo/code.py": b""}
    write_wheel(tmp_path / "links", "demo_data", "1.0", files)
    only_from(monkeypatch, tmp_path / "links")
    manifest = fetched(tmp_path, source="wheel:demo-data==1.0", members=["demo/data/*.jsonl"], exclude=["*/b/*"], licence="MIT")
    assert names(manifest) == ["files/demo/data/a/x.jsonl"]
    assert checked_shard(tmp_path / "raw" / "demo", manifest.shards[0]).read_bytes() == b'{"n": 1}\n'
    assert manifest.facts["licence"] == "MIT"
    assert len(manifest.facts["wheel_sha256"]) == 64
    assert not (tmp_path / "raw" / "demo" / "partial").exists()
    with pytest.raises(StageError, match=r"'\*\.csv' matches none of 6 files; there are demo/data/a/x.jsonl"):
        fetched(tmp_path, source="wheel:demo-data==1.0", members=["*.csv"])
    with pytest.raises(StageError, match=r"wheel demo-data==2.0: pip download failed .*No matching distribution"):
        fetched(tmp_path, source="wheel:demo-data==2.0", members=["*"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"source": "ftp:x"}, "unknown kind 'ftp'; write one of hub:"),
        ({"source": "wheel:demo", "members": ["*"]}, "no pinned version; write wheel:NAME==VERSION"),
        ({"source": "wheel:demo==1.0"}, "set `members`"),
        ({"source": "hub:org/data"}, "revision None is not pinned"),
        ({"source": "hub:org/data", "revision": "main"}, "revision 'main' is not pinned"),
        ({"source": "path:/no/such/file.json"}, "no file there"),
        ({"source": "generator:other==1.0", "generator": {"tasks": [], "size": 1}}, "known: reasoning_gym"),
        ({"source": "generator:reasoning_gym==0.0.1", "generator": {"tasks": [], "size": 1}}, "pip download failed"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, source: dict[str, Any], words: str) -> None:
    """Each error says what to write instead."""
    with pytest.raises(StageError, match=words):
        fetched(tmp_path, **source)


def test_path_is_pinned_by_copy(tmp_path: Path) -> None:
    """A file, a folder and a glob are copied: a later edit in place does not reach the published bytes."""
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    (data / "a.jsonl").write_text("{}\n")
    (data / "deep" / "b.jsonl").write_text("{}\n")
    assert names(fetched(tmp_path, "folder", source=f"path:{data}")) == ["files/a.jsonl", "files/deep/b.jsonl"]
    assert names(fetched(tmp_path, "glob", source=f"path:{data}/**/b.*")) == ["files/b.jsonl"]
    assert names(fetched(tmp_path, "some", source=f"path:{data}", exclude=["deep/*"])) == ["files/a.jsonl"]
    manifest = fetched(tmp_path, "file", source=f"path:{data}/a.jsonl")
    (data / "a.jsonl").write_text('{"edited": true}\n')
    assert checked_shard(tmp_path / "raw" / "file", manifest.shards[0]).read_text() == "{}\n"


def test_generated_records_depend_on_the_seed_and_the_source_alone(tmp_path: Path) -> None:
    """Equal settings give equal bytes; another source's name gives other records of the same task."""
    source: dict[str, Any] = {"source": "generator:reasoning_gym==0.1.25", "generator": {"tasks": ["leg_counting", "chain_sum"], "size": 3}}
    first, again, other = (fetched(tmp_path / place, name, **source) for place, name in (("1", "train"), ("2", "train"), ("3", "bench")))
    assert names(first) == ["files/chain_sum.jsonl", "files/leg_counting.jsonl"]
    assert first.shards == again.shards
    assert {shard.sha256 for shard in first.shards}.isdisjoint(shard.sha256 for shard in other.shards)
    record = json.loads((tmp_path / "1/raw/train/files/chain_sum.jsonl").read_text().splitlines()[0])
    assert set(record) == {"task", "question", "answer"}
    with pytest.raises(StageError, match=r"unknown task 'chain_sums'; known: .*chain_sum"):
        fetched(tmp_path, source="generator:reasoning_gym==0.1.25", generator={"tasks": ["chain_sums"], "size": 1})


def test_a_task_that_needs_an_absent_package_names_it(tmp_path: Path) -> None:
    """The other tasks of the same package work without it."""
    with pytest.raises(StageError, match="needs the package magiccube, which is not installed: pip install magiccube"):
        fetched(tmp_path, source="generator:reasoning_gym==0.1.25", generator={"tasks": ["rubiks_cube"], "size": 1})


def test_seeds_differ_by_task_and_source() -> None:
    """No two of them share records."""
    assert len({task_seed(seed, source, task) for seed in (7, 8) for source in "ab" for task in "xy"}) == 8


def test_hub_dataset_becomes_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split is written; several splits leave the choice to the config, by name."""
    asked: dict[str, Any] = {}
    table = datasets.Dataset.from_list([{"id": "1", "text": "a"}, {"id": "2", "text": "b"}])

    def load(repository: str, **options: Any) -> Any:
        asked.update(options, repository=repository)
        return table if options["split"] else datasets.DatasetDict({"train_sft": table, "test_sft": table})

    monkeypatch.setattr(hub.datasets, "load_dataset", load)
    manifest = fetched(tmp_path, source="hub:org/chat", revision=COMMIT, subset="all", split="train_sft")
    assert asked == {"repository": "org/chat", "name": "all", "split": "train_sft", "revision": COMMIT}
    assert [(shard.name, shard.rows) for shard in manifest.shards] == [("files/data.parquet", 2)]
    assert manifest.facts["revision"] == COMMIT
    with pytest.raises(StageError, match=r"set `split` to one of test_sft, train_sft"):
        fetched(tmp_path, source="hub:org/chat", revision=COMMIT)


def test_hub_members_are_taken_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `members` the repository's files come as they are, without the downloader's own folder."""

    def download(repository: str, *, local_dir: Path, **options: Any) -> None:
        (local_dir / ".cache").mkdir(parents=True)
        (local_dir / ".cache" / "x.json").write_text("{}")
        (local_dir / "big.json").write_text("[]")

    monkeypatch.setattr(hub, "snapshot_download", download)
    manifest = fetched(tmp_path, source="hub:org/chat", revision=COMMIT, members=["*.json"])
    assert names(manifest) == ["files/big.json"]
    assert not (tmp_path / "raw/demo/files/.cache").exists()


def test_hub_errors_are_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's words are kept, with what to check."""

    def load(repository: str, **options: Any) -> Any:
        raise ValueError("Config name is missing.")

    monkeypatch.setattr(hub.datasets, "load_dataset", load)
    with pytest.raises(StageError, match=r"hub:org/chat at 01234567: Config name is missing.*subset and split"):
        fetched(tmp_path, source="hub:org/chat", revision=COMMIT)
