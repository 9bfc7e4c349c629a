"""Whether a server with drafts says what the target says, judged by the server of the target alone.

Both servers compute in other shapes than each other, so two tokens that lie within the noise of the arithmetic may swap. Where two answers
part, the target is asked once more: what it thinks of both tokens after what they have in common. Log probabilities differ by what logits
differ by; the size of a logit they do not tell, and the noise in bfloat16 grows with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.asking import request
from scripts.lib.speculation.verdict import Verdict, first_difference, judged, noise

# Best logits of language models lie between 16 and 32 in most places (SmolLM2-135M: 5 to 41).
USUAL_LOGIT = 24.0


def judge(url: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], dtype: str) -> Verdict:
    """Judge the answer `other` to `prompt` by the target's own answer `plain` and its server at `url`.

    The gap is that of the worse of the two tokens to the best of all: either may be the target's choice when it is asked again.
    """
    index = first_difference(plain, other)
    if index is None:
        return Verdict("identical")
    if index >= min(len(plain), len(other)):
        return Verdict("different", index)
    best, chances = next_token(url, [*prompt, *plain[:index]], [plain[index], other[index]])
    return judged(index, best - min(chances), noise(dtype, USUAL_LOGIT))


def next_token(url: str, ids: Sequence[int], candidates: Sequence[int]) -> tuple[float, list[float]]:
    """Log probabilities of the best token after `ids`, and of `candidates`. StageError when the server does not tell."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": list(candidates),
    }
    try:
        meta: Mapping[str, Any] = request(f"{url}/generate", body)["meta_info"]
        named = {token: chance for chance, token, _ in meta["output_token_ids_logprobs"][0]}
        best = max(chance for chance, _, _ in meta["output_top_logprobs"][0])
        return best, [named[token] for token in candidates]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StageError(f"{url}: no log probabilities of the next token ({type(error).__name__} {error})") from error
