"""Stage `vocab`: the draft vocabulary and its tables."""

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.lib.chat.rows import TOKEN_SCHEMA
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.vocabulary.counts import choose, trained_ids
from scripts.lib.vocabulary.tables import read_vocabulary, tables
from scripts.lib.vocabulary.vocab import vocab
from tests.chat_parts import manifest_of, run_stage, save_target


def counts_of(size, **counts):
    result = np.zeros(size, dtype=np.int64)
    for token, count in counts.items():
        result[int(token[1:])] = count
    return result


def merged(folder, **splits):
    """Publish rows of (input ids, spans) per split as stage `merge` would; the manifest's path."""
    folder.mkdir()
    shards = []
    for split, rows in splits.items():
        path = folder / f"{split}-00000.parquet"
        texts = dict.fromkeys(("id", "dataset", "group", "prompt_hash"), "x")
        full = [texts | {"input_ids": ids, "loss_spans": [{"start": s, "end": e} for s, e in spans]} for ids, spans in rows]
        pl.DataFrame(full, schema=TOKEN_SCHEMA).write_parquet(path)
        shards.append(Shard.of(path, len(rows)))
    Manifest("merge", {}, {}, Counts(len(shards), len(shards)), shards).write(folder)
    return folder / "manifest.json"


def run(root, manifest, size=4):
    target = save_target(root / "target") / "manifest.json"
    return run_stage(vocab, root, "vocab", {"merged": manifest, "target": target}, {"vocab": {"size": size}})


def test_fewer_distinct_tokens_than_the_size_are_filled_from_the_lowest_ids():
    """https://github.com/sgl-project/SpecForge/pull/76: the table came out shorter than the drafter's head."""
    ids = choose(counts_of(20, t7=5, t9=3), 6, [19])
    assert ids.tolist() == [0, 1, 2, 7, 9, 19]
    vocabulary = tables(ids, 20)
    assert (len(vocabulary.d2t), int(vocabulary.t2d.sum()), len(vocabulary.t2d)) == (6, 6, 20)


def test_ties_go_to_the_lower_id_and_end_of_turn_is_in_though_rare():
    assert choose(counts_of(20, t5=2, t3=2, t8=2, t9=7), 3, [19]).tolist() == [3, 9, 19]


def test_d2t_holds_offsets():
    """https://github.com/SafeAILab/EAGLE/issues/222: absolute ids there made the drafter propose wrong tokens."""
    vocabulary = tables(np.array([3, 7, 9]), 12)
    assert vocabulary.d2t.tolist() == [3, 6, 7]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [3, 7, 9]
    assert vocabulary.target_ids.tolist() == [3, 7, 9]


def test_the_whole_vocabulary_is_all_zero_offsets():
    vocabulary = tables(choose(counts_of(12, t3=1), 12, [2]), 12)
    assert vocabulary.d2t.tolist() == [0] * 12
    assert bool(vocabulary.t2d.all())


@pytest.mark.parametrize(
    ("size", "text"), [(13, "larger than the target's vocabulary of 12"), (1, "smaller than the target's 2 end-of-turn ids")]
)
def test_an_impossible_size_is_refused(size, text):
    with pytest.raises(StageError, match=text):
        choose(counts_of(12, t3=1), size, [2, 4])


def test_only_tokens_inside_spans_are_counted():
    rows = pl.DataFrame(
        {
            "input_ids": [[1, 2, 3, 4], [5, 6, 7, 8, 9]],
            "loss_spans": [[{"start": 2, "end": 4}], [{"start": 0, "end": 2}, {"start": 4, "end": 5}]],
        }
    )
    assert trained_ids(rows).tolist() == [3, 4, 5, 6, 9]


def test_the_stage_counts_the_train_split_alone_and_says_what_is_covered(tmp_path):
    train = [([100, 100, 5, 5, 6, 2], [(2, 6)]), ([9, 6, 5, 2], [(1, 4)])]
    folder = run(tmp_path, merged(tmp_path / "m", train=train, eval=[([1, 8, 8, 5, 2], [(1, 5)])]), size=3)
    vocabulary = read_vocabulary(folder / "manifest.json")
    assert vocabulary.target_ids.tolist() == [2, 5, 6]
    assert len(vocabulary.t2d) == 272
    facts = manifest_of(folder)["facts"]
    assert facts["coverage"] == {"train": 1.0, "eval": 0.5}
    assert facts["trained_tokens"] == {"train": 7, "eval": 4}
    assert (facts["size"], facts["distinct_trained"], facts["eos_ids"]) == (3, 3, [2])


def test_a_token_that_the_target_does_not_have_is_refused(tmp_path):
    with pytest.raises(StageError, match="token id 272 is outside the target's 272 ids"):
        run(tmp_path, merged(tmp_path / "m", train=[([1, 272], [(0, 2)])], eval=[]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t | {"d2t": t["d2t"] + torch.arange(4)}, "must hold offsets"),
        (lambda t: t | {"d2t": t["d2t"][:3]}, "must hold offsets"),
        (lambda t: t | {"t2d": t["t2d"].long()}, "wanted int64 and bool"),
        (lambda t: {"d2t": t["d2t"]}, "wanted d2t and t2d"),
    ],
    ids=["absolute ids", "short", "wrong type", "missing"],
)
def test_tables_that_disagree_are_never_read(tmp_path, change, text):
    folder = run(tmp_path, merged(tmp_path / "m", train=[([1, 5, 6], [(0, 3)])], eval=[([1, 5], [(0, 2)])]))
    path = folder / "draft_vocab.safetensors"
    save_file(change(load_file(path)), path)
    Manifest("vocab", {}, {}, Counts(0, 0), [Shard.of(path, 4)]).write(folder)
    with pytest.raises(StageError, match=text):
        read_vocabulary(folder / "manifest.json")
