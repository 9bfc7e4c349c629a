"""The command line and environment of a server, on a GPU or on a CPU."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.serving.process import Launch
from scripts.lib.serving.settings import ServerSettings

CPU_FOLDER = Path(__file__).parent / "cpu"
# `intel_amx` as --attention-backend would be rewritten to `torch_native` on a processor without AMX, which EAGLE does not take.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"),
    *("--max-total-tokens", "16384", "--grammar-backend", "none", "--disable-radix-cache", "--sleep-on-idle"),
)
CPU_MEMORY_FRACTION = 0.3
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # listening on every address, a server is reached on this one
# Another environment's own, and a container's habit that would make every start compile all of SGLang again.
NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")


def launch(settings: ServerSettings, target: Path, port: int, extra: Sequence[str] = (), gpus: str = "") -> Launch:
    """How to start a server of `target` on `port`; `gpus` is its CUDA_VISIBLE_DEVICES.

    The config's flags come after aerie's, and `extra` after those: SGLang takes the last one.
    """
    python = settings.interpreter()
    flags = [*common_flags(settings, target, port), *(CPU_FLAGS if settings.on_cpu else ()), *settings.flags, *extra]
    program = [str(CPU_FOLDER / "launch.py")] if settings.on_cpu else ["-m", "sglang.launch_server"]
    return Launch([str(python), *program, *flags], environment(settings, python, gpus))


def common_flags(settings: ServerSettings, target: Path, port: int) -> list[str]:
    """Flags of every server."""
    fraction = settings.memory_fraction or (CPU_MEMORY_FRACTION if settings.on_cpu else None)
    return [
        *("--model-path", str(target.resolve()), "--host", settings.host, "--port", str(port)),
        *("--tp-size", str(settings.tp), "--dp-size", str(settings.dp), "--log-level-http", "warning"),
        *(("--mem-fraction-static", str(fraction)) if fraction else ()),
    ]


def environment(settings: ServerSettings, python: Path, gpus: str) -> dict[str, str]:
    """This process's environment, as if SGLang's were activated; the config's `environment` comes last."""
    own = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    own |= {"PATH": joined(python.parent, own.get("PATH")), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": gpus}
    if settings.on_cpu:
        # A second OpenMP thread waits at barriers for a busy core: 13 times slower. Snakemake sets it to the job's threads.
        own |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    for folder in (*settings.modules, *([CPU_FOLDER] if settings.on_cpu else [])):
        own["PYTHONPATH"] = joined(folder, own.get("PYTHONPATH"))
    return own | dict(settings.environment)


def joined(first: Path, rest: str | None) -> str:
    """`first` in front of the search path `rest`."""
    return os.pathsep.join([str(first), *([rest] if rest else [])])


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise StageError(f"runtime.server.host {host}: {error}; give an IPv4 address of this machine") from error
        return int(probe.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    return f"http://{EVERYWHERE.get(host, host)}:{port}"
