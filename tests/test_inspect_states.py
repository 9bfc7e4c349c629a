"""inspect_states: what it says of a shard, and that it notices a damaged one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, Shard
from scripts.lib.states.describing import described
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import PLAIN, HiddenShard, write_shard
from scripts.lib.states.storing import Storing, every_storing


def shard(rows: int = 9, length: int = 5) -> HiddenShard:
    """Rows whose states have norms 2, 4, 6 and, finally, 8 at H = 4; the last two tokens of each are an answer."""
    ones = torch.ones(rows * length, 3, 4)
    spans = torch.tensor([[row * length + 2, row * length + 5] for row in range(rows)])
    places = torch.tensor([place for start, end in spans.tolist() for place in range(start, end - 1)])
    return HiddenShard(
        input_ids=torch.arange(rows * length, dtype=torch.int32),
        row_offsets=torch.arange(rows + 1) * length,
        aux=(ones * torch.tensor([1.0, 2, 3])[:, None]).bfloat16(),
        final=torch.full((len(places), 4), 4.0).bfloat16(),
        final_index=places,
        argmax=torch.zeros(len(places), dtype=torch.int32),
        loss_spans=spans,
        ids=tuple(f"row{number}" for number in range(rows)),
    )


def publish(folder: Path, made: HiddenShard, storing: Storing = PLAIN) -> Path:
    path = folder / "train-00000.safetensors"
    write_shard(path, made, storing)
    record = Shard.of(path, len(made.ids), made.tokens)
    Manifest("hidden", {}, {}, Counts(9, 9), [record], {"boundaries": [2, 15, 27]}).write(folder)
    return path


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_the_page_says_what_is_in_the_shard(tmp_path: Path, storing: Storing) -> None:
    path = publish(tmp_path, shard(), storing)
    page = described(path)
    assert "rows 9, tokens 45, with a final state 18 (40.0%)" in page
    assert f"bytes {path.stat().st_size:,}, {path.stat().st_size / 45:,.1f} a token" in page
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "aux at boundary 2 2 … mean 2 … 2" in lines and "aux at boundary 27 6 … mean 6 … 6" in lines
    assert "final, post-norm 8 … mean 8 … 8" in lines and "NOT FINITE" not in page
    assert (
        "0 row0: 5 tokens, loss spans (2, 5), ids 0, 1, 2, 3, 4" in lines and "… 3 more" in lines and "row8" in page and "row4" not in page
    )
    assert "as in manifest.json" in page and any(line.startswith("input_ids I32 [45]") for line in lines)


def test_states_that_are_not_finite_are_counted_by_layer(tmp_path: Path) -> None:
    made = shard()
    decoded(made.aux)[7, 1, 2] = torch.nan
    decoded(made.aux)[8, 1, 0] = torch.inf
    page = described(publish(tmp_path, made))
    assert [line.split()[3] for line in page.splitlines() if line.endswith("2 NOT FINITE")] == ["15"] and page.count("NOT FINITE") == 1


def test_an_altered_shard_is_refused_and_a_lone_one_is_described(tmp_path: Path) -> None:
    path = publish(tmp_path, shard())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StageError, match=r"train-00000\.safetensors: sha256 .*the manifest says"):
        described(path)
    stray = tmp_path / "copy.safetensors"
    write_shard(stray, shard())
    assert "NOT NAMED" in described(stray)
    (tmp_path / "manifest.json").unlink()
    assert "no manifest.json beside it" in described(path)


def test_the_command_prints_the_page_and_names_a_torn_file(tmp_path: Path) -> None:
    path = publish(tmp_path, shard())
    command = [sys.executable, "-m", "scripts.inspect_states", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(path)) and "rows 9" in done.stdout
    path.write_bytes(path.read_bytes()[:500])
    torn = subprocess.run(command, capture_output=True, text=True, check=False)
    assert torn.returncode == 1 and torn.stderr.splitlines()[-1].split(" inspect_states: ")[1].startswith(
        f"ERROR {path}: not a readable shard"
    )
