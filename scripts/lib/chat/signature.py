"""MinHash signatures of texts: how much two prompts share, from a few hundred bytes of each.

A signature holds, for each of many hash functions, the smallest hash of the text's shingles (runs of words). Two signatures agree in a
place with the probability that a shingle of either text is in both: the Jaccard similarity. Broder, "On the resemblance and containment
of documents", 1997.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np
from rensa import RMinHash

from scripts.lib.chat.messages import Message

PLACES = 128  # numbers in a signature: the similarity has a standard error of at most 0.045
SHINGLE = 3  # words: one changed word of forty leaves a similarity of 0.85
SEED = 1
TEXTS_AT_ONCE = 2048
# Scripts that are written without spaces count each character as a word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+")
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def normalise(text: str) -> str:
    """`text` in one Unicode form, one case and single spaces, so that copies of a prompt are seen as such."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def opening(messages: Iterable[Message]) -> str:
    """What the user says before the first answer."""
    before = takewhile(lambda message: message.role != "assistant", messages)
    return "\n".join(message.content or "" for message in before if message.role == "user")


def signatures(texts: Sequence[str]) -> list[bytes]:
    """One signature per text: `PLACES` little-endian u32, 512 bytes. Case, spacing and punctuation do not count.

    They depend on the text and the version of rensa alone, not on the machine or on the other texts.
    """
    starts = range(0, len(texts), TEXTS_AT_ONCE)
    return [row for start in starts for row in signatures_of_batch(texts[start : start + TEXTS_AT_ONCE])]


def signatures_of_batch(texts: Sequence[str]) -> Iterator[bytes]:
    """The signatures of texts that are all in memory as words. A text without a word is one shingle, the text itself."""
    words = [WORD.findall(normalise(text)) or [normalise(text)] for text in texts]
    hashes = RMinHash.hash_token_sets(words)
    lengths = np.fromiter(map(len, hashes), dtype=np.int64, count=len(hashes))
    flat = np.concatenate([np.array(row, dtype=np.uint64) for row in hashes])
    shingles, counts = runs(flat, lengths, SHINGLE)
    offsets = [0, *np.cumsum(counts).tolist()]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, PLACES, SEED)
    for row in np.array(matrix.to_rows(), dtype="<u4"):
        yield row.tobytes()


def runs(hashes: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A hash of every run of `size` neighbours within each text, and the number of runs per text.

    `hashes` u64 [N] holds the words of all texts end to end, `lengths` i64 [R] the words of each, at least one. A text shorter
    than `size` is one run. The hash weighs each place differently, so that the order of the words counts.
    """
    padded = np.concatenate([hashes, np.zeros(size - 1, dtype=np.uint64)])
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(hashes)) - np.repeat(starts, lengths)  # of a word in its text
    left = np.repeat(lengths, lengths) - place  # words from this one to the end of its text
    total = np.zeros(len(hashes), dtype=np.uint64)
    for offset in range(size):
        inside = left > offset
        total = total * MIX + np.where(inside, padded[offset : offset + len(hashes)], np.uint64(0))
        total ^= total >> np.uint64(29)
    return total[(left >= size) | (place == 0)], np.maximum(lengths - size + 1, 1)
