"""The catalogue of datasets: page and stanzas in step, every fact marked, every stanza valid."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from scripts.catalogue import FACTS, PAGE, SOURCE, page
from scripts.lib.formats.settings import DatasetSettings

REPO = Path(__file__).parents[1]
CATALOGUE = yaml.safe_load(SOURCE.read_text())
STANZA = json.loads((REPO / "rules/config.schema.json").read_text())["properties"]["datasets"]["additionalProperties"]
KIMI = yaml.safe_load((REPO / "configs/kimi-k2.5.yaml").read_text())["datasets"]
ENTRIES = [(name, entry) for entries in CATALOGUE.values() for name, entry in entries.items()]
FETCHED = ("source", "revision", "subset", "split", "members", "exclude", "generator", "licence")


def test_the_page_is_made_from_the_catalogue():
    assert PAGE.read_text() == page(CATALOGUE), "run python -m scripts.catalogue"


def test_the_categories_are_those_that_drafters_need():
    wanted = ["agentic code", "target-native", "tool use", "code", "review and debugging", "reasoning", "chat", "long form", "synthetic"]
    assert list(CATALOGUE) == wanted
    assert len(ENTRIES) >= 30 and len({name for name, _ in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_an_entry_is_whole(name, entry):
    assert set(entry) == {*FACTS, "relevance", "serves", "stanza"}
    for key in FACTS:
        assert list(entry[key]) in (["read"], ["unverified"])
    assert (entry["serves"], entry["stanza"]["kind"]) in {("prompts", "prompts"), ("answers", "native")}
    assert [error.message for error in Draft202012Validator(STANZA).iter_errors(entry["stanza"])] == []
    rest = {key: value for key, value in entry["stanza"].items() if key not in FETCHED}
    assert rest["format"] == "detect" or DatasetSettings.of({"dataset": rest, "name": name, "seed": 1})


def test_the_datasets_of_the_kimi_mix_are_in_it_with_the_same_stanza():
    known = dict(ENTRIES)
    for name, dataset in KIMI.items():
        if dataset:
            same = {key: value for key, value in dataset.items() if key in ("source", "revision", "members", "format", "kind", "partition")}
            assert known[name]["stanza"].items() >= {key: value for key, value in same.items() if not isinstance(value, list)}.items()
            assert known[name]["stanza"].get("members") == dataset.get("members")
