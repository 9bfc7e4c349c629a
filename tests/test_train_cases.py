"""What users of other trainers report, and what a run says while it goes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.train_rows import SHAPES
from scripts.lib.eagle3.model import DrafterConfig
from scripts.lib.ground.progress import Progress
from scripts.lib.ground.stage import Job, run
from scripts.lib.training.build import train
from scripts.lib.training.checkpoints import NAME
from scripts.lib.training.flops import Work, model_flops
from scripts.lib.training.speed import Speed
from scripts.lib.training.trainer import Trainer
from tests.train_case import job, make_case

REPO = Path(__file__).parents[1]
NAMED = re.compile(r"`((?:scripts|rules|configs|benchmarks|tests|envs|docs)/[\w./-]+)`|python -m ((?:scripts|benchmarks)\.\w+)")


def stopped(given: Job, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `given` up to its step number `steps`."""
    step, done = Trainer.step, []

    def stopping(*arguments: Any) -> Any:
        done.append(arguments)
        if len(done) > steps:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", stopping)
        run(given, train)


def test_a_fresh_run_of_the_same_name_leaves_the_checkpoint_of_another_recipe_alone(tmp_path, monkeypatch):
    """Another trainer deletes all later checkpoints when a fresh run takes an old name: here each recipe has its own."""
    torch.set_num_threads(1)
    make_case(tmp_path, train_rows=8, eval_rows=2)
    first, other = (job(tmp_path, tmp_path / "drafter", epochs=4, learning_rate=rate) for rate in (0.003, 0.001))
    stopped(first, 3, monkeypatch)
    (checkpoint,) = (tmp_path / "work").rglob(NAME)
    written = checkpoint.read_bytes()
    run(other, train)
    assert checkpoint.read_bytes() == written
    seen: list[Any] = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, *arguments: (seen.append(arguments), step(self, *arguments))[1])
    run(first, train)
    steps = json.loads((tmp_path / "drafter" / "training.json").read_text())["steps"]
    assert len(seen) == steps - 2, "checkpoints come every two steps"


@pytest.mark.parametrize("page", ["README.md", *sorted(str(path.relative_to(REPO)) for path in (REPO / "docs").glob("*.md"))])
def test_files_and_commands_that_a_page_names_are_there(page):
    """Another trainer's pages name a config that does not exist under that name."""
    named = [path or module.replace(".", "/") + ".py" for path, module in NAMED.findall((REPO / page).read_text())]
    assert [path for path in named if not (REPO / path).exists()] == []


def test_a_drafter_needs_no_config_of_its_own():
    """Another trainer wants a file for each target, with theta and positions of another model in it."""
    target = SHAPES["llama-8b"].target()
    config = DrafterConfig.from_target(target, 32000, (2, 16, 29))
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (32768, 500000.0)
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (4096, 8, 128)


def test_the_log_says_how_much_of_a_gpu_is_used(tmp_path, monkeypatch):
    config = DrafterConfig.from_target(SHAPES["demo"].target(), 8192, (2, 15, 27))
    recipe, work = SimpleNamespace(device="cpu"), Work(positions=1000, counts=(800, 700), keys=10**5)
    stepper: Any = SimpleNamespace(weights=SimpleNamespace(masters=SimpleNamespace(config=config)), recipe=recipe)
    clock = iter([0.0, *[2.0] * 20])
    monkeypatch.setattr("scripts.lib.training.speed.time.monotonic", lambda: next(clock))
    speed = Speed(Progress(tmp_path, 1600, "trained tokens"), stepper)
    assert speed.arithmetic() == "", "nothing on a CPU"
    speed.gpu, speed.peak, speed.seconds = True, model_flops(config, work), 0.0
    speed.flops = model_flops(config, work)
    assert speed.arithmetic() == f", {speed.peak / 2 / 1e12:,.0f} TFLOP/s, 50% of the peak"
