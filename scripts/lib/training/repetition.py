"""Rows in which the target repeats itself: every drafter looks good on them."""

from collections.abc import Sequence

LONGEST_PERIOD = 32
TAIL = 24
REPEATS = 3


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether `tokens` end in a phrase of up to 32 tokens that comes at least three times in a row, over 24 tokens or more."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(TAIL, REPEATS * period)
        if len(tokens) >= length and all(tokens[-place] == tokens[-place - period] for place in range(1, length - period + 1)):
            return True
    return False
