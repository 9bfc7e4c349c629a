"""A real SGLang server on the CPU, for the tests that need one.

Use, in a module whose every test may wait for the start (half a minute to two minutes):

    pytest_plugins = ["tests.sglang_parts"]
    pytestmark = pytest.mark.sglang

    def test_answers(sglang_server): ...   # sglang_server.url, .target (HF folder of the model that it serves), .log, .running

The server is started once a session and shared: leave it running, and kill nothing of it. A test that kills servers starts its own with
`server(sglang_settings, sglang_target, log)`.
The server has the hook that writes states at BOUNDARIES into `.states`, of requests that ask for them, and prefills 64 tokens at a time.
SGLang's interpreter is AERIE_SGLANG_PYTHON, else `.venv-sglang-cpu/bin/python`, which `make sglang-cpu` sets up; without it the tests skip.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.lib.serving.running import Running
from scripts.lib.serving.server import server
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.states.served import Serving, hook_flags
from scripts.lib.states.served_models import modules_of
from tests.tiny import save_tiny_target

REPO = Path(__file__).parents[1]
BOUNDARIES = [2, 4, 5]
CHUNKS = ["--chunked-prefill-size", "64"]
START_SECONDS = 900.0  # half a minute on two idle cores


@dataclass(frozen=True)
class RealServer:
    """The shared server: where it answers, what it serves, its log, and where its hook writes states: one test alone may ask for them."""

    url: str
    target: Path
    log: Path
    running: Running
    states: Path


def sglang_python() -> Path:
    """SGLang's own interpreter; skips the test when there is none."""
    path = Path(os.environ.get("AERIE_SGLANG_PYTHON") or REPO / ".venv-sglang-cpu/bin/python")
    if not path.exists():
        pytest.skip(f"no SGLang at {path}: set it up with `make sglang-cpu` or name its interpreter in AERIE_SGLANG_PYTHON")
    return path


@pytest.fixture(scope="session")
def sglang_settings() -> ServerSettings:
    """Settings of a server on the CPU."""
    return ServerSettings(python=str(sglang_python()), device="cpu", start_timeout=START_SECONDS)


@pytest.fixture(scope="session")
def sglang_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real Llama with its tokenizer and chat template in HF layout, context 512."""
    return save_tiny_target(tmp_path_factory.mktemp("sglang_target"))


@pytest.fixture(scope="session")
def sglang_server(sglang_settings: ServerSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The one server of the session; its processes share it, and the one that started it is the last to leave."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    address, target, log, states = folder / "sglang.url", folder / "sglang_target", folder / "sglang.log", folder / "sglang_states"
    with (folder / "sglang.users").open("w") as users, contextlib.ExitStack() as stack:
        with locked(folder / "sglang.start"):
            if address.exists():
                running = stack.enter_context(server(ServerSettings(urls=[address.read_text()]), target, log))
            else:
                save_tiny_target(target)
                hooked = Serving(sglang_settings, target, "bfloat16", tuple(BOUNDARIES), states).hooked
                flags = [*hook_flags(modules_of(target), BOUNDARIES, states), *CHUNKS]
                running = stack.enter_context(server(hooked, target, log, flags))
                stack.callback(fcntl.flock, users, fcntl.LOCK_EX)  # once the others have left
                address.write_text(running.urls[0])
                stack.callback(remove, address, folder / "sglang.start")
            fcntl.flock(users, fcntl.LOCK_SH)
        yield RealServer(running.urls[0], target, log, running, states)


def remove(address: Path, lock: Path) -> None:
    """Let nobody come to a server that is about to end."""
    with locked(lock):
        address.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
