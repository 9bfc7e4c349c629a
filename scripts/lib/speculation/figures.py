"""Accept length and what belongs to it; each figure has this one definition."""

from collections import Counter
from collections.abc import Iterable, Sequence


def accept_length(accepted: Sequence[int]) -> float | None:
    """Tokens a verify step writes on average, its bonus token included: 1 + Σ accepted / verify steps over all requests.

    The token of the prefill belongs to no verify step. None when there was no verify step: a missing figure is never 1.0.
    """
    return 1 + sum(accepted) / len(accepted) if accepted else None


def histogram(accepted: Iterable[int], draft_steps: int) -> list[int]:
    """Verify steps that accepted 0, 1, … `draft_steps` drafts."""
    counts = Counter(accepted)
    return [counts[drafts] for drafts in range(draft_steps + 1)]


def tokens_per_second(tokens: int, requests: int, seconds: float) -> float | None:
    """Decoding speed: `tokens` of `requests` answers without the first of each, which prefill wrote, over the decode `seconds`.

    None when no answer was longer than its first token. Tokens are counted, never steps: a verify step writes several.
    """
    return (tokens - requests) / seconds if tokens > requests else None
