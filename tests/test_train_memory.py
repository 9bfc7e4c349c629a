"""The estimate of memory against peaks that were measured on a GPU."""

import pytest
import torch

from benchmarks.train_rows import SHAPES
from scripts.lib.training.memory import estimate
from scripts.lib.training.packed import Capacity


@pytest.mark.parametrize(
    ("shape", "capacity", "measured"),
    [
        ("llama-8b", Capacity(10240, 8192), 19.7e9),
        ("llama-8b", Capacity(20480, 16384), 30.0e9),
        ("kimi", Capacity(10240, 8192), 33.9e9),
        ("smollm2", Capacity(41216, 32768), 4.7e9),
    ],
)
def test_estimate_is_near_the_measured_peak(shape, capacity, measured):
    sizes = SHAPES[shape]
    memory = estimate(sizes.drafter("meta"), capacity, sizes.steps, torch.bfloat16)
    assert 0.9 < (memory.weights + memory.batch) / measured < 1.15
    assert str(memory).startswith(f"{(memory.weights + memory.batch) / 2**30:.1f} GiB")
