"""A stub server and a target: `pytest_plugins = ["tests.serving_fixtures"]` gives `settings` and `target`."""

import sys
from pathlib import Path

import pytest

from scripts.lib.serving import server as serving
from scripts.lib.serving import supervisor
from scripts.lib.serving.settings import ServerSettings
from tests.tiny import save_tiny_target

STUB = Path(__file__).with_name("stub_sglang.py")


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A tiny target in HF layout."""
    return save_tiny_target(tmp_path_factory.mktemp("target"), layers=1)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A server whose interpreter runs the stub, with short pauses."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "HEALTH_POLL_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "EXIT_POLL_SECONDS", 0.05)
    monkeypatch.setattr(serving, "ATTACH_POLL_SECONDS", 0.05)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {STUB} "$@"\n')
    python.chmod(0o755)
    environment = {"STUB_STARTS": str(tmp_path / "starts"), "STUB_PIDS": str(tmp_path / "pids")}
    return ServerSettings(python=str(python), environment=environment, start_timeout=30, restarts=2)
