"""Stage generate with the engine `sglang`: what is asked, what is kept, what is tried again, and when it stops."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.generation.build import generate
from scripts.lib.generation.dialects import reasoning_of
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import read_manifest
from scripts.lib.ground.stage import Job, run
from tests.stage_inputs import REQUESTS, RUNTIME, generate_job, message, prepared_row, publish_prepared, publish_target, user
from tests.stub_server import EOS, Say, Stub, chat, from_prompt, native, prompt_text, stub_server, text_ids

DIALOGUE = [*user("one"), message("assistant", "old 1"), *user("two"), message("assistant", "old 2"), *user("three")]
CHAT_ONLY = ("/v1/chat/completions",)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@pytest.fixture(autouse=True)
def quick_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.generation.policy.SLEEP_SECONDS", (0.01, 0.02))


def served_job(folder: Path, rows: list[dict[str, Any]], target: Path, urls: list[str], **options: Any) -> Job:
    """A job that asks `urls`; `requests` among the options changes REQUESTS."""
    requests = REQUESTS | options.pop("requests", {})
    patience = options.pop("patience", 5.0)
    prepared = folder / "prepared" / "manifest.json"
    if not prepared.exists():
        publish_prepared(folder / "prepared", rows)
    job = generate_job(folder, prepared, target, **{"engine": "sglang", "max_tokens": {"short": 40, "long": 60}, **options})
    runtime = RUNTIME | {"server": {"urls": urls, "start_timeout": patience}, "requests": requests}
    return Job(job.stage, job.output, job.inputs, job.settings, runtime, job.work)


def result(job: Job) -> tuple[pl.DataFrame, pl.DataFrame, Any]:
    """Run the stage; its responses, its failed turns, its manifest."""
    run(job, generate)
    table = pl.concat([pl.read_parquet(path) for path in sorted(job.output.glob("responses-*.parquet"))])
    return table, pl.read_parquet(job.output / "failed.parquet"), read_manifest(job.output / "manifest.json", "generate")


def many_rows(count: int = 14) -> list[dict[str, Any]]:
    return [prepared_row(f"p{number:02d}", user(f"{number} " + "word " * (number * 5 % 9))) for number in range(count)]


def deterministic(body: dict[str, Any]) -> Say:
    return Say(native(from_prompt(body)))


def by_word(answers: Mapping[str, list[Say]]) -> Callable[[dict[str, Any]], Say]:
    """Each prompt that holds a word of `answers` gets its next answer, the last one again and again."""
    left = {word: list(says) for word, says in answers.items()}

    def script(body: dict[str, Any]) -> Say:
        text = prompt_text(body) if "input_ids" in body else json.dumps(body["messages"])
        says = next(says for word, says in left.items() if f"={word}=" in text)
        return says.pop(0) if len(says) > 1 else says[0]

    return script


def named_rows(*names: str) -> list[dict[str, Any]]:
    return [prepared_row(name, user(f"={name}=")) for name in names]


def test_every_row_gets_the_servers_own_ids_over_several_windows(target: Path, tmp_path: Path) -> None:
    stub = Stub(deterministic, target.parent)
    with stub_server(stub) as url:
        table, failed, manifest = result(served_job(tmp_path, many_rows(), target, [url]))
    assert table["id"].to_list() == [f"p{number:02d}" for number in range(14)] and failed.height == 0
    assert manifest.counts.rows_in == manifest.counts.rows_out == 14
    for row in table.iter_rows(named=True):
        assert row["output_ids"] == from_prompt({"input_ids": row["prompt_ids"]})
        assert (row["retokenised"], row["attempts"], row["finish_reason"], row["seed"]) == (False, 1, "stop", None)
    assert stub.asked[0]["sampling_params"] == {"max_new_tokens": 40, "temperature": 0.0, "stop_token_ids": [EOS]}
    assert 1 < stub.most_in_flight <= 4


def test_both_partitions_are_in_flight_within_their_own_limits(target: Path, tmp_path: Path) -> None:
    rows = [prepared_row(f"{number}", user(f"{number}"), partition="long" if number % 2 else "short") for number in range(20)]
    running: Counter[int] = Counter()
    peaks: Counter[int] = Counter()

    def script(body: dict[str, Any]) -> Say:
        limit = body["sampling_params"]["max_new_tokens"]
        running[limit] = sum(asked["sampling_params"]["max_new_tokens"] == limit for asked in stub.asked[-stub.in_flight :])
        peaks[limit] = max(peaks[limit], running[limit])
        return Say(native(from_prompt(body)), seconds=0.25)  # long enough for a busy client to send all that it may

    stub = Stub(script, target.parent)
    with stub_server(stub) as url:
        result(served_job(tmp_path, rows, target, [url]))
    assert set(peaks) == {40, 60} and stub.most_in_flight == 6


def test_servers_share_the_load(target: Path, tmp_path: Path) -> None:
    stubs = [Stub(lambda body: Say(native(from_prompt(body)), seconds=0.01), target.parent) for _ in range(2)]
    with stub_server(stubs[0]) as first, stub_server(stubs[1]) as second:
        table, _, _ = result(served_job(tmp_path, many_rows(20), target, [first, second]))
    assert table.height == 20 and min(len(stub.asked) for stub in stubs) >= 7
    assert max(stub.most_in_flight for stub in stubs) <= 3


def test_within_a_window_the_longest_expected_answers_go_first(target: Path, tmp_path: Path) -> None:
    rows = [prepared_row(str(size), [*user(f"={size}="), message("assistant", "x" * size)]) for size in (40, 400, 4, 4000, 0)]
    stub = Stub(deterministic, target.parent)
    with stub_server(stub) as url:
        requests = {"concurrency": {"short": 1, "long": 1}, "window": 8}
        result(served_job(tmp_path, rows, target, [url], requests=requests))
    assert [prompt_text(body).split("=")[1] for body in stub.asked] == ["4000", "400", "40", "0", "4"]


@pytest.mark.parametrize(("turns", "wanted"), [("first", 1), (2, 2), ("all", 3), ("last", 1)])
def test_later_turns_are_asked_on_the_new_history(target: Path, tmp_path: Path, turns: str | int, wanted: int) -> None:
    def script(body: dict[str, Any]) -> Say:
        return Say(native(text_ids(f"new {prompt_text(body).count('<|im_start|>assistant')}")))

    with stub_server(Stub(script, target.parent)) as url:
        table, _, _ = result(served_job(tmp_path, [prepared_row("a", DIALOGUE), prepared_row("b", DIALOGUE)], target, [url], turns=turns))
    assert table.select("id", "turn").rows() == [(name, turn) for name in "ab" for turn in range(wanted)]
    last = ChatTemplate.load(target.parent).decode(table["prompt_ids"].to_list()[-1])
    seen = {"first": (False, False), 2: (False, True), "all": (False, True), "last": (True, False)}
    assert ("old 1" in last, "new 1" in last) == seen[turns]


def test_tool_results_of_the_source_stay(target: Path, tmp_path: Path) -> None:
    rows = [
        prepared_row("a", [*user("sum"), message("assistant", "old call"), message("tool", "tool says 4"), message("assistant", "old")])
    ]
    with stub_server(Stub(deterministic, target.parent)) as url:
        table, _, _ = result(served_job(tmp_path, rows, target, [url], turns="all"))
    last = ChatTemplate.load(target.parent).decode(table["prompt_ids"].to_list()[-1])
    assert table.height == 2 and "tool says 4" in last and "old call" not in last


def test_finish_reasons_are_looked_at(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run with 35 % of its answers cut once reported none, and aborted answers were kept as good (speculators pull 835)."""
    answers = {
        "full": [Say(native(text_ids("Full answer.")))],
        "cut": [Say(native(text_ids("Half an ans")[:-1], "length"))],
        "dead": [Say(native(text_ids("Par"), "abort"))],
    }
    stub = Stub(by_word(answers), target.parent)
    with stub_server(stub) as url, caplog.at_level(logging.INFO):
        table, failed, manifest = result(served_job(tmp_path, named_rows(*answers), target, [url]))
    assert table.select("id", "finish_reason").rows() == [("cut", "length"), ("full", "stop")]
    assert EOS not in table["output_ids"].to_list()[0]
    assert failed.select("id", "reason").rows() == [("dead", "aborted")]
    assert manifest.facts["finish_reasons"] == {"length": 1, "stop": 1} and manifest.counts.rejected == {"aborted": 1}
    assert sum("=dead=" in prompt_text(body) for body in stub.asked) == 3  # retries: 2
    assert "answered: length" in caplog.text and "sent again: aborted" in caplog.text


def test_cut_answers_can_be_dropped_and_are_counted(target: Path, tmp_path: Path) -> None:
    answers = {"cut": [Say(native(text_ids("Half")[:-1], "length"))], "full": [Say(native(text_ids("Full")))]}
    rows = [prepared_row(name, [*user(f"={name}="), message("assistant", "x"), *user("more")]) for name in answers]
    with stub_server(Stub(by_word(answers), target.parent)) as url:
        table, failed, _ = result(served_job(tmp_path, rows, target, [url], turns="all", truncated="drop"))
    assert table["id"].to_list() == ["full", "full"]
    assert failed.select("id", "turn", "reason").rows() == [("cut", 0, "truncated"), ("cut", 1, "history_failed")]


def test_an_empty_answer_is_asked_again_with_another_seed(target: Path, tmp_path: Path) -> None:
    empty, fine = Say(native([EOS])), Say(native(text_ids("ok")))
    stub = Stub(by_word({"later": [empty, fine], "never": [empty]}), target.parent)
    with stub_server(stub) as url:
        table, failed, manifest = result(served_job(tmp_path, named_rows("later", "never"), target, [url], temperature=0.7))
    assert table.select("id", "attempts").rows() == [("later", 2)] and manifest.facts["retried"] == 1
    assert failed.rows() == [("never", 0, "empty_answer", "2 attempts")]
    seeds = [body["sampling_params"]["sampling_seed"] for body in stub.asked]
    assert len(set(seeds)) == 4 and table["seed"].to_list()[0] in seeds


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ({"content": "4", "reasoning_content": None, "reasoning": "two plus two"}, "two plus two"),
        ({"content": "4", "reasoning_content": "", "reasoning": "stale"}, ""),
        ({"content": "4"}, None),
    ],
)
def test_reasoning_has_either_name_and_an_empty_one_stays(text: dict[str, Any], wanted: str | None) -> None:
    """Reasoning was lost under the other name, and `a or b` replaced an empty one (speculators pull 499)."""
    assert reasoning_of(text) == wanted


def test_a_text_only_server_gives_the_same_ids_and_they_are_marked(target: Path, tmp_path: Path) -> None:
    answers = {"cut": [Say(chat({"content": "Half an ans"}, "length"))], "full": [Say(chat({"content": "Full."}), chunked=True)]}
    stub = Stub(by_word(answers), target.parent, speaks=CHAT_ONLY)
    with stub_server(stub) as url:
        table, _, manifest = result(served_job(tmp_path, named_rows(*answers), target, [url]))
    assert table["output_ids"].to_list() == [text_ids("Half an ans")[:-1], text_ids("Full.")]
    template = ChatTemplate.load(target.parent)
    assert table["prompt_ids"].to_list()[1] == template.prompt_ids([Message("user", "=full=")])
    assert table["retokenised"].all() and manifest.facts["retokenised"] == 2
    assert stub.asked[0]["model"] == "tiny" and stub.asked[0]["messages"][0]["role"] == "user"


def test_what_the_server_cannot_help_is_tried_again_and_what_the_request_is_to_blame_for_is_not(target: Path, tmp_path: Path) -> None:
    """One hung request stalled a whole run, and one 503 threw a conversation away (speculators pull 412, curator pull 200)."""
    fine = Say(native(text_ids("ok")))
    answers = {
        "x": [Say({}, 503, headers="Retry-After: 0\r\n"), Say({}, seconds=60.0), fine],
        "y": [Say({"error": "context too long"}, 400)],
        "z": [Say("no answer at all"), Say({}, 500), fine],
    }
    stub = Stub(by_word(answers), target.parent)
    with stub_server(stub) as url:
        requests = {"concurrency": {"short": 2, "long": 1}, "timeout": 0.5}
        table, failed, _ = result(served_job(tmp_path, named_rows(*answers), target, [url], requests=requests))
    asked = Counter(prompt_text(body).split("=")[1] for body in stub.asked)
    assert asked == {"x": 3, "y": 1, "z": 3} and table["id"].to_list() == ["x", "z"]
    assert failed["reason"].to_list() == ["refused"] and "context too long" in failed["value"][0]
    assert table["attempts"].to_list() == [1, 1]


def test_a_sleeping_repetition_leaves_its_slot_to_others(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.generation.policy.SLEEP_SECONDS", (0.5, 0.5))
    answers = {"bad": [Say({}, 500), Say(native(text_ids("ok")))], "good": [Say(native(text_ids("ok")))]}
    rows = [*named_rows("bad"), *[prepared_row(str(number), user(f"{number} =good=")) for number in range(3)]]
    stub = Stub(by_word(answers), target.parent)
    with stub_server(stub) as url:
        result(served_job(tmp_path, rows, target, [url], requests={"concurrency": {"short": 1, "long": 1}}))
    assert stub.most_in_flight == 1
    assert "=bad=" in prompt_text(stub.asked[-1]) and sum("=bad=" in prompt_text(body) for body in stub.asked) == 2


def test_no_server_at_all_stops_the_stage_and_leaves_every_row_to_do(target: Path, tmp_path: Path) -> None:
    """50 refused connections once became 50 rows of errors."""
    rows = many_rows(30)

    def script(body: dict[str, Any]) -> Say:
        stub.gone = len(stub.asked) > 10
        return Say(native(from_prompt(body)))

    stub = Stub(script, target.parent)
    with stub_server(stub) as url, pytest.raises(StageError, match=r"not healthy for 0 s; start that server"):
        run(served_job(tmp_path, rows, target, [url], patience=0.4), generate)
    assert not (tmp_path / "out").exists()
    kept = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("work/generate/*/partial/*.jsonl"))
    stub = Stub(deterministic, target.parent)
    with stub_server(stub) as url:
        table, failed, _ = result(served_job(tmp_path, rows, target, [url]))
    assert table["id"].n_unique() == table.height == 30 and failed.height == 0 and len(stub.asked) == 30 - kept


def test_too_many_failures_stop_the_stage_with_the_table_and_a_higher_limit_goes_on(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"a": [Say(native(text_ids("ok")))], "b": [Say({}, 400)], "c": [Say({}, 400)]}
    stub = Stub(by_word(answers), target.parent)
    with stub_server(stub) as url:
        strict = {"stop_at": {"truncated": 1.0, "empty": 1.0, "failed": 0.5}, "concurrency": {"short": 1, "long": 1}}
        with pytest.raises(StageError, match=r"66\.67% of 3 turns are failed, limit 50\.00%.*raise runtime\.requests\.stop_at\.failed"):
            run(served_job(tmp_path, named_rows(*answers), target, [url], requests=strict), generate)
        assert "3 turns\n" in caplog.text and "failed: refused" in caplog.text
        table, failed, _ = result(served_job(tmp_path, [], target, [url]))
    assert table["id"].to_list() == ["a"] and failed["id"].to_list() == ["b", "c"]
    assert Counter(prompt_text(body).split("=")[1] for body in stub.asked) == {"a": 1, "b": 2, "c": 2}


def test_a_resumed_run_asks_for_what_is_missing_and_gives_the_same_bytes(target: Path, tmp_path: Path) -> None:
    """A resume that counts lines, or looks for rows by their place, repeats some and forgets others (DeepSpec issue 35)."""
    rows = [prepared_row(f"p{number:02d}", DIALOGUE) for number in range(6)] + many_rows(8)[6:]
    stub = Stub(deterministic, target.parent)
    with stub_server(stub) as url:
        job = served_job(tmp_path, rows, target, [url], turns="all")
        first = tmp_path / "first"
        first.mkdir()
        whole = generate(job, first)
        bytes_whole = data_files_without(first)
        everything = len(stub.asked)
        assert generate(job, first).manifest == whole.manifest and len(stub.asked) == everything == 20
        segment = first / "partial" / "answers-00000.jsonl"
        segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:9]) + b'{"crc":"0123')
        again = generate(job, first)
    assert len(stub.asked) == everything + 11
    assert again.manifest == whole.manifest and data_files_without(first) == bytes_whole


def data_files_without(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
