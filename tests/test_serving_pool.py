"""Servers that jobs share one after the other: kept, exchanged, ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.serving import pool
from scripts.lib.serving.claim import Claim, claimed_gpus
from scripts.lib.serving.health import request
from scripts.lib.serving.keeper import Keeper, Wanted
from scripts.lib.serving.pool import pooled, shared
from tests.serving_parts import alive, crash, eventually, pids, starts, with_environment

pytest_plugins = ["tests.serving_fixtures", "tests.pool_fixtures"]
REPO = Path(__file__).parents[1]
HOLD = """
import json, sys, time
from scripts.lib.serving.keeper import Wanted
from scripts.lib.serving.pool import pooled
from scripts.lib.serving.settings import ServerSettings
settings, wanted = json.loads(sys.argv[1])
with pooled(ServerSettings(**settings), [Wanted(**server) for server in wanted]):
    print("up", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def wanted(target, tmp_path, key="a", flags=(), share=0.5):
    return Wanted(key, str(target), [*flags], str(tmp_path / f"{key}.log"), share)


def holding(settings, servers, seconds=3600.0):
    """A process that holds `servers`, once it has them."""
    given = json.dumps([vars(settings), [vars(server) for server in servers]], default=list)
    process = subprocess.Popen([sys.executable, "-c", HOLD, given, str(seconds)], cwd=REPO, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"up\n"
    return process


def test_the_next_job_finds_the_server_that_it_wants(kept, target, tmp_path):
    servers = [wanted(target, tmp_path), wanted(target, tmp_path, "b", ["--dtype", "float32"])]
    with pooled(kept, servers) as lease:
        urls = [server.url for server in lease.servers]
        assert request(f"{urls[1]}/server_info")["arguments"][-2:] == ["--dtype", "float32"]
        lease.check()
    with pooled(kept, servers[::-1]) as lease:
        assert [server.url for server in lease.servers] == urls[::-1]
    assert starts(tmp_path) == 2


def test_what_the_next_job_does_not_want_ends(kept, target, tmp_path):
    with pooled(kept, [wanted(target, tmp_path)]):
        old = pids(tmp_path)
    with pooled(kept, [wanted(target, tmp_path, "b")]):
        assert not any(map(alive, old))
    assert starts(tmp_path) == 2


def test_a_job_that_wants_one_of_them_gets_the_one_that_runs(kept, target, tmp_path):
    servers = [wanted(target, tmp_path, share=1.0), wanted(target, tmp_path, "b", share=1.0)]
    found = []
    for order in (servers, servers[::-1], servers[:1], servers):
        with pooled(kept, order, one=True) as lease:
            found += [server.key for server in lease.servers]
    assert (found, starts(tmp_path)) == (["a", "a", "a", "a"], 1)
    with pooled(kept, servers[1:], one=True) as lease:
        assert [server.key for server in lease.servers] == ["b"]
    assert starts(tmp_path) == 2


def test_servers_end_a_while_after_a_job_that_was_killed(settings, target, tmp_path):
    job = holding(replace(settings, linger=0.3), [wanted(target, tmp_path)])
    servers = pids(tmp_path)
    assert all(map(alive, servers))
    job.kill()
    job.wait()
    assert eventually(lambda: not any(map(alive, servers)))


def test_one_job_at_a_time_has_the_servers(kept, target, tmp_path):
    """Two at once would spoil each other's figures."""
    job = holding(kept, [wanted(target, tmp_path)], seconds=0.5)
    with pooled(kept, [wanted(target, tmp_path)]):
        assert job.wait(10) == 0, "the first one has left"
    assert starts(tmp_path) == 1


def test_a_server_that_dies_is_told_and_started_anew(kept, target, tmp_path):
    with pooled(kept, [wanted(target, tmp_path)]) as lease:
        crash(lease.servers[0].url)
        with pytest.raises(StageError, match=r"a\.log: the server died with code 3; its log ends with: RuntimeError: CUDA"):
            lease.check(20.0)
    with pooled(kept, [wanted(target, tmp_path)]) as lease:
        assert request(f"{lease.servers[0].url}/health") == {}
    assert starts(tmp_path) == 2


def test_a_server_that_does_not_start_is_told_with_its_last_error(kept, target, tmp_path):
    broken = with_environment(kept, STUB_FAIL="1", STUB_ERROR="ValueError: no such drafter")
    said = r"died with code 1 before it was healthy; its log ends with: ValueError: no such drafter"
    with pytest.raises(StageError, match=said), pooled(broken, [wanted(target, tmp_path)]):
        pass


def test_a_server_that_hangs_is_given_up(kept, target, tmp_path):
    hanging = replace(with_environment(kept, STUB_HANG="1"), start_timeout=1.0)
    said = r"not healthy within runtime\.server\.start_timeout 1 s; its log ends with: loading weights"
    with pytest.raises(StageError, match=said), pooled(hanging, [wanted(target, tmp_path)]):
        pass


def test_a_killed_keeper_takes_its_servers_along(kept, target, tmp_path):
    with pooled(kept, [wanted(target, tmp_path)]) as lease:
        servers = pids(tmp_path)
        guardian = int(Path(f"/proc/{servers[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        with pytest.raises(StageError, match="the keeper of the servers was killed"):
            lease.check(20.0)
    assert eventually(lambda: not any(map(alive, servers)))
    with pooled(kept, [wanted(target, tmp_path)]):
        assert starts(tmp_path) == 2, "its socket is no hindrance"


def test_gpus_are_held_for_as_long_as_servers_are_kept(kept, target, tmp_path, monkeypatch, folder):
    monkeypatch.setattr("scripts.lib.serving.claim.WAIT_SECONDS", 0.0)
    on_gpu = replace(with_environment(kept, STUB_GPUS=f"GPU-{tmp_path.name}"), device="cuda")
    monkeypatch.setenv("STUB_GPUS", f"GPU-{tmp_path.name}")
    with pooled(on_gpu, [wanted(target, tmp_path), wanted(target, tmp_path, "b")]) as lease:
        shares = [server.command[server.command.index("--mem-fraction-static") + 1] for server in lease.servers]
    assert shares == ["0.4", "0.667"], "each 0.4 of the GPU: SGLang takes a share of what is free when it starts"
    with pytest.raises(StageError, match=r"1 of 1 GPUs wanted, last held"), claimed_gpus(on_gpu, folder):
        pass


def test_memory_is_shared_also_with_a_server_that_stayed(settings, target, tmp_path):
    keeper = Keeper(replace(settings, device="cuda", memory_fraction=0.6), Claim())
    first, second = wanted(target, tmp_path), wanted(target, tmp_path, "b")
    assert keeper.memory_fraction(first) == 0.3
    try:
        keeper.start(first)
        assert keeper.memory_fraction(second) == pytest.approx(0.3 / 0.7, abs=1e-3)
    finally:
        keeper.end("a")
    assert keeper.memory_fraction(second) == 0.3
    assert keeper.memory_fraction(replace(first, share=None)) == 0.6, "alone, it has what the config or SGLang gives it"


def test_jobs_that_want_the_same_server_share_one_start(kept, manifest, tmp_path):
    urls = []
    for flags in (["--dtype", "float32"], ["--dtype", "float32"], ["--dtype", "bfloat16"]):
        with shared(kept, manifest, flags, tmp_path) as running:
            urls += running.urls
            assert running.version == "0.5.17"
            running.check()
    assert urls[0] == urls[1] != urls[2]
    assert starts(tmp_path) == 2, "another flag is another server"


def test_a_shared_server_that_crashes_comes_back_behind_its_url_and_the_job_is_told(kept, manifest, tmp_path, caplog):
    with shared(kept, manifest, [], tmp_path) as running:
        for count in (2, 3):
            crash(running.urls[0])
            assert eventually(lambda count=count: starts(tmp_path) == count and request(f"{running.urls[0]}/health") == {})
        running.check()
    assert "the server died with code 3; its log ends with: RuntimeError: CUDA out of memory; restart 1 of 2 in" in caplog.text
    with shared(kept, manifest, [], tmp_path) as again:
        assert (again.urls, starts(tmp_path)) == (running.urls, 3)


def test_a_server_that_crashes_between_two_jobs_is_no_trap_for_the_second(kept, manifest, tmp_path):
    """It takes a moment until the death of its process shows."""
    with shared(kept, manifest, [], tmp_path) as running:
        url = running.urls[0]
    crash(url)
    with shared(kept, manifest, [], tmp_path) as running:
        assert request(f"{running.urls[0]}/health") == {}


def test_a_job_that_comes_while_a_server_comes_back_waits_and_hears_of_it(kept, manifest, tmp_path, caplog):
    """The second start dies, so that the job hears of a restart before it hears of its server."""
    failing = with_environment(kept, STUB_FAIL="2", STUB_ERROR="RuntimeError: no memory yet")
    with shared(failing, manifest, [], tmp_path) as running:
        url = running.urls[0]
    crash(url)
    assert eventually(lambda: starts(tmp_path) == 2)
    with shared(failing, manifest, [], tmp_path) as running:
        assert (running.urls, request(f"{url}/health")) == ((url,), {})
    assert "RuntimeError: no memory yet; restart 2 of 2" in caplog.text


def test_a_job_that_was_killed_while_it_waited_changes_nothing(kept, target, tmp_path):
    with pooled(kept, [wanted(target, tmp_path)]) as lease:
        waiting = subprocess.Popen(
            [sys.executable, "-c", HOLD, json.dumps([vars(kept), [vars(wanted(target, tmp_path, "b"))]], default=list), "1"], cwd=REPO
        )
        assert eventually(lambda: connections(lease) == 1)
        waiting.kill()
        waiting.wait()
    with pooled(kept, [wanted(target, tmp_path)]):
        assert starts(tmp_path) == 1


def connections(lease):
    """How many jobs wait at the keeper's socket, as the kernel counts connections that nobody has accepted."""
    path = lease.connection.getpeername()
    return sum(line.split()[-1] == path and line.split()[5] == "02" for line in Path("/proc/net/unix").read_text().splitlines()[1:])


def test_a_port_at_which_another_server_answers_is_named(kept, manifest, tmp_path):
    with shared(kept, manifest, [], tmp_path) as running:
        taken = replace(kept, port=int(running.urls[0].rpartition(":")[2]), restarts=1)
        with (
            pytest.raises(StageError, match=r"another server answers there; wait for its end \(runtime.server.linger\) or set"),
            shared(taken, manifest, [], tmp_path),
        ):
            pass


def test_a_folder_that_is_too_deep_for_a_socket_is_named(kept, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "lock_folder", lambda: tmp_path / "deep" / ("x" * 80))
    with pytest.raises(StageError, match=r"the path of a socket has at most 107; set TMPDIR"), shared(kept, manifest, [], tmp_path):
        pass


def test_a_shared_server_that_keeps_crashing_is_given_up_and_the_next_job_starts_it_anew(kept, manifest, tmp_path):
    broken = with_environment(kept, STUB_FAIL="2,3", STUB_ERROR="torch.OutOfMemoryError: 80 GiB wanted")
    said = r"OutOfMemoryError: 80 GiB wanted \(crash 3 in a row, runtime.server.restarts allows 2\)"
    with pytest.raises(StageError, match=said), shared(broken, manifest, [], tmp_path) as running:
        crash(running.urls[0])
        eventually(running.check)
    with shared(broken, manifest, [], tmp_path) as running:
        assert request(f"{running.urls[0]}/health") == {}


def test_a_shared_server_listens_on_the_port_of_the_config(kept, manifest, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with shared(replace(kept, port=port), manifest, [], tmp_path) as running:
        assert running.urls == (f"http://127.0.0.1:{port}",)


def test_servers_of_others_are_attached_to(kept, manifest, tmp_path):
    with shared(kept, manifest, [], tmp_path) as own, shared(replace(kept, urls=own.urls), manifest, [], tmp_path) as running:
        assert running.urls == own.urls
    assert starts(tmp_path) == 1


def test_a_log_that_was_removed_keeps_no_server_from_coming_back(kept, manifest, tmp_path):
    with shared(kept, manifest, [], tmp_path / "work") as running:
        shutil.rmtree(tmp_path / "work")
        crash(running.urls[0])
        assert eventually(lambda: starts(tmp_path) == 2 and request(f"{running.urls[0]}/health") == {})
        running.check()
