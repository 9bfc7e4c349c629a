"""What a test does to the stub server and its processes."""

import contextlib
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

PATIENCE_SECONDS = 20.0


def with_environment(settings, **more):
    """`settings` with more environment variables, which the stub reads."""
    return replace(settings, environment={**settings.environment, **more})


def pids(tmp_path):
    """The server's process and a child of it that left its session and group."""
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def alive(pid):
    """Whether the process runs: not one that is dead and not yet waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def eventually(condition):
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if condition():
                return True
        time.sleep(0.02)
    return False


def crash(url):
    """Let the stub at `url` crash."""
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{url}/crash", timeout=5)


def starts(tmp_path):
    """How often the stub was started."""
    return len((tmp_path / "starts").read_text())
