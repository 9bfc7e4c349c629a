"""The assistant turns of conversations as ids: as the target's server reported them, or rendered from a native dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import polars as pl

from scripts.lib.chat.messages import from_rows
from scripts.lib.chat.rows import JoinedRow, Lost, Span, Turn, join
from scripts.lib.chat.structure import NoTurn, Structure, TextTurn
from scripts.lib.chat.template import ChatTemplate

CHARACTERS_AT_ONCE = 4_000_000  # rendered text tokenised at one time: bounds what the tokenizer holds of it


@dataclass
class Conversation:
    """What the turns of one conversation gave: token rows before they are cut, turns in none, and answers without their thoughts."""

    id: str
    group: str
    prompt_hash: str
    rows: list[JoinedRow] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    thoughts_left_out: int = 0


def served(frame: pl.DataFrame) -> Iterator[Conversation]:
    """The conversations of response rows, ordered by id and turn. The ids are the engine's own: nothing is rendered again."""
    prompts, outputs = arrays(frame["prompt_ids"]), arrays(frame["output_ids"])
    turns = [Turn(number, *ids) for number, *ids in zip(frame["turn"], prompts, outputs, strict=True)]
    starts = frame["id"].is_first_distinct().arg_true().to_list()
    for start, end in pairwise([*starts, frame.height]):
        id_, group, prompt_hash = frame.select("id", "group", "prompt_hash").row(start)
        yield Conversation(id_, group, prompt_hash, list(join(turns[start:end])))


def arrays(lists: pl.Series) -> list[np.ndarray]:
    """int64 [N] per list of `lists`, without a Python object per number."""
    ends = np.cumsum(lists.list.len().to_numpy())
    flat = lists.explode(empty_as_null=False).to_numpy()
    return np.split(flat, ends[:-1]) if len(ends) else []


@dataclass(frozen=True)
class Native:
    """Reads prepared rows whose answers are the target's own."""

    template: ChatTemplate

    def conversations(self, frame: pl.DataFrame) -> Iterator[Conversation]:
        """The conversations of prepared rows: each rendered, then tokenised together with its neighbours."""
        batch: list[tuple[Conversation, list[list[TextTurn]]]] = []
        size = 0
        for row in frame.select("id", "group", "prompt_hash", "messages", "tools").iter_rows(named=True):
            conversation = Conversation(row["id"], row["group"], row["prompt_hash"])
            messages = from_rows(row["messages"])
            turns = self.structure.turns(messages, row["tools"])
            if not self.template.takes_reasoning:
                conversation.thoughts_left_out = sum(message.reasoning_content is not None for message in messages)
            conversation.lost += [Lost(conversation.id, turn.number, turn.reason, turn.value) for turn in turns if isinstance(turn, NoTurn)]
            if not turns:
                conversation.lost.append(Lost(conversation.id, 0, "no_assistant_turn", f"{len(row['messages'])} messages"))
            rows = join_texts([turn for turn in turns if isinstance(turn, TextTurn)])
            batch.append((conversation, rows))
            size += sum(len(turns[-1].prompt) + len(turns[-1].output) for turns in rows)
            if size > CHARACTERS_AT_ONCE:
                yield from self.tokenised(batch)
                batch, size = [], 0
        yield from self.tokenised(batch)

    def tokenised(self, batch: Sequence[tuple[Conversation, list[list[TextTurn]]]]) -> Iterator[Conversation]:
        """The conversations of `batch` with the token rows of their text rows."""
        if self.adds_to_pieces:
            for conversation, rows in batch:
                self.add_whole(conversation, rows)
                yield conversation
            return
        texts = [text for _, rows in batch for turns in rows for text in pieces(turns)]
        ids = iter(self.template.tokenize_all(texts))
        for conversation, rows in batch:
            conversation.rows += [joined(turns, [next(ids) for _ in range(2 * len(turns))]) for turns in rows]
            yield conversation

    def add_whole(self, conversation: Conversation, rows: Sequence[Sequence[TextTurn]]) -> None:
        """Add rows whose turns are tokenised with all that is before them, and must begin with the tokens of their prompt."""
        turns = []
        for turn in (turn for row in rows for turn in row):
            prompt, whole = self.template.tokenize_all([turn.prompt, turn.prompt + turn.output])
            if np.array_equal(whole[: len(prompt)], prompt):
                turns.append(Turn(turn.number, prompt, whole[len(prompt) :]))
            else:
                conversation.lost.append(Lost(conversation.id, turn.number, "prompt_not_prefix", f"tokens of turn {turn.number}"))
        conversation.rows += join(turns)

    @cached_property
    def structure(self) -> Structure:
        """Finds the answers in what the template renders."""
        return Structure(self.template)

    @cached_property
    def adds_to_pieces(self) -> bool:
        """Whether the tokenizer writes something before a text, as SentencePiece writes a space, or eats spaces after a control token.

        Else a text after a control token, tokenised by itself, gives the ids that it has in its place.
        """
        end = self.template.decode([min(self.template.eos_ids)])
        texts = ["x y", "\n x"]
        alone, behind = self.template.tokenize_all(texts), self.template.tokenize_all([end + text for text in texts])
        return not all(np.array_equal(one, other[1:]) for one, other in zip(alone, behind, strict=True))


def join_texts(turns: Sequence[TextTurn]) -> list[list[TextTurn]]:
    """`turns` as rows: a turn whose prompt does not extend the row so far starts a new one."""
    rows: list[list[TextTurn]] = []
    for turn in turns:
        if rows and turn.prompt.startswith(rows[-1][-1].prompt + rows[-1][-1].output):
            rows[-1].append(turn)
        else:
            rows.append([turn])
    return rows


def pieces(turns: Sequence[TextTurn]) -> Iterator[str]:
    """The text of a row in pieces: before the first answer, the answer, up to the next answer, that answer, and so on."""
    done = 0
    for turn in turns:
        yield turn.prompt[done:]
        yield turn.output
        done = len(turn.prompt) + len(turn.output)


def joined(turns: Sequence[TextTurn], ids: Sequence[np.ndarray]) -> JoinedRow:
    """The token row of the `pieces` of `turns`, whose ids are `ids`, int64 [N] each."""
    ends = np.cumsum([len(piece) for piece in ids]).tolist()
    spans = [Span(turn.number, *ends[2 * place : 2 * place + 2]) for place, turn in enumerate(turns)]
    return JoinedRow(turns[0].number, np.concatenate(ids), spans)
