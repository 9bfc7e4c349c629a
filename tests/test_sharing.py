"""Jobs that want a GPU for themselves, and servers that only wait there."""

from dataclasses import replace

import pytest

from scripts.lib.benchmark import measure
from scripts.lib.generation import responses
from scripts.lib.ground.stage import Job
from scripts.lib.serving.claim import claimed_gpus
from scripts.lib.serving.pool import shared
from scripts.lib.serving.server import server
from scripts.lib.sharing import leaving
from scripts.lib.sharing.leaving import make_room
from scripts.lib.states import hidden
from scripts.lib.training import build as training
from tests.serving_parts import alive, pids, starts

pytest_plugins = ["tests.serving_fixtures", "tests.pool_fixtures"]


def test_a_job_that_computes_on_the_gpu_ends_servers_that_wait_there(on_gpu, manifest, tmp_path, folder):
    with shared(on_gpu, manifest, [], tmp_path):
        servers = pids(tmp_path)
    make_room("cpu")
    assert all(map(alive, servers))
    make_room("cuda")
    assert not any(map(alive, servers))
    with claimed_gpus(on_gpu, folder) as claim:
        assert len(claim.gpus) == 1, "free at once, not after `linger`"


def test_servers_of_other_gpus_and_of_a_cpu_stay(kept, on_gpu, manifest, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with shared(on_gpu, manifest, [], tmp_path):
        servers = pids(tmp_path)
    with shared(kept, manifest, [], tmp_path):
        servers += pids(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    make_room("cuda")
    assert len(set(servers)) == 4 and all(map(alive, servers))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    make_room("cuda")
    assert [alive(pid) for pid in servers] == [False, False, True, True]


def test_servers_that_a_job_asks_stay_with_a_warning(on_gpu, manifest, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(leaving, "ANSWER_SECONDS", 0.3)
    with shared(on_gpu, manifest, [], tmp_path) as running:
        make_room("cuda")
        assert "another job asks the servers there; their share of GPU memory is not free" in caplog.text
        running.check()
    with shared(on_gpu, manifest, [], tmp_path):
        assert starts(tmp_path) == 1, "nobody waits for it to leave any more"


def test_other_settings_do_not_wait_for_the_servers_of_those_before(on_gpu, manifest, tmp_path):
    with shared(replace(on_gpu, linger=600.0), manifest, [], tmp_path):
        servers = pids(tmp_path)
    with shared(replace(on_gpu, restarts=1), manifest, [], tmp_path):
        assert not any(map(alive, servers))


class AskedError(Exception):
    """In place of servers that would leave."""


@pytest.mark.parametrize("stage", ["hidden", "train", "generate", "benchmark"])
def test_stages_that_compute_on_a_gpu_ask_for_room_first(stage, tmp_path, monkeypatch):
    def asked(device):
        raise AskedError(device)

    job = Job(stage, tmp_path / "out", {}, {}, {"device": "cuda:1"})
    room, build = {
        "hidden": (hidden, lambda: hidden.hidden(job, tmp_path)),
        "train": (training, lambda: training.train(job, tmp_path)),
        "generate": (responses, lambda: responses.generate_in_process(job, None, tmp_path)),
        "benchmark": (measure, lambda: measure.measure_in_process(job, None, [], None, tmp_path)),
    }[stage]
    monkeypatch.setattr(room, "make_room", asked)
    with pytest.raises(AskedError, match="cuda:1"):
        build()


def test_a_server_of_a_job_alone_asks_for_room_first(on_gpu, manifest, target, tmp_path):
    with shared(replace(on_gpu, linger=600.0), manifest, [], tmp_path):
        servers = pids(tmp_path)
    with server(on_gpu, target, tmp_path / "own.log"):
        assert not any(map(alive, servers))
