"""Tokens a second of state capture against plain forward passes of transformers, on real conversations.

python -m benchmarks.hidden_speed --target results/demo/target --responses results/demo/responses/*/manifest.json
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch

from scripts.lib.eagle3.layers import default_boundaries
from scripts.lib.engines.opening import DTYPES
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.rows import TokenRow


def main() -> None:
    """Capture the same rows three ways and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--responses", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model: Any = load_target(options.target, DTYPES[options.dtype], "cpu")
    rows = real_rows(options.responses, options.rows)
    boundaries = default_boundaries(model.config.num_hidden_layers)
    engine = TransformersEngine(model, frozenset())
    tokens = sum(len(row.input_ids) for row in rows)
    figures = {
        "capture": measured(tokens, lambda: capture(engine, rows, boundaries, Batching(options.batch_tokens)).wait()),
        "library_batch_1": measured(tokens, lambda: [plain(model, [row]) for row in rows]),
        "library_batch_8": measured(tokens, lambda: [plain(model, rows[start : start + 8]) for start in range(0, len(rows), 8)]),
    }
    for name, values in figures.items():
        print(name, values)
    print(json.dumps({"rows": len(rows), "tokens": tokens, "threads": options.threads, "dtype": options.dtype, **figures}))


def real_rows(manifests: Sequence[Path], count: int) -> list[TokenRow]:
    """Prompt and answer of `count` responses, evenly drawn."""
    frames = [
        pl.read_parquet(manifest.parent / "responses-*.parquet", columns=["id", "prompt_ids", "output_ids"]) for manifest in manifests
    ]
    drawn = pl.concat(frames).gather_every(max(1, sum(frame.height for frame in frames) // count)).head(count)
    return [TokenRow(name, (*prompt, *output), ((len(prompt), len(prompt) + len(output)),)) for name, prompt, output in drawn.iter_rows()]


@torch.inference_mode()
def plain(model: Any, rows: Sequence[TokenRow]) -> list[torch.Tensor]:
    """All states of `rows`, padded on the right, and the best token of every position."""
    longest = max(len(row.input_ids) for row in rows)
    ids = torch.tensor([[*row.input_ids, *[0] * (longest - len(row.input_ids))] for row in rows])
    mask = torch.tensor([[1] * len(row.input_ids) + [0] * (longest - len(row.input_ids)) for row in rows])
    output = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    return [*(state.to(torch.bfloat16) for state in output.hidden_states), output.logits.argmax(-1)]


def measured(tokens: int, action: Callable[[], object]) -> dict[str, float]:
    """Seconds of `action` on the wall and of the CPU, and tokens a second of each."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = {"seconds": wall, "cpu_seconds": cpu, "tokens_per_second": tokens / wall, "tokens_per_cpu_second": tokens / cpu}
    return {name: round(value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
