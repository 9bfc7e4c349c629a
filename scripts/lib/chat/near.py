"""Near duplicates by MinHash: signatures are cut into bands, and only texts that agree in a whole band are compared.

Shapes: R texts, B bands of a signature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.lib.chat.signature import MIX, PLACES

CHANCE = 0.99  # with which two texts as similar as the threshold agree in some band


def places_per_band(threshold: float) -> int:
    """The most places of a band at which texts as similar as `threshold` still share a band with probability `CHANCE`."""
    return max(size for size in range(1, PLACES + 1) if size == 1 or 1 - (1 - threshold**size) ** (PLACES // size) >= CHANCE)


def bands(signatures: Sequence[bytes], keys: Sequence[int], threshold: float) -> np.ndarray:
    """u64 [R, B]: a hash of every band of R signatures; texts of different `keys` share none."""
    places = np.frombuffer(b"".join(signatures), dtype="<u4").reshape(-1, PLACES).astype(np.uint64)
    size = places_per_band(threshold)
    number = PLACES // size
    cut = places[:, : number * size].reshape(-1, number, size)
    total: np.ndarray = np.array(keys, dtype=np.uint64)[:, None] * MIX + np.arange(number, dtype=np.uint64)
    for place in range(size):
        total = (total ^ (total >> np.uint64(29))) * MIX + cut[:, :, place]
    return total


def meeting(hashes: np.ndarray) -> np.ndarray:
    """bool [R]: which texts share a band of `hashes`, u64 [R, B], with another."""
    _, inverse, counts = np.unique(hashes.ravel(), return_inverse=True, return_counts=True)
    return np.any((counts[inverse] > 1).reshape(hashes.shape), axis=1)


@dataclass(frozen=True)
class Entry:
    """One text of a source with the hashes of its bands."""

    name: str
    source: str
    signature: bytes
    bands: Sequence[int]


@dataclass
class NearIndex:
    """Finds the entries that a text nearly repeats."""

    threshold: float
    buckets: dict[int, list[Entry]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Let later texts be compared with `entry`."""
        for band in entry.bands:
            self.buckets.setdefault(band, []).append(entry)

    def find(self, entry: Entry) -> tuple[Entry, float] | None:
        """The most similar entry of another source at or above the threshold, the first by name among equals, and its similarity."""
        met = {other.name: other for band in entry.bands for other in self.buckets.get(band, ()) if other.source != entry.source}
        if not met:
            return None
        candidates = [met[name] for name in sorted(met)]
        matrix = np.frombuffer(b"".join(other.signature for other in candidates), dtype="<u4").reshape(-1, PLACES)
        shares = (matrix == np.frombuffer(entry.signature, dtype="<u4")).mean(axis=1)
        best = int(shares.argmax())
        return (candidates[best], float(shares[best])) if shares[best] >= self.threshold else None
