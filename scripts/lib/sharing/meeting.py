"""Where processes that share this machine's GPUs find each other."""

import os
import tempfile
from pathlib import Path


def lock_folder() -> Path:
    """The folder that all of this user's runs on this machine share."""
    return Path(tempfile.gettempdir()) / f"aerie-{os.getuid()}"
