"""Stage generate: which turns are written, what is rejected, and that a killed run ends with the same bytes."""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest
import torch

from scripts.lib.chat.messages import Message, from_rows
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.engines.protocol import Completion, Request
from scripts.lib.generation import responses
from scripts.lib.generation.build import generate
from scripts.lib.generation.conversation import Conversation, places, split_reasoning
from scripts.lib.generation.outcome import Outcome
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from tests.stage_inputs import data_files, finish, generate_job, kill_when, message, prepared_row, publish_prepared, publish_target, user
from tests.test_generate_journal import journal_with

EOS = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


class ScriptedEngine:
    """Answers with what `script` says for the text of the key's turn; counts the requests."""

    def __init__(self, script: Callable[[Request], str]) -> None:
        self.script = script
        self.asked: list[str] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        self.asked.append(request.key)
        ids = [byte_ids(self.script(request)), [EOS]]
        output = [token for part in ids for token in part]
        if len(output) > request.max_tokens:
            return Completion(request.key, tuple(output[: request.max_tokens]), "length")
        return Completion(request.key, tuple(output), "stop")

    def lane(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def beside(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def states(self, rows: Any, boundaries: Any) -> Any:
        raise NotImplementedError


def byte_ids(text: str) -> list[int]:
    from tests.tiny import tiny_tokenizer

    return list(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Request], str]], ScriptedEngine]:
    """Puts a scripted engine in the place of the real one."""

    def use(script: Callable[[Request], str]) -> ScriptedEngine:
        engine = ScriptedEngine(script)
        monkeypatch.setattr(responses, "open_engine", lambda *_: engine)
        return engine

    return use


def result(job: Job) -> tuple[pl.DataFrame, pl.DataFrame, Any]:
    """Run the stage; its responses, its failed turns, its manifest."""
    run(job, generate)
    table, failed = (pl.read_parquet(job.output / name) for name in ("responses-00000.parquet", "failed.parquet"))
    return table, failed, read_manifest(job.output / "manifest.json", "generate")


DIALOGUE = [
    *user("one"),
    message("assistant", "old 1"),
    *user("two"),
    message("assistant", None),
    *user("three"),
    message("assistant", "old 3"),
]


@pytest.mark.parametrize(
    ("messages", "turns", "wanted"),
    [
        (DIALOGUE, "first", (1,)),
        (DIALOGUE, 2, (1, 3)),
        (DIALOGUE, 4, (1, 3, 5)),
        (DIALOGUE, "all", (1, 3, 5)),
        (DIALOGUE, "last", (3, 5)),
        (user("one"), "first", (1,)),
        ([*DIALOGUE[:2], *user("two")], "all", (1, 3)),
        ([*DIALOGUE[:2], *user("two")], "last", (3,)),
        ([message("assistant", "hello"), *user("one")], "all", (2,)),
        ([*user("one"), message("assistant", "calls"), message("tool", "4")], "all", (1, 3)),
        ([message("system", "be kind")], "all", ()),
    ],
)
def test_the_turns_to_write(messages: list[dict[str, Any]], turns: str | int, wanted: tuple[int, ...]) -> None:
    assert places(from_rows(messages), turns) == wanted


def test_later_turns_see_the_new_answers_and_keep_what_users_and_tools_said() -> None:
    rows = [*user("one"), message("assistant", "old"), message("tool", "4"), message("assistant", "old"), *user("two")]
    conversation = Conversation.of(prepared_row("c", rows), "all")
    assert conversation.history() == from_rows(rows[:1])
    conversation.answers.append(Message("assistant", "new 1"))
    assert [(turn.role, turn.content) for turn in conversation.history()] == [("user", "one"), ("assistant", "new 1"), ("tool", "4")]
    conversation.answers.append(Message("assistant", "new 2"))
    assert [turn.content for turn in conversation.history()] == ["one", "new 1", "4", "new 2", "two"]


@pytest.mark.parametrize(("turns", "wanted"), [("first", 1), (2, 2), ("all", 3), ("last", 2)])
def test_all_turns_are_answered_round_by_round(target: Path, tmp_path: Path, scripted: Any, turns: str | int, wanted: int) -> None:
    engine = scripted(lambda request: f"a{request.key.split('/')[2]}")
    job = generate_job(
        tmp_path, publish_prepared(tmp_path / "p", [prepared_row("b", DIALOGUE), prepared_row("a", DIALOGUE)]), target, turns=turns
    )
    table, failed, manifest = result(job)
    assert table.select("id", "turn").rows() == [(name, turn) for name in "ab" for turn in range(wanted)]
    assert failed.height == 0 and manifest.counts.rows_in == manifest.counts.rows_out == 2 * wanted
    assert len(engine.asked) == len(set(engine.asked)) == 2 * wanted
    template = ChatTemplate.load(target.parent)
    last = template.decode(table["prompt_ids"].to_list()[-1])
    assert ("old 1" in last, "a0" in last) == {"first": (False, False), 2: (False, True), "all": (False, True), "last": (True, True)}[turns]
    assert table["prompt_ids"].to_list()[0][-1] == template.prompt_ids([Message("user", "x")])[-1]


def test_output_ids_are_the_engines_own_and_the_text_leaves_the_end_out(target: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(lambda _: "yes")
    table, _, _ = result(generate_job(tmp_path, publish_prepared(tmp_path / "p", [prepared_row("a", user("x"))]), target))
    assert table["output_ids"].to_list() == [[*byte_ids("yes"), EOS]] and table["text"].to_list() == ["yes"]
    assert table["finish_reason"].to_list() == ["stop"] and table["reasoning"].to_list() == [None]


ANSWERS = {"full": "Full.", "cut": "much longer than twelve tokens", "none": ""}


@pytest.mark.parametrize("truncated", ["keep", "drop"])
def test_cut_and_empty_answers_are_counted(target: Path, tmp_path: Path, scripted: Any, truncated: str) -> None:
    """A run with 35 % of its answers cut once reported none (speculators pull 835)."""
    scripted(lambda request: ANSWERS[request.key.split("/")[1]])
    rows = [prepared_row(name, [*user("q"), message("assistant", "x"), *user("r")]) for name in ANSWERS]
    table, failed, manifest = result(
        generate_job(tmp_path, publish_prepared(tmp_path / "p", rows), target, turns="all", truncated=truncated)
    )
    kept = {"full": 2, "cut": 2} if truncated == "keep" else {"full": 2}
    assert dict(table["id"].value_counts().rows()) == kept
    assert manifest.facts["finish_reasons"] == ({"length": 2, "stop": 2} if truncated == "keep" else {"stop": 2})
    rejected = {"empty_answer": 1, "history_failed": 1} if truncated == "keep" else {"empty_answer": 1, "history_failed": 2, "truncated": 1}
    assert manifest.counts.rejected == rejected and manifest.counts.rows_in == 6
    assert failed.filter(pl.col("id") == "none").select("turn", "reason").rows() == [(0, "empty_answer"), (1, "history_failed")]
    assert all(EOS not in ids for ids in table.filter(pl.col("finish_reason") == "length")["output_ids"].to_list())


def test_an_empty_sampled_answer_is_tried_once_more(target: Path, tmp_path: Path, scripted: Any) -> None:
    def script(request: Request) -> str:
        name, attempt = request.key.split("/")[1], request.key.split("/")[3]
        return "" if name == "never" or (name == "later" and attempt == "1") else "ok"

    engine = scripted(script)
    rows = [prepared_row(name, user("q")) for name in ("now", "later", "never")]
    table, failed, manifest = result(generate_job(tmp_path, publish_prepared(tmp_path / "p", rows), target, temperature=0.7))
    assert table.select("id", "attempts").rows() == [("later", 2), ("now", 1)]
    assert failed.rows() == [("never", 0, "empty_answer", "2 attempts")] and manifest.facts["retried"] == 1
    assert len(engine.asked) == 5


def test_rows_that_cannot_be_asked_are_rejected_by_reason(target: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(lambda _: "ok")
    rows = [
        prepared_row("fine", user("q")),
        prepared_row("long", user("q" * 600)),
        prepared_row("nobody", [message("system", "s")]),
        prepared_row("unfit", [message("assistant", None), *user("q")]),
    ]
    table, failed, manifest = result(generate_job(tmp_path, publish_prepared(tmp_path / "p", rows), target))
    assert table["id"].to_list() == ["fine"] and manifest.counts.rows_in == 4
    assert failed.select("id", "reason").rows() == [("long", "context_full"), ("nobody", "no_user_turn"), ("unfit", "template")]


def test_conversations_too_long_for_the_target_are_told_from_a_server_that_fails() -> None:
    """Two dialogues of forty turns made a fifteenth of a data set's turns fail: the remedy is not the server's."""
    outcome = Outcome(40, {"truncated": 1.0, "empty": 1.0, "failed": 0.1})
    long = cast(Conversation, SimpleNamespace(id="long", turn=12, places=range(30)))
    with pytest.raises(
        StageError, match=r"45\.00% of 40 turns are failed, .*'context_full': 1, 'history_failed': 17.*lower generate\.max_tokens"
    ):
        outcome.reject(long, "context_full", "2050 prompt tokens, the target takes 2048")
    broken = Outcome(40, {"truncated": 1.0, "empty": 1.0, "failed": 0.1})
    with pytest.raises(StageError, match="finished answers are kept: mend the cause, or raise"):
        broken.reject(long, "server_lost", "")


def test_answers_end_where_the_targets_context_ends(target: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(lambda _: "x" * 90)
    room = 512 - len(ChatTemplate.load(target.parent).prompt_ids([Message("user", "q" * 440)]))
    job = generate_job(
        tmp_path, publish_prepared(tmp_path / "p", [prepared_row("a", user("q" * 440))]), target, max_tokens={"short": 96, "long": 9}
    )
    table, _, _ = result(job)
    assert 0 < room < 90 and len(table["output_ids"].to_list()[0]) == room


def test_no_answer_at_all_is_an_error(target: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(lambda _: "")
    job = generate_job(tmp_path, publish_prepared(tmp_path / "p", [prepared_row("a", user("q"))]), target)
    with pytest.raises(StageError, match=r"none of 1 turns got an answer \(\{'empty_answer': 1\}\); look at"):
        run(job, generate)


def test_repeated_ids_and_unknown_choices_are_errors(target: Path, tmp_path: Path) -> None:
    twice = publish_prepared(tmp_path / "p", [prepared_row("a", user("q")), prepared_row("a", user("r"))])
    with pytest.raises(StageError, match="1 row ids come more than once, first a; rebuild stage prepare"):
        run(generate_job(tmp_path, twice, target), generate)
    with pytest.raises(StageError, match=r"generate\.turns: 'every' is none of first, all, last"):
        run(generate_job(tmp_path, twice, target, turns="every"), generate)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\ntwo plus two\n</think>\n\n4", ("two plus two", "4")),
        ("two plus two</think>4", ("two plus two", "4")),
        ("<think></think>4", ("", "4")),
        ("4", (None, "4")),
    ],
)
def test_reasoning_is_kept_apart_and_an_empty_one_is_not_a_missing_one(text: str, wanted: tuple[str | None, str]) -> None:
    """`a or b` once replaced an empty reasoning, and servers without the field crashed the run (speculators pull 499)."""
    assert split_reasoning(text) == wanted


def many_rows(count: int = 14) -> list[dict[str, Any]]:
    return [prepared_row(f"p{number:02d}", user("word " * (number * 5 % 9) + "x", "and then")) for number in range(count)]


def test_a_resumed_run_asks_for_every_missing_row_once_and_for_nothing_when_all_is_there(
    target: Path, tmp_path: Path, scripted: Any
) -> None:
    """A resume that counts lines, or looks for rows by their place, repeats some and forgets others (DeepSpec issue 35)."""
    engine = scripted(lambda request: f"a {request.key}"[:9])
    prepared = publish_prepared(tmp_path / "p", many_rows())
    job = generate_job(tmp_path, prepared, target)
    first = tmp_path / "first"
    first.mkdir()
    generate(job, first)
    everything = list(engine.asked)
    generate(job, first)
    assert engine.asked == everything and len(everything) == len(set(everything)) == 14
    journal = first / "partial" / "answers.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:8]))
    generate(job, first)
    assert sorted(engine.asked[14:]) == sorted(everything[8:])
    table = pl.read_parquet(first / "responses-00000.parquet")
    assert table["id"].to_list() == [f"p{number:02d}" for number in range(14)]
    assert [json.loads(line)["record"]["id"] for line in journal.read_text().splitlines()] == [key.split("/")[1] for key in everything]


def test_a_journal_of_other_turns_is_refused(target: Path, tmp_path: Path, scripted: Any) -> None:
    scripted(lambda _: "ok")
    folder = tmp_path / "folder"
    folder.mkdir()
    journal_with(folder / "partial" / "answers.jsonl", "0/0")
    job = generate_job(tmp_path, publish_prepared(tmp_path / "p", many_rows()), target)
    with pytest.raises(StageError, match="batch 0/0 holds other turns than it should; delete the file"):
        generate(job, folder)


def test_killed_runs_end_with_the_bytes_of_an_uninterrupted_one(target: Path, tmp_path: Path) -> None:
    rows = publish_prepared(tmp_path / "p", many_rows(24))
    options: dict[str, Any] = {"temperature": 0.9, "max_tokens": {"short": 30, "long": 9}, "batch": 3}
    whole = generate_job(tmp_path / "whole", rows, target, **options)
    run(whole, generate)
    killed = generate_job(tmp_path / "killed", rows, target, **options)
    moments = random.Random(4)
    for lines in (1, 4, 13):
        kill_when(killed, lines, "partial/answers.jsonl", moments.uniform(0, 0.2), tmp_path / "log")
        assert not killed.output.exists()
    code, log = finish(killed, tmp_path / "log")
    assert code == 0 and "resume at" in log, log
    assert data_files(killed.output) == data_files(whole.output)
