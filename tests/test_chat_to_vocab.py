"""From conversations to the draft vocabulary: equal bytes in every process."""

import os
import subprocess
import sys

from tests.chat_parts import asked, prepared, published, responses, save_target, talk

CHAIN = """
import sys
from pathlib import Path
from scripts.lib.chat.encode import encode
from scripts.lib.ground.stage import Job, run
from scripts.lib.mixing.merge import merge
from scripts.lib.vocabulary.vocab import vocab

root = Path(sys.argv[1])
target = root.parent / "target/manifest.json"

def stage(name, build, output, settings, consulted={}, **inputs):
    run(Job(name, root / output, inputs, settings, work=root / "work", consulted=consulted), build)
    return root / output / "manifest.json"

def encoded(name, kind):
    settings = {"encode": {"max_length": 64}, "name": name, "kind": kind}
    return stage("encode", encode, name, settings, rows=(root.parent / kind / "manifest.json",), target=(target,))

tokens = (encoded("own", "native"), encoded("served", "prompts"))
options = {"eval_share": 0.3, "rows_per_shard": 3, "max_tokens": 60, "near_duplicates": 0.8, "shared_words": 13}
asked = [root.parent / name / "manifest.json" for name in ("native", "asked")]
consulted = {"prepared": asked, "tasks": [root.parent / "task/manifest.json"]}
merged = stage("merge", merge, "merged", {"merge": options, "seed": 7, "weights": {"own": 0.9}}, consulted, tokens=tokens)
stage("vocab", vocab, "vocab", {"vocab": {"size": 40}}, merged=(merged,), target=(target,))
"""


def test_all_bytes_are_equal_under_another_hash_seed(tmp_path):
    save_target(tmp_path / "target")
    prepared(tmp_path / "native", {f"n{i}": talk("a" * (i + 1), "yes" * i, "b", "no") for i in range(12)})
    responses(tmp_path / "prompts", [(f"r{i}", 0, [1, 20, 30 + i], [40, 41 + i, 2]) for i in range(12)])
    asked(tmp_path / "asked", [{"id": f"r{i}"} for i in range(12)], "served")
    asked(tmp_path / "task", [{"id": "t", "asked": ["aaa"]}], "task")
    runs = []
    for seed in ("1", "2"):
        root = tmp_path / "same"
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        subprocess.run([sys.executable, "-c", CHAIN, str(root)], env=environment, check=True, timeout=120)
        runs.append(published(root))
        root.rename(tmp_path / seed)
    assert runs[0] == runs[1]
    assert {name.split("/")[0] for name in runs[0]} == {"own", "served", "merged", "vocab"}
