"""Stage `merge`: one deterministic mix whatever the order, the process or the interruption."""

import os
import signal
import subprocess
import sys

import polars as pl
import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.mixing.index import digests
from scripts.lib.mixing.merge import merge
from scripts.lib.mixing.split import tied_keys
from tests.chat_parts import manifest_of, published, run_stage, tokens

KILLED = """
import os, signal, sys
from pathlib import Path
from scripts.lib.ground.stage import Job, run
from scripts.lib.mixing import {module} as module
from scripts.lib.mixing.merge import merge

left = {calls}
real = module.{function}

def dying(*arguments, **options):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return real(*arguments, **options)

module.{function} = dying
root = Path(sys.argv[1])
settings = {{"merge": {{"eval_share": 0.2, "rows_per_shard": 4}}, "seed": 0}}
run(Job("merge", root / "out", {{"tokens": tuple(map(Path, sys.argv[2:]))}}, settings, work=root / "work"), merge)
"""


def rows(name, count, **extra):
    return [{"id": f"{name}{i}", "input_ids": [ord(name[0]), 1000 + i, 7, 8], **extra} for i in range(count)]


def sources(root, **counts):
    return [tokens(root / name, rows(name, count), name) for name, count in counts.items()]


def run(root, manifests, share=0.2, per_shard=4, seed=0):
    return run_stage(
        merge, root, "merge", {"tokens": manifests}, {"merge": {"eval_share": share, "rows_per_shard": per_shard}, "seed": seed}
    )


def ids(folder, split="*"):
    return pl.read_parquet(folder / f"{split}-*.parquet")["id"].to_list()


def test_all_sources_are_mixed_and_no_row_comes_twice(tmp_path):
    """https://github.com/vllm-project/speculators/pull/644: the shuffled data held only the first source."""
    folder = run(tmp_path, sources(tmp_path, A=12, B=12))
    train = ids(folder, "train")
    assert {name[0] for name in train[:12]} == {"A", "B"}
    assert sorted(ids(folder)) == sorted(f"{name}{i}" for name in "AB" for i in range(12))
    assert train != sorted(train)
    counts = manifest_of(folder)["counts"]
    assert (counts["rows_in"], counts["rows_out"], counts["rejected"]) == (24, 24, {})


def test_another_seed_gives_another_order_and_the_order_of_inputs_none(tmp_path):
    manifests = sources(tmp_path, A=12, B=12, C=5)
    first, reversed_, other = (
        run(tmp_path / name, order, seed=seed)
        for name, order, seed in (("1", manifests, 0), ("2", manifests[::-1], 0), ("3", manifests, 1))
    )
    assert published(first) == published(reversed_)
    assert ids(first) != ids(other)


def test_rows_keep_their_content_and_shards_their_size(tmp_path):
    folder = run(tmp_path, sources(tmp_path, A=30))
    names = [shard["name"] for shard in manifest_of(folder)["shards"]]
    heights = [pl.read_parquet(folder / name).height for name in names]
    train = [height for name, height in zip(names, heights, strict=True) if name.startswith("train")]
    assert names == sorted(names, key=lambda name: (not name.startswith("train"), name))
    assert set(train[:-1]) == {4}
    for row in pl.read_parquet(folder / "train-*.parquet").to_dicts():
        assert row["input_ids"] == [65, 1000 + int(row["id"][1:]), 7, 8]
        assert (row["group"], row["loss_spans"]) == (row["id"], [{"start": 1, "end": 4}])


def test_equal_rows_are_kept_once_under_the_first_data_set(tmp_path):
    twins = [
        tokens(tmp_path / name, [*rows(name, 9), {"id": "twin", "input_ids": [1, 2, 3], "prompt_hash": "same"}], name) for name in "BA"
    ]
    folder = run(tmp_path, twins)
    assert pl.read_parquet(folder / "[te]*-*.parquet").filter(id="twin")["dataset"].to_list() == ["A"]
    assert manifest_of(folder)["counts"]["rejected"] == {"duplicate": 1}
    rejected = {"dataset": "B", "id": "twin", "reason": "duplicate", "value": "A/twin"}
    assert pl.read_parquet(folder / "rejected.parquet").to_dicts() == [rejected]


def test_of_equal_rows_in_one_data_set_the_first_by_id_is_kept(tmp_path):
    twins = [{"id": name, "input_ids": [1, 2, 3], "prompt_hash": "same"} for name in "zy"]
    folder = run(tmp_path, [tokens(tmp_path / "A", [*twins, *rows("A", 9)], "A")])
    assert pl.read_parquet(folder / "rejected.parquet")[["id", "value"]].rows() == [("z", "A/y")]


def test_equal_ids_cut_at_other_places_are_no_duplicates():
    first, second, third = digests(pl.Series([[1, 2, 3], [1, 2], [3, 1, 2, 3]]))[:3]
    assert len({first, second, third}) == 3
    assert digests(pl.Series([[5], [1, 2, 3]]))[1] == first


def test_one_id_twice_in_a_data_set_is_an_error(tmp_path):
    manifest = tokens(tmp_path / "A", [{"id": "x", "input_ids": [1, 2]}, {"id": "x", "input_ids": [1, 3]}], "A")
    with pytest.raises(StageError, match="data set A: id x names several"):
        run(tmp_path, [manifest])


def test_one_data_set_given_twice_is_an_error(tmp_path):
    with pytest.raises(StageError, match="give each data set once"):
        run(tmp_path, [*sources(tmp_path / "1", A=3, B=3), *sources(tmp_path / "2", A=3)])


def test_a_further_data_set_moves_no_row_between_the_splits(tmp_path):
    manifests = sources(tmp_path, A=40, B=40)
    before, after = run(tmp_path / "1", manifests[:1]), run(tmp_path / "2", manifests)
    assert set(ids(before, "eval")) == {name for name in ids(after, "eval") if name.startswith("A")}
    train = ids(before, "train")
    assert [name for name in ids(after, "train") if name.startswith("A")] == train


def test_conversations_and_first_prompts_never_straddle_the_splits(tmp_path):
    """Rows tied by group or by prompt, also through a chain of both, and across data sets."""
    count = 60
    chain = [{"group": f"g{i // 4}", "prompt_hash": f"p{(i + 2) // 4}"} for i in range(8)]
    chained = [row | tie for row, tie in zip(rows("C", 8), chain, strict=True)]
    pairs = [row | {"group": f"g{i // 2}", "prompt_hash": f"h{i // 4}"} for i, row in enumerate(rows("A", count))]
    others = [row | {"prompt_hash": f"h{i // 4}"} for i, row in enumerate(rows("B", count))]
    folder = run(tmp_path, [tokens(tmp_path / name, data, name) for name, data in (("A", pairs), ("B", others), ("C", chained))], share=0.5)
    table = pl.concat([pl.read_parquet(folder / f"{split}-*.parquet").with_columns(split=pl.lit(split)) for split in ("train", "eval")])
    for keys in (["dataset", "group"], ["prompt_hash"]):
        assert table.group_by(keys).agg(pl.col("split").n_unique())["split"].max() == 1
    assert table.filter(dataset="C")["split"].n_unique() == 1
    assert table.filter(pl.col("dataset") != "C")["split"].n_unique() == 2


def test_the_key_of_tied_rows_is_their_smallest_prompt_hash():
    ties = [("g1", "p5"), ("g1", "p3"), ("g2", "p3"), ("g2", "p1"), ("g3", "p4"), ("g4", "p5")]
    index = pl.DataFrame([("d", *tie) for tie in ties], schema=["dataset", "group", "prompt_hash"], orient="row")
    assert tied_keys(index) == ["p1", "p1", "p1", "p1", "p4", "p1"]


def test_equal_group_names_of_two_data_sets_are_not_one_group(tmp_path):
    names = "ABCDEFGHIJKLMNOP"
    folder = run(tmp_path, [tokens(tmp_path / name, rows(name, 1, group="0"), name) for name in names], share=0.5)
    assert 0 < len(ids(folder, "eval")) < len(names)


@pytest.mark.parametrize(("share", "split"), [(0.0, "eval"), (1.0, "train")])
def test_an_empty_split_is_an_error_with_a_remedy(tmp_path, share, split):
    with pytest.raises(StageError, match=f"no {split} rows: all 6 .*merge.eval_share.*choose another seed"):
        run(tmp_path, sources(tmp_path, A=6), share=share)


def test_the_mix_page_has_each_data_set_and_the_sum(tmp_path):
    folder = run(tmp_path, sources(tmp_path, A=30, B=10))
    page = (folder / "mix.md").read_text()
    held_out = len(ids(folder, "eval"))
    assert "| A | 30 | 120 | 90 | 75.0% |" in page
    assert f"| all | 40 | 160 | 120 | 100.0% | {held_out} |" in page
    facts = manifest_of(folder)["facts"]
    assert facts["eval"] == {"rows": held_out, "tokens": 4 * held_out, "trained_tokens": 3 * held_out}
    assert facts["train"]["rows"] == 40 - held_out
    assert facts["datasets"]["A"]["share"] == 0.75


def test_an_altered_input_is_refused(tmp_path):
    manifests = sources(tmp_path, A=12)
    (tmp_path / "A" / "tokens-00000.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(StageError, match="bytes, the manifest says"):
        run(tmp_path, manifests)


@pytest.mark.parametrize(
    ("module", "function", "calls"), [("shards", "write_text", 1), ("shards", "write_table", 3)], ids=["while dealing", "while assembling"]
)
def test_kill_9_costs_no_byte(tmp_path, module, function, calls):
    manifests = sources(tmp_path, A=20, B=20, C=20)
    code = KILLED.format(module=module, function=function, calls=calls)
    command = [sys.executable, "-c", code, str(tmp_path / "killed"), *map(str, manifests)]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": "."}, check=False, timeout=60).returncode == -signal.SIGKILL
    (work,) = (tmp_path / "killed" / "work" / "merge").glob("*/partial")
    assert list(work.iterdir())
    assert published(run(tmp_path / "killed", manifests)) == published(run(tmp_path / "whole", manifests))
