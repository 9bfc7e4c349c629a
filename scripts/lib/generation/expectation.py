"""How long an answer is likely to be: what decides which request goes first."""

from collections import defaultdict
from dataclasses import dataclass, field

from scripts.lib.generation.conversation import Conversation

BYTES_PER_TOKEN = 4
ENOUGH = 8  # answers of one kind before their mean counts


@dataclass
class Expectation:
    """Mean length of the answers so far to turns of one kind.

    A kind is a power of two of the length of the answer that is replaced, or else of the prompt.
    """

    tokens: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    turns: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))

    def of(self, conversation: Conversation) -> float:
        """Expected tokens of all turns that `conversation` still lacks."""
        return sum(self._turn(conversation, place) for place in conversation.places[conversation.turn :])

    def learn(self, conversation: Conversation, tokens: int) -> None:
        """The next turn of `conversation` took `tokens`."""
        kind, _ = self.kind(conversation, conversation.places[conversation.turn])
        self.tokens[kind] += tokens
        self.turns[kind] += 1

    def _turn(self, conversation: Conversation, place: int) -> float:
        kind, guess = self.kind(conversation, place)
        return self.tokens[kind] / self.turns[kind] if self.turns.get(kind, 0) >= ENOUGH else guess

    @staticmethod
    def kind(conversation: Conversation, place: int) -> tuple[tuple[str, int], int]:
        """The kind of the turn at message `place`, and a first guess of its tokens."""
        old = conversation.messages[place].content if place < len(conversation.messages) else None
        if old:
            guess = len(old) // BYTES_PER_TOKEN
            return ("old", guess.bit_length()), guess
        return ("prompt", conversation.prompt_tokens.bit_length()), conversation.prompt_tokens


def length_class(conversation: Conversation, place: int) -> int:
    """The power of two below which the first guess of the turn at message `place` lies."""
    return Expectation.kind(conversation, place)[1].bit_length()
