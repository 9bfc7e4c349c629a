"""Which target model, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.lib.ground.errors import StageError
from scripts.lib.sources.settings import Address, checked_revision

KINDS = ("hub", "path", "wheel")


@dataclass(frozen=True)
class TargetSettings:
    """Where the target comes from; `member` is a glob over the files of a wheel."""

    address: Address
    member: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "TargetSettings":
        """Read the tracked slice {"target": {source, member?, revision?}}; StageError when the kind lacks what it needs."""
        target = settings["target"]
        address = Address.of(target["source"], KINDS)
        chosen = cls(address, target.get("member"), target.get("revision"))
        if address.kind == "hub":
            checked_revision(target["source"], chosen.revision)
        if address.kind == "wheel" and chosen.member is None:
            raise StageError(f"target {target['source']}: no member; set target.member to a glob over the wheel's files, such as '*.gguf'")
        return chosen
