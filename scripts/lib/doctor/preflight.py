"""What shows before a server starts."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.flags import algorithm_findings, eagle3, parsed, rounding_findings, step_findings
from scripts.lib.doctor.repairs import finding
from scripts.lib.doctor.training import Training, find_training, training_findings
from scripts.lib.doctor.vocabularies import shared_vocabulary
from scripts.lib.eagle3.foreign import engine_tensors
from scripts.lib.eagle3.judging import boundaries_of, judge
from scripts.lib.eagle3.target import EMBEDDING, TargetWeights
from scripts.lib.ground.errors import StageError

SAMPLED_ROWS = 256
SAME_LIKENESS = 0.9
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"  # makes SGLang report any accept length that one likes


def preflight(
    target: Path, drafter: Path | None, algorithm: str | None, flags: Sequence[str], training: Path | None = None
) -> list[Finding]:
    """Everything wrong with serving `target` and `drafter` (both HF folders) by `algorithm` with `flags`, as far as files show it.

    `algorithm` is what is meant (EAGLE3, NGRAM, STANDALONE, …; None without speculation), `flags` are all flags of the command line,
    the speculative ones included. `training` is the manifest of stage train; None looks for one in the drafter's folder.
    Raises StageError when a folder cannot be read at all.
    """
    given = parsed(flags)
    config = None if drafter is None else read_config(drafter)
    found = [*algorithm_findings(given, algorithm, config, drafter), *step_findings(given), *rounding_findings(given)]
    if float(os.environ.get(SIMULATED) or -1) > 0:
        found.append(finding("accept_length_simulated", f"{SIMULATED} is {os.environ[SIMULATED]}"))
    if drafter is not None and config is not None:
        if eagle3(config) or (algorithm or "").upper() == "EAGLE3":
            found += drafter_findings(target, drafter, config, given, training)
        elif (algorithm or "").upper() == "STANDALONE":
            found += shared_vocabulary(target, drafter)
    return found


def read_config(drafter: Path) -> dict[str, Any]:
    """The drafter's `config.json`. Raises StageError when there is none."""
    try:
        return dict(json.loads((drafter / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise StageError(f"{drafter}: no readable config.json ({error}); give a drafter's folder as SGLang loads it") from error


def drafter_findings(
    target: Path, drafter: Path, config: Mapping[str, Any], flags: Mapping[str, str], training: Path | None
) -> Iterator[Finding]:
    """What is wrong with an EAGLE-3 drafter for `target`, and between its training and what would be served."""
    whole = AutoConfig.from_pretrained(target)
    faults: dict[str, list[str]] = {}
    for fault in judge(drafter, whole).faults:
        faults.setdefault(fault.name, []).append(fault.text)
    for name, texts in faults.items():
        if not mended(name, config, flags):
            more = f", and {len(texts) - 1} more" if len(texts) > 1 else ""
            yield finding(name, texts[0] + more)
    trained = find_training(drafter, training)
    if trained is None:
        yield finding("training_unknown", f"{drafter} has no manifest.json of its training: layers and texts are not compared", fatal=False)
        yield from embedding_findings(target, drafter)
    yield from layer_findings(config, whole.get_text_config(), trained)
    if trained is not None:
        yield from training_findings(trained, target)


def embedding_findings(target: Path, drafter: Path) -> Iterator[Finding]:
    """An embedding in the drafter's files that is not the target's: a sign of another target of the same sizes."""
    own = engine_tensors(drafter).get(EMBEDDING)
    if own is None:
        return
    theirs = TargetWeights(target).embedding()
    rows = slice(None, None, max(1, len(own) // SAMPLED_ROWS))
    if own.shape == theirs.shape:
        likeness = torch.cosine_similarity(own[rows].float(), theirs[rows].float()).mean().item()
        if likeness < SAME_LIKENESS:
            told = f"{EMBEDDING} of the drafter is not the target's, which replaces it (mean cosine {likeness:.2f})"
            yield finding("embedding_differs", told, fatal=False)


def mended(name: str, config: Mapping[str, Any], flags: Mapping[str, str]) -> bool:
    """Whether `flags` make the fault `name` harmless."""
    if name == "dtype_differs":
        return flags.get("dtype") == "bfloat16"
    if name == "positions_short":
        return 0 < int(flags.get("context-length") or 0) <= config.get("max_position_embeddings", 0)
    return False


def layer_findings(config: Mapping[str, Any], text: PretrainedConfig, trained: Training | None) -> Iterator[Finding]:
    """Layers that are not those of the training; of a drafter whose training is unknown, layers that look like a slip by one."""
    ours = boundaries_of(config, text)
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if trained is not None and trained.boundaries is not None:
        wanted = trained.boundaries
        if ours != wanted:
            yield finding("layers_shifted", f"trained on the states before layers {wanted}, SGLang would give those before {ours}")
        if top is not None and list(top) != wanted:
            yield finding(
                "layers_shifted", f"trained on the states before layers {wanted}, vLLM would give those before {top}", fatal=False
            )
        return
    usual = boundaries_of({}, text)
    for shift in (-1, 1):
        if ours == [boundary + shift for boundary in usual]:
            told = f"SGLang would give the states before layers {ours}, each one {'above' if shift > 0 else 'below'} the usual {usual}"
            yield finding("layers_shifted", told, fatal=False)
    if top is not None and list(top) == (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        yield finding(
            "layers_shifted", f"the same ids {top} for SGLang, which takes outputs, and for vLLM, which takes boundaries", fatal=False
        )
