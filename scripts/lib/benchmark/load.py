"""A closed loop against one server: always so many conversations under way, each turn asked as soon as the one before is answered."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import orjson
import uvloop

from scripts.lib.benchmark.answers import Answer
from scripts.lib.benchmark.prompts import Prompt
from scripts.lib.benchmark.streaming import Line, Streamed
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError

DIGITS = 7  # of seconds


@dataclass(frozen=True)
class Turn:
    """One answered turn."""

    prompt_ids: tuple[int, ...]
    answer: Answer


@dataclass(frozen=True)
class Load:
    """How a server is asked: greedy answers of up to `max_tokens`, `concurrency` conversations at once, `turns` being first or all."""

    template: ChatTemplate
    max_tokens: int
    concurrency: int
    turns: str

    def run(self, url: str, prompts: Sequence[Prompt]) -> tuple[float, list[list[Turn]]]:
        """Seconds until all `prompts` were answered, and their turns in the same order. StageError at the first answer that fails."""
        return uvloop.run(self._run(url, prompts))

    async def _run(self, url: str, prompts: Sequence[Prompt]) -> tuple[float, list[list[Turn]]]:
        talks: list[list[tuple[list[int], Streamed]]] = [[] for _ in prompts]
        waiting = iter(zip(prompts, talks, strict=True))
        lines = [Line(url) for _ in range(min(self.concurrency, len(prompts)))]
        try:
            await asyncio.gather(*(line.connect() for line in lines))
            begin = perf_counter()
            await asyncio.gather(*(self._talk(line, waiting) for line in lines))
        except OSError as error:
            raise StageError(f"{url}: no answer ({error}); finished blocks are kept: start again") from error
        else:
            seconds = perf_counter() - begin
        finally:
            for line in lines:
                line.close()
        return seconds, [[Turn(tuple(ids), read_answer(url, streamed)) for ids, streamed in talk] for talk in talks]

    async def _talk(self, line: Line, waiting: Iterator[tuple[Prompt, list[tuple[list[int], Streamed]]]]) -> None:
        """Answer one waiting conversation after the other."""
        for prompt, talk in waiting:
            answers: list[list[int]] = []
            for turn in prompt.turns(self.turns):
                if turn:
                    host = line.address.host
                    answers.append(output_ids(host, written(host, talk[-1][1])))
                ids = prompt.ids_after(answers, self.template)
                talk.append((ids, await line.post("/generate", self.body(ids))))

    def body(self, ids: Sequence[int]) -> bytes:
        """The request for one answer."""
        sampling = {"max_new_tokens": self.max_tokens, "temperature": 0.0, "stop_token_ids": sorted(self.template.eos_ids)}
        return orjson.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True})


def output_ids(url: str, pieces: Iterable[tuple[float, dict[str, Any]]]) -> list[int]:
    """The ids of the answer that came in `pieces`. StageError when the server sent none, or other than it counted."""
    ids: list[int] = []
    count = 0
    for _, event in pieces:
        count = event["meta_info"]["completion_tokens"]
        ids = event["output_ids"] if len(event["output_ids"]) == count else ids + event["output_ids"]
    if not ids or len(ids) != count:
        raise StageError(f"{url}: sent {len(ids)} tokens of an answer of {count}; this SGLang streams in a way that is not known here")
    return ids


def written(url: str, streamed: Streamed) -> Iterator[tuple[float, dict[str, Any]]]:
    """Moment and content of each piece of an answer. StageError when it is none, or was broken off."""
    events = [(moment, event) for moment, event in streamed.events() if event != b"[DONE]"]
    try:
        if streamed.status != 200:
            raise ValueError(f"status {streamed.status}")
        pieces = [(moment, orjson.loads(event)) for moment, event in events]
        finish = pieces[-1][1]["meta_info"]["finish_reason"]["type"]
        if finish not in ("stop", "length"):
            raise ValueError(f"the answer ended as {finish}")
    except (ValueError, LookupError, TypeError) as error:
        said = (events[-1][1] if events else streamed.body())[:300].decode(errors="replace")
        raise StageError(f"{url}: no answer, {error}: {said}; finished blocks are kept") from error
    return ((moment, piece) for moment, piece in pieces if "output_ids" in piece)


def read_answer(url: str, streamed: Streamed) -> Answer:
    """What is kept of an answer."""
    pieces = list(written(url, streamed))
    ids = output_ids(url, pieces)
    counts = [(moment, piece["meta_info"]["completion_tokens"]) for moment, piece in pieces]
    counts = [(moment, count) for moment, count in counts if count > 0]
    first, last = counts[0][0], counts[-1][0]
    events = [(round(moment - first, DIGITS), count - before) for (_, before), (moment, count) in pairwise(counts) if count > before]
    return Answer(
        tuple(ids),
        round(first - streamed.begin, DIGITS),
        round(last - first, DIGITS),
        events=tuple(events),
        **accepted(pieces[-1][1]["meta_info"], len(ids)),
    )


def accepted(meta: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Verify steps of an answer of `tokens` tokens, and the drafts among these.

    Prefill's token came without a step, and one token of each step is the target's own. A server without speculation reports no steps;
    neither does one whose answer ended with its first token.
    """
    steps = meta.get("spec_verify_ct")
    if steps is None:
        return {}
    counts = meta.get("spec_correct_drafts_histogram", meta.get("spec_accept_histogram")) or ()
    return {
        "steps": steps,
        "drafts": tokens - 1 - steps,
        "histogram": tuple(counts),
        "server_drafts": meta.get("spec_num_correct_drafts"),
    }
