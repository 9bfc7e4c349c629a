"""Keepers of servers for a test alone: `pytest_plugins = ["tests.serving_fixtures", "tests.pool_fixtures"]`, which listen in `folder`."""

import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.lib.serving import pool
from scripts.lib.sharing import leaving
from tests import serving_parts
from tests.serving_parts import with_environment


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(serving_parts, "PATIENCE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Where keepers of a test listen: the paths of sockets must be short."""
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("TMPDIR", short)
        path = Path(short) / f"aerie-{os.getuid()}"
        for room in (pool, leaving):
            monkeypatch.setattr(room, "lock_folder", lambda: path)
        yield path


@pytest.fixture
def kept(settings, tmp_path, folder):
    """Settings of servers that outlive their job until the test ends."""
    yield replace(settings, linger=60.0)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"serving.keeper" in words and str(tmp_path).encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.fixture
def manifest(target, tmp_path):
    """The manifest behind which a target lies."""
    folder = tmp_path / "published"
    shutil.copytree(target, folder)
    (folder / "manifest.json").write_text("{}")
    return folder / "manifest.json"


@pytest.fixture
def on_gpu(kept, tmp_path, monkeypatch):
    """Settings of a machine with one GPU."""
    monkeypatch.setenv("STUB_GPUS", f"GPU-{tmp_path.name}")
    monkeypatch.setattr("scripts.lib.serving.claim.WAIT_SECONDS", 0.0)
    return replace(with_environment(kept, STUB_GPUS=f"GPU-{tmp_path.name}"), device="cuda")
