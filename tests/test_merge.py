"""Stage `merge`: one deterministic mix whatever the order, the process or the interruption."""

import os
import signal
import subprocess
import sys

import polars as pl
import pytest

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import Job
from scripts.lib.ground.stage import run as run_job
from scripts.lib.mixing.conversations import words
from scripts.lib.mixing.index import digests
from scripts.lib.mixing.merge import merge
from scripts.lib.mixing.split import tied_keys
from tests.chat_parts import asked, manifest_of, prepared_behind, published, tokens

KILLED = """
import os, signal, sys
from pathlib import PosixPath
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
run({job}, merge)
"""


def rows(name, count, **extra):
    return [{"id": f"{name}{i}", "input_ids": [ord(name[0]), 1000 + i, 7, 8], **extra} for i in range(count)]


def sources(root, **counts):
    return [tokens(root / name, rows(name, count), name) for name, count in counts.items()]


def merge_job(root, manifests, tasks=(), *, share=0.2, per_shard=4, seed=0, weights=None, **options):
    merge_options = {"eval_share": share, "rows_per_shard": per_shard, "max_tokens": False, "near_duplicates": 0.8, "shared_words": 13}
    settings = {"merge": merge_options | options, "seed": seed, "weights": weights or {}}
    consulted = {"prepared": [prepared_behind(path) for path in manifests], "tasks": tasks}
    return Job("merge", root / "out", {"tokens": manifests}, settings, work=root / "work", consulted=consulted)


def run(root, manifests, tasks=(), **options):
    run_job(merge_job(root, manifests, tasks, **options), merge)
    return root / "out"


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


def reasons(folder):
    return {
        f"{row['dataset']}/{row['id']}": (row["reason"], row["value"]) for row in pl.read_parquet(folder / "rejected.parquet").to_dicts()
    }


@pytest.mark.parametrize("names", ["AB", "BA"])
def test_of_equal_rows_the_native_one_is_kept_once(tmp_path, names):
    """Which one does not depend on the names or the order of the data sets."""
    twin = {"id": "twin", "input_ids": [1, 2, 3], "prompt_hash": "same"}
    kinds = dict(zip(names, ("native", "prompts"), strict=True))
    data = [tokens(tmp_path / n, [*rows(n, 9), twin | {"kind": kinds[n]}], n) for n in names]
    folder = run(tmp_path, data)
    assert pl.read_parquet(folder / "[te]*-*.parquet").filter(id="twin")["dataset"].to_list() == [names[0]]
    assert manifest_of(folder)["counts"]["rejected"] == {"duplicate": 1}
    assert reasons(folder) == {f"{names[1]}/twin": ("duplicate", f"{names[0]}/twin")}


def test_of_equal_rows_of_one_kind_the_seed_decides(tmp_path):
    twins = [{"id": name, "input_ids": [1, 2, 3], "prompt_hash": "same"} for name in "zy"]
    manifest = tokens(tmp_path / "A", [*twins, *rows("A", 9)], "A")
    folders = [run(tmp_path / str(seed), [manifest], seed=seed) for seed in range(6)]
    assert {tuple(reasons(folder)) for folder in folders} == {("A/y",), ("A/z",)}


LONG = "write a python function that takes a list of numbers and returns the median of them without sorting the list in place"


def test_equal_and_nearly_equal_prompts_of_two_data_sets_are_kept_once(tmp_path):
    """Within a data set they stay: stage `prepare` has decided about those, and forms of words are no copies."""
    near = LONG.replace("numbers", "numbers, please,")
    first = [
        {"id": "n", "input_ids": [1, 2, 9], "kind": "native", "asked": [LONG]},
        {"id": "m", "input_ids": [1, 3, 9], "kind": "native", "asked": [near]},
    ]
    second = [
        {"id": "same", "input_ids": [2, 2, 9], "asked": [f"{LONG.upper()}  "]},
        {"id": "near", "input_ids": [2, 3, 9], "asked": [LONG + " now"]},
    ]
    other = [{"id": "other", "input_ids": [2, 4, 9], "asked": [" ".join(reversed(LONG.split()))]}]
    manifests = [tokens(tmp_path / "Z", [*rows("Z", 9), *first], "Z"), tokens(tmp_path / "A", [*rows("A", 9), *second, *other], "A")]
    folder = run(tmp_path, manifests)
    assert {name: reason for name, (reason, _) in reasons(folder).items()} == {"A/same": "duplicate", "A/near": "near_duplicate"}
    assert reasons(folder)["A/same"][1] == "Z/n"
    assert manifest_of(folder)["counts"] == {"rows_in": 23, "rows_out": 21, "rejected": {"duplicate": 1, "near_duplicate": 1}}
    off = run(tmp_path / "off", manifests, near_duplicates=False)
    assert set(reasons(off)) == {"A/same"}


def test_prompts_without_a_word_in_them_are_compared_like_others(tmp_path):
    """Prompts of signs alone stood side by side in a real file; polars' `explode` makes fewer rows than lists of empty ones in a row."""
    assert words(pl.Series(["one two", "", "?!", "...", "", "three"]))[1].tolist() == [2, 1, 1, 1, 1, 1]
    assert len(words(pl.Series(["?!", "", "..."]))[0]) == 3
    signs = [{"id": f"s{i}", "input_ids": [ord("a"), 2000 + i], "asked": [text]} for i, text in enumerate(("???", "!", "...", "-"))]
    said = {"id": "said", "input_ids": [ord("b"), 3000], "asked": [LONG]}
    manifests = [tokens(tmp_path / "a", [*signs, *rows("a", 9)], "a"), tokens(tmp_path / "b", [*rows("b", 9), said], "b")]
    folder = run(tmp_path, manifests, [asked(tmp_path / "task", [{"id": "t", "asked": [LONG]}], "task")])
    assert {name: reason for name, (reason, _) in reasons(folder).items()} == {"b/said": "contaminated:task"}


def test_conversations_that_begin_alike_and_go_on_differently_are_no_duplicates(tmp_path):
    data = [tokens(tmp_path / n, [*rows(n, 9), {"id": "x", "input_ids": [ord(n), 2], "asked": [LONG, f"and {n}?"]}], n) for n in "AB"]
    assert reasons(run(tmp_path, data)) == {}


def test_all_turns_of_a_duplicate_conversation_are_left_out(tmp_path):
    twin = [{"id": "x", "input_ids": [1, 2], "asked": [LONG]}, {"id": "x#1", "input_ids": [1, 3], "asked": [LONG], "group": "x"}]
    first = tokens(tmp_path / "A", [*rows("A", 9), {"id": "x", "input_ids": [5, 6], "asked": [LONG], "kind": "native"}], "A")
    second = tokens(tmp_path / "B", [*rows("B", 9), *twin], "B")
    asked(prepared_behind(second).parent, [*rows("B", 9), twin[0]], "B")  # one prepared row gave both token rows
    assert reasons(run(tmp_path, [first, second])) == dict.fromkeys(["B/x", "B/x#1"], ("duplicate", "A/x"))


def test_a_token_row_without_prepared_row_is_refused(tmp_path):
    manifest = tokens(tmp_path / "A", rows("A", 9), "A")
    asked(prepared_behind(manifest).parent, rows("A", 8), "A")
    with pytest.raises(StageError, match="data set A: token row A8 has no prepared row"):
        run(tmp_path, [manifest])


def test_what_repeats_a_benchmark_prompt_is_left_out_and_the_task_named(tmp_path):
    """The same prompt, nearly the same, or thirteen words in a row in any turn; the words of a task's form do not count."""
    form = "please answer the following question step by step and give only the final number at the very end"
    task = [{"id": "t0", "asked": [LONG], "prompt_hash": "known"}] + [
        {"id": f"t{i}", "asked": [f"{form} {chr(96 + i) * 3} is how many of the blue ones that were sold at market on the {i} of may"]}
        for i in range(1, 6)
    ]
    data = [
        {"id": "equal", "input_ids": [1, 1], "prompt_hash": "known"},
        {"id": "near", "input_ids": [1, 2], "asked": [LONG.replace("place", "memory")]},
        {
            "id": "holds",
            "input_ids": [1, 3],
            "asked": ["hi", f"here is my homework:\n{' '.join(LONG.title().split()[2:16])}, and more " + "of it " * 40],
        },
        {"id": "twelve", "input_ids": [1, 4], "asked": [" ".join(LONG.split()[2:14]) + " " + "and so on " * 20]},
        {"id": "form", "input_ids": [1, 5], "asked": [f"{form} how old is the moon"]},
    ]
    folder = run(tmp_path, [tokens(tmp_path / "A", [*rows("A", 9), *data], "A")], [asked(tmp_path / "task", task, "maths")])
    found = reasons(folder)
    assert {name: reason for name, (reason, _) in found.items()} == dict.fromkeys(["A/equal", "A/near", "A/holds"], "contaminated:maths")
    assert [found[f"A/{name}"][1].split(":")[0] for name in ("equal", "near", "holds")] == ["maths/t0"] * 3
    assert found["A/near"][1].startswith("maths/t0: similarity 0.")
    assert found["A/holds"][1] == "maths/t0: a run of 13 words"
    assert "| maths | A | 3 |" in (folder / "mix.md").read_text()
    assert manifest_of(folder)["facts"]["contaminated"] == {"maths": {"A": 3}}
    off = run(tmp_path / "off", [tmp_path / "A/manifest.json"], [tmp_path / "task/manifest.json"], shared_words=False)
    assert reasons(off) == {}


def test_a_task_that_nothing_repeats_changes_no_byte_of_the_manifest(tmp_path):
    manifests = sources(tmp_path, A=20)
    before = run(tmp_path / "1", manifests)
    after = run(tmp_path / "2", manifests, [asked(tmp_path / "task", [{"id": "t", "asked": [LONG]}], "task")])
    assert published(before) == published(after)
    assert merge_job(tmp_path, manifests).fingerprint() != merge_job(tmp_path, manifests, [tmp_path / "task/manifest.json"]).fingerprint()


def test_a_weight_takes_that_share_of_the_groups_and_a_larger_one_only_adds(tmp_path):
    data = [row | {"group": f"g{i // 2}"} for i, row in enumerate(rows("A", 200))]
    manifests = [tokens(tmp_path / "A", data, "A"), *sources(tmp_path, B=20)]
    half, most = (run(tmp_path / str(weight), manifests, weights={"A": weight}) for weight in (0.5, 0.8))
    taken = [{name for name in ids(folder) if name.startswith("A")} for folder in (half, most)]
    assert 70 < len(taken[0]) < 130
    assert taken[0] < taken[1]
    assert {int(name[1:]) // 2 * 2 in {int(other[1:]) for other in taken[0]} for name in taken[0]} == {True}
    assert manifest_of(half)["counts"]["rejected"] == {"weight": 200 - len(taken[0])}


def test_rows_over_the_longest_length_are_left_out_whole(tmp_path):
    data = [*rows("A", 9), {"id": "long", "input_ids": list(range(20))}]
    folder = run(tmp_path, [tokens(tmp_path / "A", data, "A")], max_tokens=19)
    assert reasons(folder) == {"A/long": ("too_long", "20")}


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
    assert "| 120 | 90 | 75.0% |" in page
    assert f"| all | 40 | 0 | 0 | 0 | 0 | 0 | {40 - held_out} | {held_out} | 160 | 120 | 100.0% |" in page
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
    code = KILLED.format(module=module, function=function, calls=calls, job=merge_job(tmp_path / "killed", manifests))
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": "."}, check=False, timeout=300).returncode == -signal.SIGKILL
    (work,) = (tmp_path / "killed" / "work" / "merge").glob("*/partial")
    assert list(work.iterdir())
    assert published(run(tmp_path / "killed", manifests)) == published(run(tmp_path / "whole", manifests))
