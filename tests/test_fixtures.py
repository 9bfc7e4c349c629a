"""Made-up files in the shapes of the ten datasets, and the config that reads them: every quirk is there, every row has a fate."""

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from benchmarks.prepare import flagship, scaled_samples
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.fixtures.making import FIXTURES, FULL_SIZE, make_fixtures, shares
from scripts.lib.fixtures.target import make_target
from scripts.lib.formats.preparing import prepare
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.reporting.planning import plan_page
from scripts.lib.reporting.sampling import kept_by_kind, rows_table
from scripts.lib.sources.records import read_records

REPO = Path(__file__).parents[1]
ROWS = 600
FETCHED = ("source", "revision", "subset", "split", "members", "exclude", "generator", "licence")
KIMI = yaml.safe_load((REPO / "configs/kimi-k2.5.yaml").read_text())
DEFAULT = yaml.safe_load((REPO / "config.yaml").read_text())


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixtures")
    make_target(folder / "target", 7)
    make_fixtures(folder, ROWS, 7)
    return folder


def raw_manifest(folder: Path, licence: str) -> Path:
    """What `fetch` publishes of the files in `folder`."""
    shards = [Shard.of(path, 0, folder=folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    Manifest("fetch", {}, {}, Counts(len(shards), len(shards)), shards, {"licence": licence}).write(folder)
    return folder / "manifest.json"


def records(fixtures: Path, name: str) -> list[dict]:
    """All raw records of a dataset."""
    return [
        record
        for path in sorted((fixtures / name).rglob("*.*"))
        if path.suffix != ".lock" and path.name != "manifest.json"
        for record in read_records(path, lambda _: None)
    ]


@pytest.fixture(scope="module")
def prepared(fixtures, tmp_path_factory):
    """Manifests of all ten datasets, prepared as configs/kimi-k2.5.yaml says, with samples in proportion."""
    root = tmp_path_factory.mktemp("prepared")
    config = flagship(ROWS, fixtures)
    Manifest("target", {}, {}, Counts(0, 0), (), {"hidden_size": 64}).write(fixtures / "target")
    for name, dataset in config["datasets"].items():
        rest = {key: value for key, value in dataset.items() if key not in FETCHED}
        inputs = {"raw": (raw_manifest(fixtures / name, dataset["licence"]),), "target": (fixtures / "target/manifest.json",)}
        run(Job("prepare", root / name, inputs, {"dataset": rest, "name": name, "seed": 7}, work=root / "work"), prepare)
    return {name: read_manifest(root / name / "manifest.json", "prepare") for name in config["datasets"]}, root, config


def rows_of(root: Path, name: str) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted((root / name).glob("rows-*.parquet"))])


def reasons(root: Path, name: str) -> set[str]:
    return set(pl.read_parquet(root / name / "rejected.parquet")["reason"])


def test_equal_seeds_give_equal_files_and_other_seeds_others(tmp_path, fixtures):
    make_fixtures(tmp_path / "again", ROWS, 7)
    make_fixtures(tmp_path / "other", ROWS, 8)
    for path in (tmp_path / "again").rglob("*.*"):
        name = path.relative_to(tmp_path / "again")
        assert path.read_bytes() == (fixtures / name).read_bytes()
        assert path.read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_the_sizes_are_those_of_the_real_datasets():
    assert FULL_SIZE == 1_100_000
    assert shares(FULL_SIZE) == {name: fixture.weight for name, fixture in FIXTURES.items()}
    assert sum(shares(5000).values()) == 5000
    with pytest.raises(StageError, match="10 rows are too few"):
        shares(10)


def test_a_larger_file_starts_like_a_smaller_one(tmp_path, fixtures):
    make_fixtures(tmp_path, 2 * ROWS, 7)
    for name in FIXTURES:
        small, large = records(fixtures, name), records(tmp_path, name)
        assert large[: len(small)] == small or name == "mixture_of_thoughts"


def test_files_hold_the_quirks_of_the_real_ones(fixtures):
    sharegpt = records(fixtures, "sharegpt")
    labels = {turn["from"] for row in sharegpt for turn in row["conversations"]}
    assert labels >= {"human", "gpt", "user", "system", "chatgpt", "bard"} or labels >= {"human", "gpt", "user", "system", "bing", "bard"}
    assert any(not row["conversations"] for row in sharegpt)
    assert len({row["id"].rpartition("_")[0] for row in sharegpt}) < len(sharegpt)
    swe = records(fixtures, "swe_agent")
    assert {entry["role"] for row in swe for entry in row["trajectory"]} == {"system", "user", "ai"}
    assert swe[3]["trajectory"][0]["text"] is None or swe[3]["trajectory"][0]["role"] == "user"
    assert len({row["instance_id"] for row in swe}) < len(swe)
    assert any('"arguments": \'{' in row["chat"] for row in records(fixtures, "glaive"))
    assert any("Joe's" in row["chat"] for row in records(fixtures, "glaive"))
    assert {turn["from"] for row in records(fixtures, "openthoughts") for turn in row["conversations"]} == {"user", "assistant"}
    assert list(records(fixtures, "mixture_of_thoughts")[0]["messages"][0]) == ["content", "role"]
    assert all(isinstance(value, str) for row in records(fixtures, "opencode_instruct") for value in row.values())
    assert any("<|im_middle|>" in json.dumps(row) for row in records(fixtures, "deepswe_kimi"))


def test_every_dataset_gives_its_samples_and_every_row_has_a_fate(prepared):
    manifests, _, config = prepared
    assert set(manifests) == set(FIXTURES)
    for name, manifest in manifests.items():
        assert manifest.counts.rows_in == shares(ROWS)[name]
        assert manifest.counts.rows_out == config["datasets"][name]["samples"]


def test_no_kind_of_row_is_lost_as_a_whole(prepared):
    _, root, _ = prepared
    for name in FIXTURES:
        assert not {reason for reason in reasons(root, name) if reason.startswith(("unknown_role", "missing_column", "template_without"))}
    roles = rows_of(root, "swe_agent")["messages"][0]
    assert [turn["role"] for turn in roles][:3] in (["system", "user", "assistant"], ["user", "assistant", "user"])


def test_native_rows_hold_every_answer(prepared):
    manifests, root, _ = prepared
    native = {name for name, manifest in manifests.items() if manifest.facts["kind"] == "native"}
    assert native == {"deepswe_kimi", "kimi_2000x"}
    for name in native:
        answers = [turn for messages in rows_of(root, name)["messages"] for turn in messages if turn["role"] == "assistant"]
        assert all(answer["content"] for answer in answers)


def test_the_real_samples_add_up():
    samples = {name: dataset["samples"] for name, dataset in KIMI["datasets"].items() if dataset}
    native = sum(samples[name] for name in ("deepswe_kimi", "kimi_2000x"))
    assert (sum(samples.values()), native, sum(samples.values()) - native) == (88_088, 4_800, 83_288)
    assert scaled_samples(FULL_SIZE) == samples
    assert all(samples[name] <= fixture.weight for name, fixture in FIXTURES.items())


def test_the_plan_adds_up_to_the_samples(prepared, fixtures):
    _, root, config = prepared
    samples = {name: dataset["samples"] for name, dataset in config["datasets"].items()}
    native = samples["deepswe_kimi"] + samples["kimi_2000x"]
    settings = DEFAULT | {"run": "r", "generate": KIMI["generate"], "encode": KIMI["encode"], "scaling": None}
    paths = [root / name / "manifest.json" for name in reversed(samples)]
    page = plan_page(paths, fixtures / "target/manifest.json", settings, free=10**12)
    total = sum(samples.values())
    assert f"{total:,} rows are kept: {native:,} native and {total - native:,} prompts." in page
    table = [line.strip("| ").split(" | ") for line in page[page.index("## Rows") : page.index("## Rejected")].splitlines() if "|" in line][
        2:
    ]
    figures = [[int(cell.replace(",", "")) for cell in row[4:]] for row in table]
    assert [row[0] for row in table] == [*sorted(samples), "all"]
    assert figures[-1] == [sum(column) for column in zip(*figures[:-1], strict=True)]
    for raw, rejected, not_sampled, kept, own, prompts in figures:
        assert raw == rejected + not_sampled + kept and kept == own + prompts
    assert figures[-1][0] == ROWS and figures[-1][3:] == [total, native, total - native]


def test_the_plan_of_the_full_mix_shows_88_088():
    manifests = {
        name: Manifest(
            "prepare",
            {},
            {},
            Counts(FIXTURES[name].weight, dataset["samples"], {"not_sampled": FIXTURES[name].weight - dataset["samples"]}),
            (),
            {"kind": dataset["kind"], "partition": dataset["partition"], "licence": dataset["licence"]},
        )
        for name, dataset in KIMI["datasets"].items()
        if dataset
    }
    assert kept_by_kind(manifests) == {"native": 4_800, "prompts": 83_288}
    last = rows_table(manifests).markdown().splitlines()[-1]
    assert last == "| all |  |  |  | 1,100,000 | 0 | 1,011,912 | 88,088 | 4,800 | 83,288 |"


def test_the_long_datasets_are_the_two_of_agents():
    partitions = {name: dataset["partition"] for name, dataset in KIMI["datasets"].items() if dataset}
    assert {name for name, partition in partitions.items() if partition == "long"} == {"deepswe_kimi", "swe_agent"}


def test_an_unknown_revision_is_a_placeholder_that_fetch_refuses():
    from scripts.lib.sources.settings import checked_revision

    for name, dataset in KIMI["datasets"].items():
        if dataset and name != "kimi_2000x":
            assert checked_revision(name, dataset["revision"])
    with pytest.raises(StageError, match="set `revision` to a commit hash"):
        checked_revision("kimi_2000x", KIMI["datasets"]["kimi_2000x"]["revision"])


def test_the_stanzas_name_columns_that_the_formats_know():
    for name, dataset in KIMI["datasets"].items():
        if dataset and dataset["format"] != "detect":
            rest = {key: value for key, value in dataset.items() if key not in FETCHED}
            assert DatasetSettings.of({"dataset": rest, "name": name, "seed": 1}).samples == dataset["samples"]


def test_the_tiny_target_takes_tools_calls_and_reasoning(fixtures):
    template = ChatTemplate.load(fixtures / "target")
    assert template.takes_tools and template.takes_tool_calls and template.takes_reasoning
