"""What keeps finished answers on disk through any kill, and how many requests are in flight."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import uvloop

from scripts.lib.generation.gathering import Gathering
from scripts.lib.generation.http import Pool
from scripts.lib.generation.policy import Policy, Slots
from scripts.lib.generation.segments import Segments
from scripts.lib.ground.errors import StageError
from tests.stage_inputs import REQUESTS


def record(name: str, turn: int = 0) -> dict[str, Any]:
    return {"id": name, "turn": turn, "prompt_ids": [1, 2], "output_ids": [3]}


@pytest.mark.parametrize("torn", [b'{"crc":"00000000","record":{"id":"b","mess', b'{"crc":"00', b'{"crc":"00\n', b'{"crc":"00\n\n'])
def test_a_torn_line_is_cut_off_with_one_event(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Appending onto half a line made one line of two records, which nothing could read (datatrove pull 78)."""
    segments = Segments(tmp_path)
    segments.append(record("a"))
    segments.close()
    path = tmp_path / "answers-00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    resumed = Segments(tmp_path)
    assert resumed.index()["id"].to_list() == ["a"] and path.read_bytes() == whole
    assert [entry.message.split(":")[0] for entry in caplog.records] == ["torn_tail"]
    for name in "bc":
        resumed.append(record(name))
    resumed.close()
    assert [read["id"] for read in resumed.read(resumed.index())] == ["a", "b", "c"]


def test_damage_that_no_kill_explains_is_an_error(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    for name in "abc":
        segments.append(record(name))
    segments.close()
    path = tmp_path / "answers-00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"id":"b"', b'"id":"x"'))
    with pytest.raises(StageError, match=r"answers-00000\.jsonl: the line at byte \d+ is damaged"):
        Segments(tmp_path).index()
    path.write_bytes(whole + whole)
    with pytest.raises(StageError, match="a turn 0 is there twice"):
        Segments(tmp_path).index()


def test_segments_are_rotated_and_read_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.lib.generation.segments.SEGMENT_BYTES", 150)
    segments = Segments(tmp_path)
    for number in (3, 1, 2, 0):
        segments.append(record(f"r{number}"))
        segments.write()
    segments.close()
    assert len(segments.paths()) == 2
    assert [read["id"] for read in segments.read(segments.index())] == ["r0", "r1", "r2", "r3"]


def test_overload_takes_slots_away_and_answers_give_them_back() -> None:
    slots = Slots(8)
    for seconds in (0.0, 0.5, 2.0):
        slots.shrink(seconds)
    assert [slots.admits(place) for place in (3, 4)] == [True, slots.allowed > 4] and 4 < slots.allowed <= 6
    answers = 0
    while slots.allowed < 8:
        slots.grow()
        answers += 1
    assert 15 < answers < 40
    for seconds in range(10, 40, 2):
        slots.shrink(seconds)
    assert slots.admits(0) and not slots.admits(1)


def test_overload_and_outages_are_not_the_requests_fault() -> None:
    policy = Policy.of({"requests": REQUESTS})
    assert not policy.gives_up("overload", 1000) and not policy.gives_up("server_gone", 1000)
    assert [policy.gives_up("timeout", times) for times in (2, 3)] == [False, True]
    assert policy.gives_up("refused", 1) and not policy.gives_up("server_lost", 10) and policy.gives_up("server_lost", 11)


def test_free_places_are_filled_together_or_when_the_first_has_waited_enough() -> None:
    async def run() -> None:
        gathering, filled = Gathering(1000.0), []

        async def place(size: int) -> None:
            await gathering.wait(size)
            filled.append(size)

        async with asyncio.TaskGroup() as group:
            for before, after in ((0, 0), (0, 0), (0, 0), (0, 4), (4, 4)):
                assert len(filled) == before
                group.create_task(place(4))
                for _ in range(3):
                    await asyncio.sleep(0)
                assert len(filled) == after
            group.create_task(place(1))
            await asyncio.sleep(0)
            assert filled[4:] == [1] and gathering.alarm is not None
            gathering.release()  # what the alarm calls
        assert filled[5:] == [4] and gathering.alarm is None

    asyncio.run(run())


def test_a_place_that_is_given_up_holds_nobody_back() -> None:
    async def run() -> None:
        gathering = Gathering(10.0)
        given_up = asyncio.create_task(gathering.wait(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait_for(gathering.wait(2), 1)
        assert gathering.alarm is None and not gathering.free

    asyncio.run(run())


async def two_braces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers every request alike."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    writer.close()


def test_a_connection_that_broke_meanwhile_holds_no_other_request_back() -> None:
    async def run() -> None:
        async with await asyncio.start_server(two_braces, "127.0.0.1", 0) as listening:
            pool = Pool(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            await asyncio.gather(*(pool.request("GET", "/", b"", 10.0) for _ in range(2)))
            broken, whole = pool.idle
            broken.close()
            await asyncio.sleep(0.01)  # a turn of the loop or two: the transport is closed for good
            request = pool.address.request("GET", "/", b"")
            answered = asyncio.create_task(whole.exchange(request, 10.0))
            pool.outbox.put(broken.transport, request)
            assert (await answered).body == b"{}"
            pool.close()

    uvloop.run(run())


def test_places_refilled_at_a_time_follow_what_is_allowed() -> None:
    slots = Slots(512)
    assert slots.together == 32
    slots.shrink(0.0)
    assert slots.together == 24 and Slots(8).together == 0
