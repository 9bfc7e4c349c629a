"""The process between aerie and one server: when aerie ends, however it ends, the server ends with all of its processes.

Run as a program: `python guardian.py COMMAND…`. Its standard input is a pipe whose other end aerie alone holds: end of file means that
aerie closed it or died, also by kill -9. As a child subreaper (prctl(2)) it inherits every orphan below it, so that a process which
left the server's group and session is found too, and the GPU is free once the guardian has exited.
It exits with the server's own code, 128 + N after signal N.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STDIN = 0
PARENT_CHECK_SECONDS = 1.0  # a copy of the pipe in a forked child of aerie would hide aerie's death; its new parent does not
REAP_SECONDS = 0.05


def prctl(option: int, value: int) -> None:
    """Set a property of this process; raises OSError when the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_with_guardian() -> None:
    """In the server before it starts: die when the guardian itself is killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait(server: int, owner: int) -> None:
    """Return when the process `server` has exited, or the process `owner` closed the pipe or is gone."""
    exited = os.pidfd_open(server)
    while os.getppid() == owner:
        ready, _, _ = select.select([STDIN, exited], [], [], PARENT_CHECK_SECONDS)
        if ready:
            return


def end_everything() -> None:
    """Kill and reap all processes below this one; returns when there are none, and so their memory is free."""
    while pids := children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(REAP_SECONDS)


def children() -> list[int]:
    """Ids of this process's children; its grandchildren become that once their parent is dead."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(stat.parent.name))
    return found


def main(command: list[str]) -> int:
    """Run `command` until it exits or aerie is gone, then end all that it left; its exit code."""
    owner = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_guardian)  # noqa: PLW1509 (no threads here)
    try:
        wait(server.pid, owner)
        code = server.poll()
    finally:
        end_everything()
    return 0 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
