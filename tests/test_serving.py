"""The life of a server: started, watched, restarted, ended with all of its processes."""

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.serving import supervisor
from scripts.lib.serving.health import request
from scripts.lib.serving.process import last_error
from scripts.lib.serving.server import server
from tests.serving_parts import alive, crash, eventually, pids, with_environment

pytest_plugins = ["tests.serving_fixtures"]


def test_a_server_runs_as_long_as_the_block(settings, target, tmp_path):
    with server(settings, target, tmp_path / "logs/server.log") as running:
        started = pids(tmp_path)
        assert running.version == "0.5.17"
        assert all(map(alive, started))
        running.check()
    assert not any(map(alive, started))


def test_a_server_ends_when_the_block_raises(settings, target, tmp_path):
    with pytest.raises(KeyboardInterrupt), server(settings, target, tmp_path / "server.log"):
        raise KeyboardInterrupt
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_when_aerie_is_killed(settings, target, tmp_path, number):
    client = os.fork()
    if client == 0:
        with contextlib.suppress(BaseException), server(settings, target, tmp_path / "server.log"):
            (tmp_path / "up").touch()
            time.sleep(3600)
        os._exit(1)
    assert eventually((tmp_path / "up").exists)
    assert all(map(alive, pids(tmp_path)))
    os.kill(client, number)
    os.waitpid(client, 0)
    assert eventually(lambda: not any(map(alive, pids(tmp_path))))


def test_a_fork_of_aerie_keeps_no_server_alive(settings, target, tmp_path):
    client = os.fork()
    if client == 0:
        with contextlib.suppress(BaseException), server(settings, target, tmp_path / "server.log"):
            if (fork := os.fork()) == 0:
                time.sleep(3600)
            (tmp_path / "fork").write_text(str(fork))
            time.sleep(3600)
        os._exit(1)
    assert eventually((tmp_path / "fork").read_text)
    os.kill(client, signal.SIGKILL)
    os.waitpid(client, 0)
    try:
        assert eventually(lambda: not any(map(alive, pids(tmp_path))))
    finally:
        os.kill(int((tmp_path / "fork").read_text()), signal.SIGKILL)


def test_a_killed_guardian_takes_its_server_along(settings, target, tmp_path):
    with server(replace(settings, restarts=0), target, tmp_path / "server.log") as running:
        process, orphan = pids(tmp_path)
        os.kill(int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert eventually(lambda: not alive(process))
        with pytest.raises(StageError, match=r"died with code -9"):
            eventually(running.check)
    os.kill(orphan, signal.SIGKILL)  # who would have ended it is dead


def test_a_crashed_server_comes_back_behind_its_url(settings, target, tmp_path, caplog):
    with server(settings, target, tmp_path / "server.log") as running:
        for starts in (2, 3):
            old, orphan = pids(tmp_path)
            crash(running.urls[0])
            assert eventually(lambda old=old: pids(tmp_path)[0] != old and request(f"{running.urls[0]}/health") == {})
            assert not alive(orphan), "what a crashed server leaves may hold the GPU"
            assert len((tmp_path / "starts").read_text()) == starts
            running.check()
    assert "server.log: the server died with code 3; its log ends with: RuntimeError: CUDA out of memory; restart 1 of 2" in caplog.text


def test_a_server_killed_from_outside_comes_back(settings, target, tmp_path):
    with server(settings, target, tmp_path / "server.log") as running:
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert eventually(lambda: (tmp_path / "starts").read_text() == "xx" and request(f"{running.urls[0]}/health") == {})


def test_crashes_in_a_row_end_with_the_log_and_its_last_error(settings, target, tmp_path):
    broken = with_environment(settings, STUB_FAIL="2,3", STUB_ERROR="torch.OutOfMemoryError: 80 GiB wanted")
    said = r"server.log: .* code 1 .*OutOfMemoryError: 80 GiB wanted \(crash 3 in a row, .*restarts allows 2"
    with pytest.raises(StageError, match=said), server(broken, target, tmp_path / "server.log") as running:
        crash(running.urls[0])
        eventually(running.check)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_restart_that_cannot_be_tried_is_told(settings, target, tmp_path):
    with server(settings, target, tmp_path / "logs/server.log") as running:
        (tmp_path / "logs/server.log").rename(tmp_path / "old.log")
        (tmp_path / "logs/server.log").mkdir()
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(StageError, match=r"its server cannot be started: .*Is a directory"):
            eventually(running.check)


def test_a_server_that_ran_steadily_has_all_its_restarts_again(settings, target, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    with server(replace(settings, restarts=1), target, tmp_path / "server.log") as running:
        for healthy in (1, 2, 3):
            assert eventually(lambda healthy=healthy: caplog.text.count("is healthy after") == healthy)
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert eventually(lambda: caplog.text.count("is healthy after") == 4)
        running.check()


def test_a_server_that_dies_at_the_start_is_an_error_at_once(settings, target, tmp_path):
    broken = with_environment(settings, STUB_FAIL="1", STUB_ERROR="ValueError: unknown flag --tb")
    with (
        pytest.raises(StageError, match=r"died with code 1 before it was healthy; its log ends with: ValueError: unknown flag --tb"),
        server(broken, target, tmp_path / "server.log"),
    ):
        pass
    assert (tmp_path / "starts").read_text() == "x"


def test_a_server_that_never_gets_healthy_is_ended(settings, target, tmp_path):
    hanging = with_environment(replace(settings, start_timeout=5.0), STUB_HANG="1")
    with (
        pytest.raises(StageError, match=r"not healthy within runtime.server.start_timeout 5 s; its log ends with: loading weights"),
        server(hanging, target, tmp_path / "server.log"),
    ):
        pass


def test_a_missing_interpreter_says_how_to_get_it(settings, target, tmp_path):
    with (
        pytest.raises(StageError, match=r"nowhere/python: no interpreter of SGLang's there; set it up with `make sglang-cpu`"),
        server(replace(settings, python=str(tmp_path / "nowhere/python")), target, tmp_path / "server.log"),
    ):
        pass


def test_flags_and_environment_reach_the_server(settings, target, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    chosen = with_environment(replace(settings, flags=["--context-length", "512"], memory_fraction=0.5), NCCL_PROTO="Simple")
    with server(chosen, target, tmp_path / "server.log", extra=["--context-length", "256"]) as running:
        found = request(f"{running.urls[0]}/server_info")
    line, environment = " ".join(found["arguments"]), found["environment"]
    assert f"--model-path {target.resolve()} --host 127.0.0.1" in line
    assert "--mem-fraction-static 0.5" in line
    assert line.endswith("--context-length 512 --context-length 256"), "SGLang takes the last one"
    assert environment["NCCL_PROTO"] == "Simple"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_the_log_keeps_every_attempt_and_names_the_last_error(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("ValueError: of an earlier attempt\n")
    start = path.stat().st_size
    path.write_text(path.read_text() + "loading\n")
    assert last_error(path, start) == "loading"
    path.write_text(
        path.read_text()
        + "[2026-11-29 16:43:01] Scheduler hit an exception: Traceback (most recent call last):\n"
        + '  File "scheduler.py", line 1, in run\n'
        + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB\n\n"
        + "[2026-11-29 16:43:02] Received sigquit from a child process.\n"
    )
    assert last_error(path, start) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    with path.open("a") as log:
        log.write("[17:31:35] Subprocess scheduler_0 (pid=6217) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n")
        log.write("[17:31:35] kill_process_tree called: parent_pid=5019\n")
    assert "crashed with exit code -9" in last_error(path, start)
    assert last_error(path, path.stat().st_size) == "nothing was written"
