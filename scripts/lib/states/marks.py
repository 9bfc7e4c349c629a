"""What a training and the process that dumps states for it tell each other: small files beside the shards that come and go.

The training says once in which order it will read the shards, and each of its processes how far it is in that order. The dumper says
how far it is. Both name places in the order, so that a shard that comes several times is told apart.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.lib.ground.files import write_json, write_text

RECEIPTS = "partial"
ORDER, READY, REFUSED, USED = "order.json", "ready", "refused", "used-"
POLL_SECONDS = 0.02


def receipt_path(folder: Path, shard: str) -> Path:
    """Where in the work `folder` it is written what became of the rows of `shard`."""
    return folder / RECEIPTS / f"{shard}.json"


def lost_places(folder: Path, shard: str) -> set[int]:
    """The numbers of the rows that were left out of `shard`, of those that it was to hold."""
    return {place for place, _, _ in json.loads(receipt_path(folder, shard).read_text())["rejected"]}


@dataclass(frozen=True)
class Order:
    """Names of `shards` as `ranks` processes read them, one after the other; one is wanted when they are `lead` places before it."""

    shards: Sequence[str]
    ranks: int
    lead: int


@dataclass(frozen=True)
class Marks:
    """The marks in `folder`."""

    folder: Path

    def clear(self) -> None:
        """Forget what an earlier attempt said; its shards stay."""
        for path in (self.folder / ORDER, self.folder / READY, self.folder / REFUSED, *self.folder.glob(f"{USED}*")):
            path.unlink(missing_ok=True)

    def announce(self, order: Order) -> None:
        """Say in which order shards will be read."""
        write_json(self.folder / ORDER, asdict(order))

    def order(self) -> Order | None:
        """In which order shards will be read, None before that is known."""
        path = self.folder / ORDER
        return Order(**json.loads(path.read_text())) if path.exists() else None

    def use(self, rank: int, place: int) -> None:
        """Say that process `rank` needs nothing before `place` any more."""
        write_text(self.folder / f"{USED}{rank}", str(place))

    def used(self, ranks: int) -> int | None:
        """Before which place none of `ranks` processes needs anything, None before all of them have begun."""
        paths = [self.folder / f"{USED}{rank}" for rank in range(ranks)]
        return min(int(path.read_text()) for path in paths) if all(path.exists() for path in paths) else None

    def make_ready(self, place: int) -> None:
        """Say that all shards before `place` that are still needed are there."""
        write_text(self.folder / READY, str(place))

    def ready(self) -> int:
        """Before which place every shard that is still needed is there."""
        path = self.folder / READY
        return int(path.read_text()) if path.exists() else 0

    def refuse(self, sentence: str) -> None:
        """Say why no more shards will come."""
        write_text(self.folder / REFUSED, sentence)

    def refusal(self) -> str | None:
        """Why no more shards will come, None while they do."""
        path = self.folder / REFUSED
        return path.read_text() if path.exists() else None
