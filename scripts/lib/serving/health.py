"""What a running server says of itself, and whether that is the target."""

import json
import logging
import urllib.error
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import request

log = logging.getLogger(__name__)
# What this room was tried with, and where.
TRIED = {"0.5.17": "an H200", "0.5.23": "a CPU"}
# Words, digits, accents, spaces and an emoji: tokenizers of two families differ on some of them.
PROBE = "The 3 naïve  users wrote 12,345 words;\n\tprint('ÄÖ 你好 🙂')"


@dataclass(frozen=True)
class Served:
    """What a server runs: SGLang's `version` (empty if it is not SGLang), the model's path there, and its `model_type`."""

    version: str
    model_path: str
    model_type: str | None


def served(url: str) -> Served:
    """What the server at `url` runs; an OpenAI-compatible server that is not SGLang has an empty version.

    Raises StageError when it answers to neither question.
    """
    try:
        try:
            model, server = request(f"{url}/model_info"), request(f"{url}/server_info")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return Served("", request(f"{url}/v1/models")["data"][0]["id"], None)
        return Served(server["version"], model["model_path"], model.get("model_type"))
    except (OSError, ValueError, LookupError) as error:
        raise StageError(f"{url}: answers neither /model_info nor /v1/models ({error}); give the address of an SGLang server") from error


def warn_if_untried(url: str, version: str) -> None:
    """Say in the log when nobody has tried this room with the server found."""
    if version and version not in TRIED:
        tried = ", ".join(f"{known} on {where}" for known, where in TRIED.items())
        log.warning("%s: SGLang %s found; aerie was tried with %s: watch the first answers", url, version, tried)


def check_target(url: str, found: Served, target: Path) -> None:
    """Refuse a server that serves something other than the target in HF layout in `target`.

    The path decides where it is the same; a server elsewhere has another one, so its architecture and tokenizer are compared. Weights
    cannot be. A server that is not SGLang tells neither: the log says so. Raises StageError with both values.
    """
    if found.model_path == str(target.resolve()):
        return
    if not found.version:
        log.warning("%s: not SGLang, so nothing shows that its model %s is the target %s", url, found.model_path, target)
        return
    remedy = f"start it with --model-path {target.resolve()} or drop it from runtime.server.urls"
    wanted = json.loads((target / "config.json").read_text())["model_type"]
    if found.model_type != wanted:
        raise StageError(f"{url}: serves {found.model_path} of type {found.model_type}, the target's is {wanted}; {remedy}")
    same = same_tokenizer(url, ChatTemplate.load(target))
    if same is False:
        raise StageError(f"{url}: serves {found.model_path}, whose tokenizer gives other ids than the target's; {remedy}")
    known = "type and tokenizer are those" if same else "its type is that"
    log.warning("%s: serves %s; %s of the target %s, weights cannot be compared", url, found.model_path, known, target)


def same_tokenizer(url: str, template: ChatTemplate) -> bool | None:
    """Whether the server at `url` gives a text the ids that `template` gives it; None where it does not tokenise.

    SGLang 0.5.17 answers with status 500 where the tokenizer has no `model_max_length`: it cannot send what Hugging Face takes for it.
    """
    try:
        ids = request(f"{url}/v1/tokenize", {"prompt": PROBE, "add_special_tokens": False})["tokens"]
    except urllib.error.HTTPError:
        return None
    return bool(ids == template.tokenize(PROBE))
