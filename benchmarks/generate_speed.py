"""Tokens a second of the engine's batched decoding against `generate` of transformers, on real prompts.

python -m benchmarks.generate_speed --target results/demo/target --prepared results/demo/prepared/*/manifest.json
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.engines.opening import DTYPES
from scripts.lib.engines.protocol import Request
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.generation.responses import read_conversations


def main() -> None:
    """Answer one batch with both and print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, nargs="+", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    template = ChatTemplate.load(options.target)
    model = load_target(options.target, DTYPES[options.dtype], "cpu")
    requests = real_requests(template, options.prepared, options.batch, options.max_tokens)
    engine = TransformersEngine(model, template.eos_ids)
    ours = measured(lambda: [list(done.output_ids) for done in engine.generate(requests)])
    theirs = measured(lambda: library(model, requests, template.eos_ids))
    equal = sum(left == right for left, right in zip(ours.pop("outputs"), theirs.pop("outputs"), strict=True))
    figures = {
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "equal_answers": equal,
        "engine": ours,
        "library": theirs,
    }
    for name in ("engine", "library"):
        print(name, figures[name])
    print(json.dumps({"batch": len(requests), "threads": options.threads, "dtype": options.dtype, **figures}))


def real_requests(template: ChatTemplate, manifests: Sequence[Path], batch: int, max_tokens: int) -> list[Request]:
    """The first turns of `batch` prepared rows, evenly drawn, sorted by prompt length."""
    rows = [row for manifest in manifests for row in read_conversations(manifest, "first")]
    drawn = rows[:: max(1, len(rows) // batch)][:batch]
    prompts = [tuple(template.prompt_ids(row.history(), row.tools)) for row in drawn]
    return [Request(str(number), prompt, max_tokens) for number, prompt in enumerate(sorted(prompts, key=len))]


def library(model: Any, requests: Sequence[Request], eos_ids: frozenset[int]) -> list[list[int]]:
    """Answers of `generate`, padded on the left, each up to its end of turn."""
    longest = max(len(request.prompt_ids) for request in requests)
    ids = torch.tensor([[0] * (longest - len(request.prompt_ids)) + list(request.prompt_ids) for request in requests])
    mask = torch.tensor([[0] * (longest - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in requests])
    limit = max(request.max_tokens for request in requests)
    eos = sorted(eos_ids)
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=eos, pad_token_id=eos[0])
    return [up_to_end(row[longest:].tolist(), eos_ids) for row in rows]


def up_to_end(ids: list[int], eos_ids: frozenset[int]) -> list[int]:
    """`ids` up to and including the first end-of-turn token."""
    ends = [place for place, token in enumerate(ids) if token in eos_ids]
    return ids[: ends[0] + 1] if ends else ids


def measured(action: Callable[[], list[list[int]]]) -> dict[str, Any]:
    """Outputs of `action`, tokens, seconds on the wall and of the CPU, and tokens a second of each."""
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(map(len, outputs))
    figures = {
        "tokens": tokens,
        "seconds": wall,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
    }
    return {"outputs": outputs, **{name: round(value, 2) for name, value in figures.items()}}


if __name__ == "__main__":
    main()
