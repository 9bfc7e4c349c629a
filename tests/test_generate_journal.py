"""The journal of finished batches: what a kill tore is cut off, what is damaged is an error."""

import logging
from pathlib import Path

import pytest

from scripts.lib.generation.journal import Journal
from scripts.lib.ground.errors import StageError


def journal_with(path: Path, *labels: str) -> bytes:
    """A journal with a one-record batch for each label; its bytes."""
    journal = Journal(path)
    for label in labels:
        journal.append(label, [{"id": label, "turn": 0, "output_ids": [5, 2], "finish_reason": "stop", "attempts": 1}])
    return path.read_bytes()


@pytest.mark.parametrize("blank", [b"", b"\n"])
def test_a_torn_tail_is_cut_off_with_one_event(tmp_path: Path, blank: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Appending onto half a line made one line of two records, which nothing could read (datatrove pull 78)."""
    whole = journal_with(tmp_path / "whole.jsonl", "a", "b", "c")
    lines = whole.splitlines(keepends=True)
    path = tmp_path / "torn.jsonl"
    path.write_bytes(lines[0] + lines[1][:40] + blank)
    with caplog.at_level(logging.WARNING):
        assert list(Journal(path).batches) == ["a"]
    assert [record.message.split(":")[0] for record in caplog.records] == ["torn_tail"]
    assert path.read_bytes() == lines[0]
    assert journal_with(path, "b", "c") == whole


def test_a_damaged_line_before_the_end_is_an_error(tmp_path: Path) -> None:
    lines = journal_with(tmp_path / "j.jsonl", "a", "b", "c").splitlines(keepends=True)
    for damaged in (lines[1][:40] + b"\n", lines[1].replace(b'"stop"', b'"stoq"')):
        (tmp_path / "j.jsonl").write_bytes(lines[0] + damaged + lines[2])
        with pytest.raises(StageError, match=r"j\.jsonl: line 2 of 3 is damaged; delete the file and start again"):
            Journal(tmp_path / "j.jsonl")


def test_an_unfinished_batch_is_cut_off_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append("0", [{"id": "a"}])
    journal.append("1", [{"id": "b"}, {"id": "c"}])
    lines = (tmp_path / "j.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "j.jsonl").write_bytes(b"".join(lines[:2]))
    assert Journal(tmp_path / "j.jsonl").batches == {"0": [{"id": "a"}]}
    assert (tmp_path / "j.jsonl").read_bytes() == lines[0]
