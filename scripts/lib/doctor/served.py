"""What a running server shows."""

import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.chat.wire import wire_messages
from scripts.lib.doctor.findings import IDLE_ACCEPT_LENGTH, Finding
from scripts.lib.doctor.flags import STEPS, TOKENS, TOPK, parsed
from scripts.lib.doctor.repairs import finding
from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import request
from scripts.lib.serving.health import PROBE, same_tokenizer

CANARY_TOKENS = 48
# A dialogue that templates render in different ways: an earlier answer, spaces at an end, no system prompt.
DIALOGUE = (Message("user", "Hello "), Message("assistant", "Hi."), Message("user", PROBE))
COMPARED = (STEPS, TOPK, TOKENS)
# Versions whose list of backends with a CUDA graph of the drafter's extension, which ends every cycle, leaves these out
# (`_capture_cuda_graphs` of its eagle_worker_v2.py); 0.5.23 has the graph.
EAGER_EXTENSION = {"0.5.17": ("fa3",)}
BACKENDS = ("speculative_draft_attention_backend", "prefill_attention_backend", "attention_backend")  # the first that is set extends
GUESSES = ("NGRAM",)  # drafts from what was said before: short answers may repeat nothing


def after_start(url: str, target: Path, drafter: Path | None, algorithm: str | None, flags: Sequence[str] = ()) -> list[Finding]:
    """Where the server at `url` runs something else than `algorithm` with `drafter` and `flags`, or another tokenizer or template.

    Raises StageError when it does not answer.
    """
    try:
        server = request(f"{url}/server_info")
        return [*settings_findings(server, drafter, algorithm, flags), *text_findings(url, ChatTemplate.load(target))]
    except (OSError, ValueError) as error:
        raise StageError(f"{url}: does not say what it runs ({error}); give the address of an SGLang server") from error


def settings_findings(server: Mapping[str, Any], drafter: Path | None, algorithm: str | None, flags: Sequence[str]) -> Iterator[Finding]:
    """Where the server's own report, `/server_info`, is not what was meant."""
    runs = server.get("speculative_algorithm") or None
    if (runs or "").upper() != (algorithm or "").upper():
        name = "no_speculation" if runs is None else "server_differs"
        yield finding(name, f"the server reports speculative_algorithm {runs}, {algorithm} is meant")
        return
    path = server.get("speculative_draft_model_path")
    if drafter is not None and path is not None and Path(path).resolve() != drafter.resolve():
        yield finding("drafter_differs", f"the server drafts with {path}, {drafter} is meant")
    asked = parsed(flags)
    for name in COMPARED if algorithm else ():
        runs, wanted = server.get(name.replace("-", "_")), asked.get(name)
        if wanted is not None and runs is not None and int(wanted) != int(runs):
            yield finding("steps_rewritten", f"--{name} is {wanted}, the server runs {runs}")
    yield from speed_findings(server)


def speed_findings(server: Mapping[str, Any]) -> Iterator[Finding]:
    """What makes the drafts of a server that reports `server` slower than they need be."""
    backend = next((server[name] for name in BACKENDS if server.get(name)), None)
    drafts = (server.get("speculative_algorithm") or "").upper() in ("EAGLE", "EAGLE3") and not server.get("disable_cuda_graph")
    if drafts and backend in EAGER_EXTENSION.get(str(server.get("version")), ()):
        evidence = f"SGLang {server['version']} has no CUDA graph of the drafter's extension with attention backend {backend}"
        yield finding("extension_eager", evidence, fatal=False)


def text_findings(url: str, template: ChatTemplate) -> Iterator[Finding]:
    """A tokenizer or chat template at `url` that is not the target's."""
    same = same_tokenizer(url, template)
    if same is None:
        yield finding("server_silent", f"{url} does not tokenise: its tokenizer and chat template are not compared", fatal=False)
        return
    if not same:
        yield finding("tokenizer_differs", f"{url} gives a text other ids than the target's tokenizer does")
        return
    body = {"messages": wire_messages(DIALOGUE, as_mapping=False)}
    try:
        rendered = request(f"{url}/v1/tokenize", body)["tokens"]
    except urllib.error.HTTPError:
        yield finding("server_silent", f"{url} does not tokenise messages: its chat template is not compared", fatal=False)
        return
    if rendered != template.prompt_ids(DIALOGUE):
        found, wanted = template.decode(rendered), template.decode(template.prompt_ids(DIALOGUE))
        yield finding("template_differs", f"{url} renders a conversation as {shown(found, wanted)}, the target as {shown(wanted, found)}")


def shown(text: str, other: str) -> str:
    """`text` from a little before the place where it leaves `other`, shortened."""
    place = next((place for place, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), min(len(text), len(other)))
    return repr(text[max(0, place - 10) : place + 40])


def canary(url: str, prompts: Sequence[Sequence[int]], ceiling: int) -> list[Finding]:
    """Ask the server at `url` a few `prompts` (token ids, as the template makes them): drafts must be accepted, none beyond `ceiling`.

    Raises StageError when it does not answer.
    """
    sampling = {"temperature": 0.0, "max_new_tokens": CANARY_TOKENS}
    try:
        asked = [request(f"{url}/generate", {"input_ids": list(ids), "sampling_params": sampling})["meta_info"] for ids in prompts]
        guesses = (request(f"{url}/server_info").get("speculative_algorithm") or "").upper() in GUESSES
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StageError(f"{url}: the canary got no answer ({error}); look into the server's log") from error
    steps = sum(meta.get("spec_verify_ct") or 0 for meta in asked)
    written = sum(max(meta["completion_tokens"] - 1, 0) for meta in asked)  # the first token of each was prefill's
    if not steps:
        return [finding("no_speculation", f"{len(asked)} answers of {written} tokens without a verify step", fatal=bool(written))]
    tau = written / steps
    told = f"accept length {tau:.2f} over {len(asked)} prompts, {written} tokens in {steps} verify steps"
    if tau < IDLE_ACCEPT_LENGTH:
        return [finding("accept_near_one", told, fatal=not guesses)]
    return [finding("accept_impossible", f"{told}, the ceiling is {ceiling}")] if tau > ceiling else []


def ceiling_of(url: str) -> int:
    """The highest accept length that the server at `url` can have, by its own report: steps and the bonus token, or a tree's tokens."""
    server = request(f"{url}/server_info")
    steps, tokens = (int(server.get(name.replace("-", "_")) or 0) for name in (STEPS, TOKENS))
    return tokens if server.get("speculative_algorithm") in GUESSES else steps + 1
