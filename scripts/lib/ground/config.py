"""Checks of the config: every error at once, each with its dotted path and what to write instead."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a mapping",
    "boolean": "true or false",
}
PLAIN = re.compile(r"null|true|false|-?[0-9]+(\.[0-9]+)?")
SCIENTIFIC = re.compile(r"^([+-]?\d+)e([+-]?\d+)$", re.IGNORECASE)
PRUNED = ("datasets", "drafters")
PRUNED_BENCHMARK = ("tasks", "variants")
IN_PROCESS = {"engine", "drafter", "draft_steps", "dtype", "prompts"}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without the datasets, drafters, tasks and variants set to null: how an override leaves out one of the default's."""
    kept = dict(config)
    for section in PRUNED:
        kept[section] = present(kept.get(section))
    if isinstance(kept.get("benchmark"), Mapping):
        kept["benchmark"] = kept["benchmark"] | {name: present(kept["benchmark"].get(name)) for name in PRUNED_BENCHMARK}
    return kept


def present(section: Any) -> Any:
    """The entries of a mapping that are not null; anything else as it is, for the schema to judge."""
    return {name: entry for name, entry in section.items() if entry is not None} if isinstance(section, Mapping) else section


def check_config(config: Mapping[str, Any], schema: Path, failure: Callable[[str], Exception]) -> None:
    """Raise `failure` with all errors of `config`, one a line; do nothing when there are none."""
    errors = config_errors(config, json.loads(schema.read_text()))
    if errors:
        raise failure("Invalid configuration:\n" + "\n".join(f"  {error}" for error in errors))


def config_errors(config: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """One line per error: `dotted.path: what is wrong (remedy)`, sorted by path."""
    found = {f"{path}: {text}" for error in Draft202012Validator(schema).iter_errors(config) for path, text in described(error)}
    return sorted(found) if found else sorted(contradictions(config))


def described(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Dotted path and text of one schema error; unknown and missing keys get a path of their own."""
    path = ".".join(str(part) for part in error.absolute_path)
    inside = f"{path}." if path else ""
    if error.validator == "additionalProperties":
        known = sorted(error.schema.get("properties", {}))
        for key in sorted(set(error.instance) - set(known)):
            close = difflib.get_close_matches(key, known, n=1)
            yield inside + key, f"unknown key (did you mean {close[0]}?)" if close else f"unknown key (known: {', '.join(known)})"
    elif error.validator == "required":
        for key in sorted(set(error.validator_value) - set(error.instance)):
            yield inside + key, "missing (required here)"
    elif "propertyNames" in error.absolute_schema_path and error.validator == "enum":
        yield inside + str(error.instance), f"unknown key (known: {', '.join(sorted(error.validator_value))})"
    elif "propertyNames" in error.absolute_schema_path:
        yield inside + str(error.instance), "bad name (use lower-case letters, digits and _, a letter first: it becomes a folder)"
    else:
        yield path or "config", described_value(error)


def described_value(error: ValidationError) -> str:
    """What is wrong with one value, and what to write instead."""
    value = error.instance
    if error.validator == "type":
        wanted = error.validator_value
        kinds = " or ".join(KINDS.get(kind, kind) for kind in ([wanted] if isinstance(wanted, str) else wanted))
        return f"{json.dumps(value)} is not {kinds}{number_hint(value)}"
    if error.validator == "enum":
        return f"{json.dumps(value)} is none of {', '.join(map(str, error.validator_value))}"
    if error.validator == "pattern":
        return f"{json.dumps(value)} does not fit ({error.schema.get('description', 'pattern ' + error.validator_value)})"
    return error.message


def number_hint(value: Any) -> str:
    """YAML reads 1e-4 as text, and Snakemake all in braces on its command line; say how to write it."""
    if not isinstance(value, str):
        return ""
    match = SCIENTIFIC.match(value)
    if match:
        return f" (YAML reads {value} as text: write {match[1]}.0e{int(match[2])})"
    if PLAIN.fullmatch(value):
        return " (this is text: take its quotes away, or what stood in braces after --config into a file for --configfile)"
    return ""


def contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    """Errors between sections that a schema cannot state."""
    benchmark = config["benchmark"]
    for name in sorted(set(config["datasets"]) & set(benchmark["tasks"])):
        yield f"benchmark.tasks.{name}: also a dataset's name (rename one: both become folders of one tree)"
    on_gpu = config["runtime"]["device"].startswith("cuda")
    for name, variant in sorted(benchmark["variants"].items()):
        for option, text in variant_contradictions(variant, sorted(config["drafters"])):
            yield f"benchmark.variants.{name}.{option}: {text}"
        if on_gpu and variant.get("topk", 1) > 1 and "attention_backend" not in variant:
            why = "for a tree SGLang chooses another one than for the target alone, and their speeds would not compare"
            yield f"benchmark.variants.{name}.attention_backend: missing ({why}: name one for both, such as flashinfer or triton)"
    yield from crowded(benchmark)
    for name, drafter in sorted(config["drafters"].items()):
        for option, text in drafter_contradictions(drafter, config):
            yield f"drafters.{name}.{option}: {text}"
    sources = {f"datasets.{name}": entry for name, entry in config["datasets"].items()}
    sources |= {f"benchmark.tasks.{name}": entry for name, entry in benchmark["tasks"].items()}
    for path, entry in sorted(sources.items()):
        yield from source_contradictions(path, entry)
    if config["target"]["source"].startswith("hub:") and "revision" not in config["target"]:
        yield "target.revision: missing (a hub id needs a pinned revision: the commit hash of the model page)"


def drafter_contradictions(drafter: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of one drafter that do not go with other sections, and why."""
    if config["hidden"]["mode"] == "rolling" and drafter.get("order", "rows") != "shards":
        yield "order", "must be shards (hidden.mode: rolling reads a shard after the other)"
    if config["runtime"].get("shard") and drafter.get("optimizer") == "muon":
        yield "optimizer", "muon steps by whole matrices (runtime.shard: true spreads them over ranks; choose adamw)"
    if drafter["precision"] == "fp8" and not config["runtime"]["device"].startswith("cuda"):
        yield "precision", "fp8 is for GPUs (runtime.device: cpu; choose bfloat16 or float32)"
    sizes = {"vocab.size": config["vocab"]["size"], "intermediate_size": drafter.get("intermediate_size") or 0}
    for name, size in sizes.items():
        if drafter["precision"] == "fp8" and size % 16:
            yield "precision", f"fp8 takes multiples of 16 ({name} is {size}; choose one, or bfloat16)"


def crowded(benchmark: Mapping[str, Any]) -> Iterator[str]:
    """Served cells that would ask more prompts at once than there are: their figures would be those of fewer."""
    served = {name: variant for name, variant in benchmark["variants"].items() if variant.get("engine") == "sglang"}
    most = max(benchmark.get("concurrencies", [1]))
    fewest = {f"benchmark.tasks.{name}.samples": task["samples"] for name, task in benchmark["tasks"].items() if served}
    fewest |= {f"benchmark.variants.{name}.prompts": variant["prompts"] for name, variant in served.items() if "prompts" in variant}
    for path, count in sorted(fewest.items()):
        if count < most:
            yield f"{path}: {count} are fewer than the {most} requests at a time of benchmark.concurrencies (raise it, or leave those out)"


def variant_contradictions(variant: Mapping[str, Any], drafters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options of one way to serve that do not go together, and why."""
    served, algorithm = variant.get("engine", "transformers") == "sglang", variant.get("algorithm", "EAGLE3")
    drafter = variant.get("drafter")
    kind, _, locator = (drafter or "").partition(":")
    if not served:
        for option in sorted(set(variant) - IN_PROCESS):
            yield option, f"of engine: sglang alone (leave it out, or one of {', '.join(sorted(IN_PROCESS))})"
    if algorithm == "NGRAM":
        for option in sorted({"drafter", "draft_steps", "topk"} & set(variant)):
            yield option, "NGRAM drafts from the text so far (leave it out; draft_tokens sets how much)"
        return
    if drafter is None:
        yield "drafter", "missing (required here)"
    elif locator and not served:
        yield "drafter", f"{drafter} is served by engine: sglang alone (name one of {', '.join(drafters)}, or set engine)"
    elif not locator and algorithm == "STANDALONE":
        yield "drafter", "STANDALONE drafts with a small language model (write path:DIR or hub:ORG/NAME)"
    elif not locator and drafter not in drafters:
        yield "drafter", f"{drafter} is not among drafters ({', '.join(drafters)})"
    if kind == "hub" and "revision" not in variant:
        yield "revision", "missing (a hub id needs a pinned revision: the commit hash of the model page)"
    if "draft_steps" not in variant:
        yield "draft_steps", "missing (required here)"
    elif variant.get("topk", 1) == 1 and variant.get("draft_tokens", variant["draft_steps"] + 1) != variant["draft_steps"] + 1:
        yield (
            "draft_tokens",
            f"a chain of {variant['draft_steps']} drafts is verified with {variant['draft_steps'] + 1} tokens (leave it out)",
        )
    if variant.get("topk", 1) > 1 and "draft_tokens" not in variant:
        yield "draft_tokens", "missing (with topk above 1, how much of the tree is verified)"


def source_contradictions(path: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Errors of one source: what its kind needs beside it."""
    kind = entry["source"].split(":", 1)[0]
    needed = {"hub": "revision", "wheel": "members", "generator": "generator"}.get(kind)
    if needed and needed not in entry:
        yield f"{path}.{needed}: missing (a {kind}: source needs it)"
