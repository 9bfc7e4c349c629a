"""Before a job computes on a GPU itself: servers that only wait for their next job go."""

import contextlib
import logging
import os

from scripts.lib.sharing.meeting import lock_folder
from scripts.lib.sharing.talking import connection_to, received, tell

log = logging.getLogger(__name__)
END_SECONDS = 120.0  # the kernel takes a while to free the memory of eight GPUs
ANSWER_SECONDS = 5.0  # a keeper answers at once unless a job has its servers


def make_room(device: str) -> None:
    """End servers that wait on this machine for a next job, where they hold GPUs that this process may use; none for a CPU.

    What another job asks at this moment stays, with a warning.
    """
    if not device.startswith("cuda"):
        return
    for path in sorted(lock_folder().glob("keeper-gpu-*.sock")):
        if (connection := connection_to(path)) is None:
            continue
        with contextlib.closing(connection):
            tell(connection, {"leave": os.environ.get("CUDA_VISIBLE_DEVICES")})
            connection.settimeout(ANSWER_SECONDS)
            reply = received(connection)
            if reply and reply["leaving"]:
                connection.settimeout(END_SECONDS)
                received(connection)  # nothing more comes: the connection ends with the last server
            elif reply is None and path.exists():
                log.warning("%s: another job asks the servers there; their share of GPU memory is not free", path)
