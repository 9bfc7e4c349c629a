"""The schema and the default config in step; errors all at once, with dotted paths and remedies."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from scripts.lib.ground.config import check_config, config_errors, without_nulls

REPO = Path(__file__).parents[1]
SCHEMA = json.loads((REPO / "rules/config.schema.json").read_text())
DEFAULT = yaml.safe_load((REPO / "config.yaml").read_text())


@pytest.fixture
def config():
    return copy.deepcopy(DEFAULT)


def objects(schema):
    """Every schema of a mapping with fixed keys, nested ones included."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_the_default_config_is_valid(config):
    assert config_errors(config, SCHEMA) == []


def test_the_schema_is_valid_closed_and_described():
    Draft202012Validator.check_schema(SCHEMA)
    for mapping in objects(SCHEMA):
        assert mapping["additionalProperties"] is False
        for name, entry in mapping["properties"].items():
            assert "description" in entry or "properties" in entry, name


@pytest.mark.parametrize("section", sorted(set(DEFAULT) - {"datasets", "benchmark", "target"}))
def test_the_default_config_shows_every_option(section):
    schema, entry = SCHEMA["properties"][section], DEFAULT[section]
    if section == "drafters":
        schema, entry = schema["additionalProperties"], next(iter(entry.values()))
    if "properties" in schema:
        assert set(entry) == set(schema["properties"])


@pytest.mark.parametrize(
    "path", sorted(set((REPO / "configs").glob("*.yaml")) - {REPO / "configs/catalogue.yaml"}), ids=lambda path: path.stem
)
def test_the_other_configs_are_valid(path, config):
    def merged(base, over):
        return {**base, **{k: merged(base.get(k) or {}, v) if isinstance(v, dict) else v for k, v in over.items()}}

    layers = [path.with_name(path.name.replace("-fixtures", "")), path] if "-fixtures" in path.stem else [path]
    for layer in layers:
        config = merged(config, yaml.safe_load(layer.read_text()))
    assert config_errors(without_nulls(config), SCHEMA) == []


def test_all_errors_at_once_with_paths_and_remedies(config):
    config["drafters"]["eagle3"]["learning_rate"] = "1e-4"
    config["drafters"]["eagle3"]["epoch"] = 3
    config["encode"]["max_length"] = "long"
    config["datasets"]["Share-GPT"] = config["datasets"]["bfcl"]
    config["datasets"]["evals"] = config["datasets"]["evals"] | {"source": "s3://bucket/file"}
    config["generate"]["turns"] = "some"
    config["hidden"] = config["hidden"] | {"max_bytes": "8000"}  # what --config 'hidden={max_bytes: 8000}' gives
    del config["seed"]
    assert config_errors(config, SCHEMA) == sorted(
        [
            "datasets.Share-GPT: bad name (use lower-case letters, digits and _, a letter first: it becomes a folder)",
            'datasets.evals.source: "s3://bucket/file" does not fit '
            "(write hub:ORG/NAME, path:FILE_OR_GLOB, wheel:NAME==VERSION or generator:NAME==VERSION)",
            'drafters.eagle3.learning_rate: "1e-4" is not a number (YAML reads 1e-4 as text: write 1.0e-4)',
            "drafters.eagle3.epoch: unknown key (did you mean epochs?)",
            'encode.max_length: "long" is not a whole number',
            'generate.turns: "some" does not fit (assistant turns that the target writes anew: first, all, last or a number, '
            "the first so many and nothing behind them)",
            'hidden.max_bytes: "8000" is not a whole number or null '
            "(this is text: take its quotes away, or what stood in braces after --config into a file for --configfile)",
            "seed: missing (required here)",
        ]
    )


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (
            lambda c: c["benchmark"]["tasks"].update(evals=c["benchmark"]["tasks"]["mtbench"]),
            "benchmark.tasks.evals: also a dataset's name",
        ),
        (lambda c: c["benchmark"]["variants"]["chain4"].update(drafter="eagle4"), "benchmark.variants.chain4.drafter: eagle4 is not among"),
        (lambda c: c["benchmark"]["variants"]["chain4"].pop("drafter"), "benchmark.variants.chain4.drafter: missing"),
        (lambda c: c["benchmark"]["variants"]["chain4"].update(topk=4), "benchmark.variants.chain4.topk: of engine: sglang alone"),
        (
            lambda c: c["benchmark"]["variants"]["chain4"].update(engine="sglang", topk=4),
            "benchmark.variants.chain4.draft_tokens: missing (with topk above 1",
        ),
        (
            lambda c: (
                c["runtime"].update(device="cuda"),
                c["benchmark"]["variants"]["chain4"].update(engine="sglang", topk=4, draft_tokens=8),
            ),
            "benchmark.variants.chain4.attention_backend: missing (for a tree",
        ),
        (
            lambda c: c["benchmark"]["variants"]["chain4"].update(engine="sglang", draft_tokens=8),
            "benchmark.variants.chain4.draft_tokens: a chain of 4 drafts is verified with 5 tokens",
        ),
        (
            lambda c: c["benchmark"]["variants"]["chain4"].update(engine="sglang", algorithm="NGRAM"),
            "benchmark.variants.chain4.drafter: NGRAM drafts from the text so far",
        ),
        (
            lambda c: c["benchmark"]["variants"]["chain4"].update(engine="sglang", drafter="hub:org/drafter"),
            "benchmark.variants.chain4.revision: missing",
        ),
        (
            lambda c: c["benchmark"]["variants"]["chain4"].update(engine="sglang", algorithm="STANDALONE"),
            "benchmark.variants.chain4.drafter: STANDALONE drafts with a small language model",
        ),
        (
            lambda c: (c["runtime"].update(shard=True), c["drafters"]["eagle3"].update(optimizer="muon")),
            "drafters.eagle3.optimizer: muon steps by whole matrices",
        ),
        (lambda c: c["drafters"]["eagle3"].update(precision="fp8"), "drafters.eagle3.precision: fp8 is for GPUs (runtime.device: cpu"),
        (
            lambda c: (c["runtime"].update(device="cuda"), c["vocab"].update(size=8200), c["drafters"]["eagle3"].update(precision="fp8")),
            "drafters.eagle3.precision: fp8 takes multiples of 16 (vocab.size is 8200",
        ),
        (
            lambda c: (c["runtime"].update(device="cuda"), c["drafters"]["eagle3"].update(precision="fp8", intermediate_size=1000)),
            "drafters.eagle3.precision: fp8 takes multiples of 16 (intermediate_size is 1000",
        ),
        (
            lambda c: (c["benchmark"].update(concurrencies=[1, 8]), c["benchmark"]["variants"]["chain4"].update(engine="sglang")),
            "benchmark.tasks.gsm.samples: 2 are fewer than the 8 requests at a time",
        ),
        (
            lambda c: (
                c["benchmark"].update(concurrencies=[2, 1]),
                c["benchmark"]["variants"]["chain2_bf16"].update(engine="sglang"),
            ),
            "benchmark.variants.chain2_bf16.prompts: 1 are fewer than the 2 requests at a time",
        ),
        (lambda c: c["datasets"]["evals"].pop("members"), "datasets.evals.members: missing (a wheel: source needs it)"),
        (lambda c: c["target"].update(source="hub:org/model"), "target.revision: missing"),
    ],
)
def test_contradictions_between_sections(config, edit, error):
    edit(config)
    assert [line for line in config_errors(config, SCHEMA) if line.startswith(error)]


def test_null_leaves_out_a_dataset(config):
    config["datasets"]["evals"] = None
    assert set(without_nulls(config)["datasets"]) == set(DEFAULT["datasets"]) - {"evals"}


def test_the_failure_is_the_callers_own(config, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    config["seed"] = "seven"
    with pytest.raises(RuntimeError, match='seed: "seven" is not a whole number'):
        check_config(config, path, RuntimeError)


def test_states_that_come_and_go_are_read_a_shard_after_the_other(config):
    config["hidden"]["mode"] = "rolling"
    assert config_errors(config, SCHEMA) == ["drafters.eagle3.order: must be shards (hidden.mode: rolling reads a shard after the other)"]
    config["drafters"]["eagle3"]["order"] = "shards"
    assert config_errors(config, SCHEMA) == []
