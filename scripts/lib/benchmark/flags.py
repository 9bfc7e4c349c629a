"""The flags of the two servers of a cell: of the target with drafts, and of the target alone, with all but the speculative ones."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.benchmark.settings import Settings
from scripts.lib.ground.errors import StageError

SPECULATIVE = "--speculative-"
SPECULATIVE_REQUESTS = 48  # SGLang's limit of requests at once with speculation
# What both servers must report alike, where they report it: a speed-up over other arithmetic or without CUDA graphs is none.
ALIKE = ("model_path", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "disable_cuda_graph", "tp_size", "dp_size")


def common_flags(settings: Settings, on_cpu: bool) -> list[str]:
    """Flags of both servers; a CPU has no CUDA graphs to leave out."""
    backend = settings.attention_backend
    return [
        *("--dtype", settings.dtype, "--incremental-streaming-output"),
        *(() if settings.cuda_graphs or on_cpu else ("--disable-cuda-graph",)),
        *(() if backend is None else ("--attention-backend", backend)),
        *(() if settings.concurrency <= SPECULATIVE_REQUESTS else ("--max-running-requests", str(settings.concurrency))),
    ]


def baseline_flags(settings: Settings, on_cpu: bool) -> list[str]:
    """Flags of the server of the target alone."""
    return [*common_flags(settings, on_cpu), *not_speculative(settings.flags)]


def variant_flags(settings: Settings, on_cpu: bool, drafter: Path | None) -> list[str]:
    """Flags of the server with drafts."""
    options = {
        "algorithm": settings.algorithm,
        "draft-model-path": drafter,
        "num-steps": settings.draft_steps,
        "eagle-topk": None if settings.draft_steps is None else settings.topk,
        "num-draft-tokens": settings.verified,
    }
    given = [word for name, value in options.items() if value is not None for word in (SPECULATIVE + name, str(value))]
    return [*common_flags(settings, on_cpu), *given, *settings.flags]


def not_speculative(flags: Sequence[str]) -> Iterator[str]:
    """`flags` without those of speculation and their values."""
    dropping = False
    for word in flags:
        if word.startswith("--"):
            dropping = word.startswith(SPECULATIVE)
        if not dropping:
            yield word


def told(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a server's report (/server_info) says of what both must have alike."""
    return {name: report[name] for name in ALIKE if name in report}


def check_alike(url: str, baseline: Mapping[str, Any], variant: Mapping[str, Any]) -> None:
    """Refuse two servers of which `told` says different things. Raises StageError with both values."""
    for name in baseline.keys() & variant.keys():
        if baseline[name] != variant[name]:
            how = f"attention_backend {variant[name]}" if name == "attention_backend" else "flags"
            raise StageError(
                f"{url}: runs with {name} {variant[name]}, the target alone with {baseline[name]}: "
                f"their speeds say nothing of the drafter; set it for both by the variant's {how}"
            )
