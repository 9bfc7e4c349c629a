"""GPUs for one server alone: a lock per GPU that the kernel drops when the last process that holds it dies."""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.sharing.meeting import lock_folder

log = logging.getLogger(__name__)
WAIT_SECONDS = 120.0  # a server whose aerie was killed is just being ended, and then its GPU is free
POLL_SECONDS = 0.5
# Asked of SGLang's own interpreter: its torch decides what it sees, CUDA_VISIBLE_DEVICES included.
VISIBLE = "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))"


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process was granted: its `token` in CUDA_VISIBLE_DEVICES and its `uuid`, the same in every process."""

    token: str
    uuid: str


@dataclass(frozen=True)
class Claim:
    """The GPUs of one server, and the descriptors of the locks that hold them."""

    gpus: tuple[Gpu, ...] = ()
    locks: tuple[int, ...] = ()

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES for the server."""
        return ",".join(gpu.token for gpu in self.gpus)


def granted(settings: ServerSettings) -> list[Gpu]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, of them the one that `device` names.

    Raises StageError when SGLang's interpreter cannot tell.
    """
    asked = subprocess.run([settings.interpreter(), "-c", VISIBLE], capture_output=True, text=True, check=False)
    if asked.returncode:
        words = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise StageError(f"{settings.interpreter()}: its torch cannot list the GPUs ({words}); check it with `python -c 'import torch'`")
    uuids = json.loads(asked.stdout.splitlines()[-1])
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(uuids))))
    gpus = [Gpu(token.strip(), uuid) for token, uuid in zip(listed.split(","), uuids, strict=False)]
    _, named, number = settings.device.partition(":")
    return gpus[int(number) : int(number) + 1] if named else gpus


@contextlib.contextmanager
def claimed_gpus(settings: ServerSettings, folder: Path | None = None) -> Iterator[Claim]:
    """Hold tp x dp of the granted GPUs; on a CPU nothing is held.

    Raises StageError when fewer are granted, or too many of them are held by others for `WAIT_SECONDS`.
    """
    if settings.on_cpu:
        yield Claim()
        return
    wanted, gpus = settings.tp * settings.dp, granted(settings)
    if wanted > len(gpus):
        raise StageError(
            f"runtime.server: tp {settings.tp} x dp {settings.dp} needs {wanted} GPUs, {len(gpus)} are granted "
            f"(CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); lower tp or dp, or ask for more GPUs"
        )
    with contextlib.ExitStack() as stack:
        yield hold(gpus, wanted, folder or lock_folder(), stack)


def hold(gpus: list[Gpu], wanted: int, folder: Path, stack: contextlib.ExitStack) -> Claim:
    """Lock the first `wanted` free ones of `gpus`, all or none, for as long as `stack` is open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.ExitStack() as attempt:
            held: list[tuple[Gpu, TextIO]] = []
            for gpu in gpus:
                if len(held) < wanted and (file := locked(lock_path(folder, gpu), attempt)):
                    held.append((gpu, file))
            if len(held) == wanted:
                stack.enter_context(attempt.pop_all())
                return Claim(tuple(gpu for gpu, _ in held), tuple(file.fileno() for _, file in held))
        if time.monotonic() > deadline:
            holders = ", ".join(f"{gpu.token} by process {lock_path(folder, gpu).read_text()}" for gpu in gpus)
            raise StageError(f"{folder}: {wanted} of {len(gpus)} GPUs wanted, last held: {holders}; wait for those runs or stop them")
        time.sleep(POLL_SECONDS)


def lock_path(folder: Path, gpu: Gpu) -> Path:
    """The lock file of `gpu`."""
    return folder / f"gpu-{gpu.uuid}.lock"


def locked(path: Path, stack: contextlib.ExitStack) -> TextIO | None:
    """The lock file at `path`, locked and closed with `stack`; None when another process holds it."""
    file = stack.enter_context(path.open("a+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
