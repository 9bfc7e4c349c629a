"""One server process below its guardian: started, asked whether it lives, ended."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.ground.errors import StageError
from scripts.lib.serving import guardian

END_SECONDS = 60.0  # the kernel takes a while to free the memory of eight GPUs
TAIL_BYTES = 2**18
# The last line of a Python traceback, argparse's complaint, and what SGLang writes when one of its processes was killed.
ERROR = re.compile(
    r"^(?:\[[^\]]*\] )?(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$|: error: | crashed with exit code "
)


@dataclass(frozen=True)
class Launch:
    """What to run: the command line and the whole environment of the server."""

    command: Sequence[str]
    environment: Mapping[str, str]


class ServerProcess:
    """A started server. `locks` are file descriptors of GPU claims, held until its last process is gone."""

    def __init__(self, launch: Launch, log: Path, locks: Sequence[int] = ()) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(f"\n$ {shlex.join(launch.command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", guardian.__file__, *launch.command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(launch.environment),
                pass_fds=tuple(locks),
                start_new_session=True,  # Ctrl-C reaches aerie alone, which then ends the server
            )

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """The server's exit code, waited for up to `seconds`; None while it runs."""
        try:
            return self._guardian.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the server and everything below it; returns when all of it is gone. Raises StageError when the kernel cannot."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        if self.exit_code(END_SECONDS) is None:
            remedy = f"look for processes in state D below process {self._guardian.pid}"
            raise StageError(f"{self.log}: the server did not end within {END_SECONDS:.0f} s; {remedy}")

    def last_error(self) -> str:
        """The last error that this process wrote to its log, else its last line."""
        return last_error(self.log, self.log_start)


def last_error(log: Path, start: int) -> str:
    """The last line of `log` from byte `start` on that names an error, else the last line, else a note that there is none."""
    if not log.exists():
        return "nothing, the file is gone"
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if ERROR.search(line)]
    return (errors or lines or ["nothing was written"])[-1][:400]
