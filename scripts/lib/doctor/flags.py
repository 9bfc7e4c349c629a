"""A command line of SGLang: what it asks for, and what SGLang 0.5.23 makes of it without an error."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.repairs import finding

ALIASES = {"speculative-draft-model": "speculative-draft-model-path", "model": "model-path"}
STEPS, TOPK, TOKENS = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
TREE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
WITH_DRAFTER = ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK")
WITHOUT_DRAFTER = ("NGRAM", "UNO")
WITHOUT_STATES = (*WITHOUT_DRAFTER, "STANDALONE")  # of the target: what they draft does not hang on its arithmetic
EAGLE_NAMES = ("EAGLE", "NEXTN")
EAGLE3_DRAFTERS = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")

Flags = Mapping[str, str]


def parsed(words: Sequence[str]) -> dict[str, str]:
    """Flags of a command line by their long names without dashes; the last of two counts, a switch is empty."""
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        follows = words[place + 1] if place + 1 < len(words) else "--"
        found[ALIASES.get(name, name)] = value if equals else "" if follows.startswith("--") else follows
    return found


def algorithm_of(flags: Flags) -> str | None:
    """The algorithm that `flags` ask for, in capitals."""
    return flags["speculative-algorithm"].upper() if flags.get("speculative-algorithm") else None


def algorithm_findings(flags: Flags, meant: str | None, drafter: Mapping[str, Any] | None, folder: Path | None) -> Iterator[Finding]:
    """Where the algorithm of `flags`, the one that is `meant`, and the `drafter` (the config.json in `folder`) do not fit."""
    given, path = algorithm_of(flags), flags.get("speculative-draft-model-path")
    asked = sorted(name for name in flags if name.startswith("speculative-"))
    if given is None and (asked or meant):
        yield finding("no_speculation", f"no --speculative-algorithm beside {asked or f'the drafter {folder}'}: SGLang decodes plainly")
        return
    if given is None:
        return
    if given in EAGLE_NAMES and eagle3(drafter):
        yield finding("eagle_for_eagle3", f"--speculative-algorithm {given} with an EAGLE-3 drafter: SGLang skips fc and d2t, no error")
    elif meant is not None and given != meant.upper():
        yield finding("other_algorithm", f"--speculative-algorithm is {given}, {meant} is meant")
    else:
        yield from mixed_up(given, drafter)
    if given in WITHOUT_DRAFTER and path:
        yield finding("drafter_unused", f"{given} reads no drafter, {path} would be ignored")
    if given in WITH_DRAFTER and not path:
        yield finding("drafter_missing", f"{given} without --speculative-draft-model-path")
    elif path and folder is not None and Path(path).resolve() != folder.resolve():
        yield finding("drafter_differs", f"--speculative-draft-model-path is {path}, checked is {folder}")


def mixed_up(algorithm: str, drafter: Mapping[str, Any] | None) -> Iterator[Finding]:
    """A drafter of another algorithm."""
    names = [] if drafter is None else drafter.get("architectures") or []
    belongs = "EAGLE3" if eagle3(drafter) else "DFLASH or DSPARK" if any("DFlash" in n or "DSpark" in n for n in names) else None
    if belongs is None and names and algorithm != "STANDALONE" and names[0].endswith("ForCausalLM"):
        belongs = "STANDALONE"
    if belongs and algorithm in WITH_DRAFTER and algorithm not in belongs:
        yield finding("other_algorithm", f"{algorithm} with a drafter of architecture {names[0]}, which is for {belongs}")


def eagle3(drafter: Mapping[str, Any] | None) -> bool:
    """Whether `drafter` is an EAGLE-3 one by its architecture, or by layer ids that only those have."""
    if drafter is None:
        return False
    return any(name in EAGLE3_DRAFTERS for name in drafter.get("architectures") or []) or "eagle_config" in drafter


def number(flags: Flags, name: str) -> int | None:
    """The number behind the flag `name`."""
    return int(flags[name]) if flags.get(name) else None


def step_findings(flags: Flags) -> Iterator[Finding]:
    """Steps, top-k and draft tokens that the server would change, or could not fill."""
    if algorithm_of(flags) not in TREE_ALGORITHMS:
        return
    steps, topk, tokens = (number(flags, name) for name in (STEPS, TOPK, TOKENS))
    if steps is None:
        rest = [f"--{name}" for name in (TOPK, TOKENS) if flags.get(name)]
        found = f"{' and '.join(rest)} without --{STEPS}: SGLang stops" if rest else f"no --{STEPS}: SGLang chooses by the architecture"
        yield finding("steps_unset", found, fatal=bool(rest))
    elif topk is None or tokens is None:
        yield finding("steps_unset", f"--{STEPS} {steps} without --{TOPK} and --{TOKENS}")
    elif topk == 1 and tokens != steps + 1:
        yield finding("steps_rewritten", f"{tokens} draft tokens with {steps} steps at top-k 1: SGLang takes {steps + 1}")
    elif topk > 1 and tokens - 1 > topk + (steps - 1) * topk * topk:
        yield finding("tree_too_small", f"{tokens} draft tokens of a tree with {topk + (steps - 1) * topk * topk + 1}")


def rounding_findings(flags: Flags) -> Iterator[Finding]:
    """Flags that change what the drafter sees or what is accepted."""
    algorithm = algorithm_of(flags)
    if algorithm is None:
        return
    if flags.get("quantization") and "speculative-draft-model-quantization" not in flags and algorithm not in WITHOUT_DRAFTER:
        yield finding("drafter_quantized", f"--quantization {flags['quantization']} counts for the drafter too", fatal=False)
    for name, plain in (("dtype", ("auto", "bfloat16")), ("kv-cache-dtype", ("auto", "bf16", "bfloat16"))):
        if flags.get(name, "auto") not in plain and algorithm not in WITHOUT_STATES:
            yield finding("states_rounded", f"--{name} {flags[name]}: not the arithmetic that the drafter was trained on", fatal=False)
    if "speculative-draft-window-size" in flags:
        window = flags["speculative-draft-window-size"]
        yield finding("window_cut", f"the drafter would see its last {window} tokens only", fatal=False)
    for name in ("speculative-accept-threshold-single", "speculative-accept-threshold-acc"):
        if float(flags.get(name, 1.0)) < 1:
            yield finding("thresholds_lowered", f"--{name} {flags[name]}: tokens are accepted that the target would not have drawn")
    if "speculative-token-map" in flags and algorithm == "EAGLE3":
        yield finding("flag_unread", "--speculative-token-map is ignored by EAGLE3, whose drafter brings its own", fatal=False)
