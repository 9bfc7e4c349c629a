"""The engine `sglang`: states from a server that aerie starts, which writes them to local files itself.

The server's forward passes are its own: which rows share one changes the last bits of their states, from run to run. The reference is
transformers in this process, on `runtime.device`, and so a check by another implementation.
"""

import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scripts.lib.engines.protocol import Completion, Request, RowStates, StateRequest, TargetEngine
from scripts.lib.engines.settings import TargetShape
from scripts.lib.ground.errors import StageError
from scripts.lib.serving.server import server
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.states.hook import aerie_states_hook
from scripts.lib.states.served_asking import Asking
from scripts.lib.states.served_models import FLAGS, Modules, check_flags, modules_of
from scripts.lib.states.served_pieces import Inbox

HOOK = Path(aerie_states_hook.__file__)
# SGLang wants room for the token that it writes after a row that fills the context, and asks to be sure.
ROOM_TOKENS = 8
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
CACHE_TOKENS = 262_144  # enough to fill a GPU with prompts; the rest of its memory is the reference's
VERSIONS = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in ('sglang', 'torch')}))"


@dataclass(frozen=True)
class Serving:
    """How to start a server of the target in HF layout in `target` whose hook writes into `folder`."""

    settings: ServerSettings
    target: Path
    dtype: str
    boundaries: tuple[int, ...]
    folder: Path

    @classmethod
    def of(cls, runtime: Mapping[str, Any], target: Path, dtype: str, boundaries: Sequence[int], folder: Path) -> "Serving":
        """From the job's `runtime`. Servers of `urls` have no hook, so one is started beside them.

        Raises StageError for a flag or an architecture with which states cannot be had.
        """
        settings = replace(ServerSettings.of(runtime), urls=())
        check_flags(tuple(settings.flags))
        modules_of(target)
        return cls(settings, target, dtype, tuple(boundaries), folder)

    @property
    def hooked(self) -> ServerSettings:
        """The server's settings, with the hook where it is imported."""
        return replace(self.settings, modules=(HOOK.parent,), environment={LONGER_CONTEXT: "1", **self.settings.environment})

    @property
    def flags(self) -> list[str]:
        """What the server must be told; these win over the config's flags."""
        context = TargetShape.of(self.target).context
        cache = () if self.settings.on_cpu else ("--max-total-tokens", str(max(CACHE_TOKENS, context + ROOM_TOKENS)))
        hook = hook_flags(modules_of(self.target), self.boundaries, self.folder)
        return [*hook, *FLAGS, *cache, "--dtype", self.dtype, "--context-length", str(context + ROOM_TOKENS)]

    @contextlib.contextmanager
    def open(self) -> Iterator[Asking]:
        """Somebody to ask, for as long as the block runs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with server(self.hooked, self.target, self.folder.parent / "server.log", self.flags) as running:
            asking = Asking(running, Inbox(self.folder))
            try:
                yield asking
            finally:
                asking.close()
        shutil.rmtree(self.folder)

    def versions(self) -> dict[str, str]:
        """Versions of SGLang and its torch. Raises StageError when its interpreter cannot tell."""
        python = self.settings.interpreter()
        asked = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
        if asked.returncode:
            words = (asked.stderr.strip().splitlines() or ["no message"])[-1]
            raise StageError(f"{python}: no SGLang there ({words}); set it up with `make sglang` or set runtime.server.python")
        found: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
        return found


class ServedEngine:
    """A target whose states come from a server, which is started for the first of them.

    Answers, logits and the reference are those of `plain`, which is opened when it is needed.
    """

    def __init__(self, serving: Serving, plain: Callable[[], TargetEngine]) -> None:
        self.serving, self.plain = serving, plain
        self._stack = contextlib.ExitStack()
        self._asking: Asking | None = None
        self._announced: Iterator[StateRequest] = iter(())

    def announce(self, rows: Iterable[StateRequest]) -> None:
        """The server may begin with `rows`: after those announced before, their states will be wanted, in this order."""
        if self._asking:
            self._asking.announce(rows)
        else:
            self._announced = itertools.chain(self._announced, rows)

    def close(self) -> None:
        """End the server."""
        self._asking = None
        self._stack.close()

    def states(self, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        """States of `rows` at the `boundaries` that the server was told."""
        if self._asking is None:
            self._asking = self._stack.enter_context(self.serving.open())
            self._asking.announce(self._announced)
        return [self._asking.take(row) for row in rows]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers of the reference."""
        return self.plain().generate(requests)

    def lane(self) -> contextlib.AbstractContextManager[None]:
        """The server decides what runs together."""
        return contextlib.nullcontext()

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """As the reference's."""
        return self.plain().beside()

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Logits [F, V] of final states [F, H], by the reference's head."""
        return self.plain().logits(final)

    def reference(self, input_ids: Sequence[int], boundaries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`aux` [T, 3, H] and `final` [T, H] of one row by transformers."""
        return self.plain().reference(input_ids, boundaries)


def hook_flags(modules: Modules, boundaries: Sequence[int], folder: Path) -> list[str]:
    """The flags that let SGLang import the hook and put it on the two modules that it needs."""
    hook = {
        "name": "aerie-states",
        "target_modules": [modules.decoder, modules.logits],
        "hook_factory": f"{HOOK.stem}:factory",
        "config": {"folder": str(folder.resolve()), "boundaries": list(boundaries)},
    }
    return ["--forward-hooks", json.dumps([hook])]
