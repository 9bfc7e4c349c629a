"""How a server is started: the untracked `runtime.server`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.ground.errors import StageError


@dataclass(frozen=True)
class ServerSettings:
    """Where SGLang is, how one server of it runs, and how often it may come back.

    `python` None is the environment that `make sglang` or `make sglang-cpu` sets up, by `device`: `cpu`, `cuda` or `cuda:N`.
    With `urls`, nothing is started: those servers are used as they are.
    `modules` are folders from which the server can import, for hooks.
    `memory_fraction` None leaves the share of memory for weights and KV cache to SGLang. Port 0 takes a free one.
    `restarts` counts crashes in a row: a server that ran for `supervisor.STEADY_SECONDS` starts the count anew.
    `linger` is how long servers that jobs share outlive the last of them, in seconds. `side_by_side` has both servers of a cell
    up at once.
    """

    python: str | None = None
    urls: Sequence[str] = ()
    device: str = "cpu"
    tp: int = 1
    dp: int = 1
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[Path] = ()
    memory_fraction: float | None = None
    start_timeout: float = 1800.0
    restarts: int = 5
    host: str = "127.0.0.1"
    port: int = 0
    linger: float = 120.0
    side_by_side: bool = True

    @classmethod
    def of(cls, runtime: Mapping[str, Any]) -> "ServerSettings":
        """From the config's `runtime`: its `server`, and the `device` that all stages share."""
        return cls(device=runtime["device"], **runtime.get("server", {}))

    @property
    def on_cpu(self) -> bool:
        """Whether the server computes without a GPU."""
        return self.device == "cpu"

    def interpreter(self) -> Path:
        """The absolute path of SGLang's own Python; a link is kept, as it is what makes Python find the environment.

        Raises StageError when there is none.
        """
        command = "sglang-cpu" if self.on_cpu else "sglang"
        path = Path(os.path.abspath(Path(self.python or f".venv-{command}/bin/python").expanduser()))
        if not os.access(path, os.X_OK):
            raise StageError(f"{path}: no interpreter of SGLang's there; set it up with `make {command}` or set runtime.server.python")
        return path
