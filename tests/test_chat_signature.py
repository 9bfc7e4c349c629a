"""MinHash signatures: equal on every machine, and as similar as their texts."""

import numpy as np
import pytest

from scripts.lib.chat.messages import Message
from scripts.lib.chat.near import Entry, NearIndex, bands, meeting, places_per_band
from scripts.lib.chat.signature import PLACES, normalise, opening, runs, signatures

WORDS = [f"word{number}" for number in range(400)]


def similarity(one: str, other: str) -> float:
    first, second = (np.frombuffer(signature, dtype="<u4") for signature in signatures([one, other]))
    return float((first == second).mean())


def changed(words: list[str], every: int) -> str:
    return " ".join("other" if place % every == 0 else word for place, word in enumerate(words))


def jaccard(one: str, other: str) -> float:
    first, second = (set(zip(words, words[1:], words[2:], strict=False)) for words in (one.split(), other.split()))
    return len(first & second) / len(first | second)


def test_a_signature_has_these_bytes_on_every_machine():
    (signature,) = signatures(["Write a haiku about rain."])
    assert len(signature) == 4 * PLACES
    assert signature[:16].hex() == "6e24e6e1c7f831e4945282c30be87be5"


def test_a_signature_does_not_depend_on_the_texts_beside_it():
    texts = [" ".join(WORDS[start : start + start % 7 + 1]) for start in range(40)] + [""]
    assert signatures(texts) == [signatures([text])[0] for text in texts]
    assert signatures([]) == []


@pytest.mark.parametrize("every", [10, 20, 60, 200])
def test_the_share_of_equal_places_is_the_jaccard_similarity(every):
    other = changed(WORDS, every)
    assert similarity(" ".join(WORDS), other) == pytest.approx(jaccard(" ".join(WORDS), other), abs=0.13)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("Hello,  World again", "hello world again!", 1.0),
        ("a b c", "c b a", 0.0),
        ("a b", "b a", 0.0),
        ("", ".", 0.0),
        ("ＡＢＣ", "abc", 1.0),
    ],
)
def test_case_spacing_and_punctuation_do_not_count_and_order_does(one, other, expected):
    assert similarity(one, other) == expected


def test_scripts_without_spaces_are_compared_by_character():
    assert 0.7 < similarity("你好世界请写一个程序来计算一个数的平方根", "你好世界请写一个程序来计算一个数的平方根吧") < 1


def test_runs_stay_within_their_text():
    hashes = np.arange(1, 9, dtype=np.uint64)
    found, counts = runs(hashes, np.array([5, 2, 1]), 3)
    assert counts.tolist() == [3, 1, 1]
    alone = [runs(hashes[start:end], np.array([end - start]), 3)[0] for start, end in ((0, 5), (5, 7), (7, 8))]
    assert found.tolist() == np.concatenate(alone).tolist()
    assert len(set(found.tolist())) == 5


def test_the_opening_is_what_the_user_says_before_the_first_answer():
    talk = [Message("system", "s"), Message("user", "a"), Message("tool", "t"), Message("user", "b"), Message("assistant", "c")]
    assert opening([*talk, Message("user", "d")]) == "a\nb"
    assert normalise("  Ａ \n b") == "a b"


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_texts_as_similar_as_the_threshold_share_a_band_nearly_always(threshold):
    size = places_per_band(threshold)
    assert 1 - (1 - threshold**size) ** (PLACES // size) >= 0.99
    draw = np.random.default_rng(0)
    first = draw.integers(0, 2**32, (300, PLACES), dtype=np.uint32)
    second = np.where(draw.random(first.shape) < threshold, first, first + 1)
    pairs = [row.astype("<u4").tobytes() for row in np.concatenate([first, second])]
    met = meeting(bands(pairs, [0] * 600, threshold))
    assert met.mean() > 0.97
    assert not meeting(bands(pairs, list(range(600)), threshold)).any()


def test_only_entries_of_other_sources_at_the_threshold_are_found():
    texts = [" ".join(WORDS), changed(WORDS, 200), changed(WORDS, 6)]
    marks = signatures(texts)
    hashes = bands(marks, [0] * 3, 0.8).tolist()
    index = NearIndex(0.8)
    index.add(Entry("whole", "A", marks[0], hashes[0]))
    assert index.find(Entry("x", "A", marks[1], hashes[1])) is None
    found = index.find(Entry("x", "B", marks[1], hashes[1]))
    assert found is not None and found[0].name == "whole" and found[1] > 0.9
    assert index.find(Entry("x", "B", marks[2], hashes[2])) is None
