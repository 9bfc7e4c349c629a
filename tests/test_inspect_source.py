"""A look at a source: what it shows of real shapes, and an entry that the config takes and that reads the rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from jsonschema import Draft202012Validator

from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.inspecting import profile, sampling
from scripts.lib.inspecting.inspecting import inspect
from scripts.lib.inspecting.sampling import Sample, Size, drawn
from scripts.lib.sources.hub import HTTP_ERRORS
from scripts.lib.sources.settings import Address, SourceSettings
from tests.raw_rows import RAW
from tests.tiny import tiny_tokenizer

REPO = Path(__file__).parents[1]
ENTRIES = json.loads((REPO / "rules/config.schema.json").read_text())["properties"]["datasets"]


def look(path: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """The page on a file, and the entry that it proposes."""
    page = inspect(SourceSettings(Address("path", str(path)), "source", 7), Size(), path.parent, **options)
    stanza = page[page.index("datasets:") :].split("\n\n")[0]
    return page, yaml.safe_load(stanza)["datasets"]


def write(folder: Path, records: list[dict[str, Any]], name: str = "Raw-1.0.jsonl") -> Path:
    """Records as JSON lines."""
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / name


SOURCES = {name: records for name, records in RAW.items() if name not in ("kimi_2000x", "openthoughts")}
SOURCES |= {f"kimi_2000x_{place}": [RAW["kimi_2000x"][place]] for place in range(3)}
SOURCES |= {f"openthoughts_{place}": [RAW["openthoughts"][place]] for place in range(2)}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_entry_is_valid_and_reads_the_rows(tmp_path: Path, name: str) -> None:
    """For every raw schema the proposed entry passes the config's schema and loses only what is empty."""
    page, datasets = look(write(tmp_path, SOURCES[name]), show_rows=True)
    assert list(Draft202012Validator(ENTRIES).iter_errors(datasets)) == []
    ((key, entry),) = datasets.items()
    assert key == "raw_1"
    DatasetSettings.of({"dataset": {k: entry[k] for k in ("format", "columns") if k in entry}, "name": key, "seed": 7})
    lost = 1 if name == "sharegpt" else 0
    assert f"{len(SOURCES[name]) - lost} rows, {lost} rejected" in page
    for column in SOURCES[name][0]:
        assert f"  {column}: " in page


def test_what_the_page_shows(tmp_path: Path) -> None:
    """Types, nulls, labels with counts, turn patterns, scripts, duplicates and ids."""
    turns = [{"from": "human", "value": "Привет, как дела?"}, {"from": "laguna_s", "value": None}]
    records: list[dict[str, Any]] = [
        {"id": "a", "conversations": turns},
        {"id": "a", "conversations": [{"from": "human", "value": "Write a poem on the sea"}]},
        {"id": "b", "conversations": [{"from": "human", "value": "write a poem on  the sea"}]},
        {"id": None, "conversations": [{"from": "human", "value": " ".join(f"word{n}" for n in range(60))}]},
        {"id": "c", "conversations": [{"from": "human", "value": " ".join(f"word{n}" for n in range(61))}]},
    ]
    page, datasets = look(write(tmp_path, records))
    assert "5 records looked at, of all 5" in page
    assert "  id: text; null 1, empty 0; e.g. a" in page
    assert "  conversations: [{from: text, value: text?}]; null 0" in page
    assert "labels: human 5, laguna_s 1" in page
    assert "turns: user 4, user assistant 1" in page
    assert "scripts: latin 4, cyrillic 1" in page
    assert "likely duplicates: 1 ask the same as an earlier record, 1 nearly the same" in page
    assert datasets["raw_1"]["roles"] == {"laguna_s": "assistant"}
    assert "# roles of laguna_s are guessed: check them" in page


def test_lengths_are_in_tokens_of_a_target(tmp_path: Path) -> None:
    """One token a byte: two letters of two bytes are four tokens; long conversations belong into the long partition."""
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target/config.json").write_text('{"eos_token_id": 2}')
    path = write(tmp_path, [{"instruction": "üü", "response": "y" * 5000}])
    page, datasets = look(path, target=tmp_path / "target")
    assert "first prompt in tokens: median 4, " in page
    assert datasets["raw_1"]["partition"] == "long"
    page, datasets = look(path)
    assert "first prompt in characters: median 2, " in page
    assert datasets["raw_1"]["partition"] == "short"


def test_the_sample_is_seeded_and_reaches_the_end() -> None:
    """The head as it is, of the rest each with the same chance, the same for the same seed."""
    records = [{"n": number} for number in range(1000)]

    def numbers(seed: int) -> list[int]:
        return [record["n"] for record in drawn(records, Size(10, 20, 900, seed), Sample()).records]

    assert numbers(1) == numbers(1) != numbers(2)
    assert numbers(1)[:10] == list(range(10)) and len(numbers(1)) == 30
    assert 300 < max(numbers(1)) < 900
    cut = drawn(records, Size(10, 20, 900, 1), Sample())
    assert (cut.seen, cut.complete) == (900, False)


def test_a_hub_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head and a shuffled draw are read from a stream, and the entry pins the commit."""
    import datasets

    stream = datasets.Dataset.from_list([{"prompt": f"Question {number}"} for number in range(50)]).to_iterable_dataset()
    monkeypatch.setattr(sampling, "pinned_revision", lambda *_: "a" * 40)
    monkeypatch.setattr("scripts.lib.inspecting.inspecting.pinned_revision", lambda *_: "a" * 40)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": stream})
    page = inspect(SourceSettings(Address("hub", "org/Set-2k"), "source", 7), Size(head=5, sample=10), tmp_path)
    entry = yaml.safe_load(page[page.index("datasets:") :])["datasets"]["set_2k"]
    assert (entry["source"], entry["revision"], entry["samples"]) == ("hub:org/Set-2k", "a" * 40, 10_000)
    assert "15 records looked at" in page


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library's errors are not those of Python's own connections."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise HTTP_ERRORS[0]("Name or service not known")

    monkeypatch.setattr(sampling.HfApi, "dataset_info", unreachable)
    with pytest.raises(StageError, match=r"hub:org/set: Name or service not known; check the id and the network, or give --revision"):
        inspect(SourceSettings(Address("hub", "org/set"), "source", 7), Size(), tmp_path)


def test_near_duplicates_need_most_of_their_words() -> None:
    """One changed word of sixty is near, another subject is not."""
    words = [f"word{number}" for number in range(60)]
    changed = [*words[:30], "other", *words[31:]]
    assert profile.near_duplicates([" ".join(words), " ".join(changed), "Something else", "and yet another thing"]) == 1
    assert profile.near_duplicates([]) == 0


def test_the_command(tmp_path: Path) -> None:
    """It prints the page; with nothing known it fails with one sentence that names the columns."""
    pl.DataFrame([{"problem": "1+1?", "solution": "2"}]).write_parquet(tmp_path / "p.parquet")
    command = [sys.executable, "-m", "scripts.inspect_source", f"path:{tmp_path}/p.parquet", "--apply"]
    page = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    assert "columns: {prompt: problem, response: solution}" in page and "  user: 1+1?" in page
    with pytest.raises(StageError, match="no known columns: bar"):
        look(write(tmp_path, [{"bar": 1}]))
