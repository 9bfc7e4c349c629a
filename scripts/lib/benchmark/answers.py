"""What is measured of one answer, and of one answer by both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.lib.speculation.verdict import Verdict


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer and what they took.

    `prefill_seconds` ends with the first piece that a server sent, mostly one token, `decode_seconds` with the last. `steps` and
    `drafts` are the verify steps and the drafts among the tokens that they wrote; None where nobody counted, as for the target
    alone. `histogram` counts steps by accepted drafts, `server_drafts` is the engine's own count of drafts, which goes on behind
    the end of an answer. `events` holds (seconds since the first token, tokens) of each later piece that a server sent.
    """

    ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    steps: int | None = None
    drafts: int | None = None
    histogram: tuple[int, ...] = ()
    server_drafts: int | None = None
    events: tuple[tuple[float, int], ...] = ()

    @property
    def seconds(self) -> float:
        """From the question to the last token."""
        return self.prefill_seconds + self.decode_seconds

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Answer":
        """From its JSON."""
        lists = {"ids": tuple(data["ids"]), "histogram": tuple(data["histogram"]), "events": tuple(map(tuple, data["events"]))}
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class Pair:
    """One turn of one prompt in one pass: by the target alone and with drafts, and whether both say the same."""

    id: str
    plain: Answer
    chain: Answer
    verdict: Verdict
    turn: int = 0
    prompt_tokens: int = 0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Pair":
        """From its JSON."""
        parts = {"plain": Answer.of(data["plain"]), "chain": Answer.of(data["chain"]), "verdict": Verdict(**data["verdict"])}
        return cls(**{**data, **parts})

    def json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """All pairs by pass, how long each way took where they overlapped, and what the engine has to say beside it.

    `walls` holds (baseline, with drafts) seconds of each pass, None where requests were timed one by one. `extra` goes into `cell.json`.
    """

    passes: Sequence[Sequence[Pair]]
    walls: Sequence[tuple[float, float]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
