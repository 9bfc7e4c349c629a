"""GPUs claimed for one server alone."""

import fcntl
import os
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.serving import claim
from scripts.lib.serving.claim import claimed_gpus
from scripts.lib.serving.health import request
from scripts.lib.serving.server import server
from tests.serving_parts import pids

pytest_plugins = ["tests.serving_fixtures"]


@pytest.fixture
def gpus(settings, monkeypatch):
    """Settings of a machine whose GPUs are a to d, of which a to c are granted."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("STUB_GPUS", "a,b,c")
    monkeypatch.setattr(claim, "WAIT_SECONDS", 0.0)
    return replace(settings, device="cuda")


def test_more_gpus_than_granted_are_an_error_before_the_start(gpus, target, tmp_path):
    with (
        pytest.raises(StageError, match=r"tp 2 x dp 2 needs 4 GPUs, 3 are granted \(CUDA_VISIBLE_DEVICES 4,5,6\)"),
        server(replace(gpus, tp=2, dp=2), target, tmp_path / "server.log"),
    ):
        pass
    assert not (tmp_path / "starts").exists()


def test_two_servers_never_hold_one_gpu(gpus, tmp_path):
    with claimed_gpus(replace(gpus, tp=2), tmp_path) as first, claimed_gpus(gpus, tmp_path) as second:
        assert (first.visible, second.visible) == ("4,5", "6")
        with pytest.raises(StageError, match=rf"1 of 3 GPUs wanted, last held: 4 by process {os.getpid()}"), claimed_gpus(gpus, tmp_path):
            pass
    with claimed_gpus(replace(gpus, tp=3), tmp_path) as again:
        assert again.visible == "4,5,6"


def test_a_failed_claim_keeps_nothing(gpus, tmp_path):
    with claimed_gpus(gpus, tmp_path):
        with pytest.raises(StageError), claimed_gpus(replace(gpus, tp=3), tmp_path):
            pass
        with claimed_gpus(replace(gpus, tp=2), tmp_path) as rest:
            assert rest.visible == "5,6"


def test_a_device_with_a_number_is_that_gpu_alone(gpus, tmp_path):
    with claimed_gpus(replace(gpus, device="cuda:1"), tmp_path) as held:
        assert held.visible == "5"
    with pytest.raises(StageError, match="1 are granted"), claimed_gpus(replace(gpus, device="cuda:1", tp=2), tmp_path):
        pass


def test_the_claim_lasts_until_the_servers_last_process_is_gone(gpus, target, tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "lock_folder", lambda: tmp_path)
    with server(gpus, target, tmp_path / "server.log") as running:
        found = request(f"{running.urls[0]}/server_info")
        assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "4"
        assert "cpu" not in found["arguments"]
        guard = Path(f"/proc/{pids(tmp_path)[0]}/stat").read_text().rpartition(")")[2].split()[1]
        assert str(tmp_path / "gpu-a.lock") in [os.readlink(link) for link in Path(f"/proc/{guard}/fd").iterdir()]
        child = [os.readlink(link) for link in Path(f"/proc/{pids(tmp_path)[1]}/fd").iterdir()]
        assert str(tmp_path / "gpu-a.lock") not in child
    with (tmp_path / "gpu-a.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
