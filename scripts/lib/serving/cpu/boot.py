"""Stands in for torchvision before SGLang is imported.

SGLang imports two names of it for models that see pictures, also when a text model is served; torchvision itself would bring another
torch. transformers must go on knowing that there is none, so it is asked before the stand-in appears: it keeps the answer.
"""

import enum
import importlib.machinery
import importlib.util
import sys
import types

from transformers.utils.import_utils import is_torchvision_available


class InterpolationMode(enum.Enum):
    """The names of torchvision's enumeration."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def stand_in(name: str, **attributes: object) -> types.ModuleType:
    """An importable module `name` that holds `attributes`."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
    is_torchvision_available()
    functional = stand_in("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
    transforms = stand_in("torchvision.transforms", functional=functional, InterpolationMode=InterpolationMode)
    stand_in("torchvision", transforms=transforms)
