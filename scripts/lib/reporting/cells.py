"""Benchmark cells, and the rows of the target alone that were measured beside them."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from scripts.lib.benchmark.flags import not_speculative
from scripts.lib.ground.manifest import checked_shard
from scripts.lib.reporting.published import Published

Cell = Mapping[str, Any]

BASELINE = "baseline"
# What an engine may not know. A figure that nobody measured stays None: no default of it may look measured.
UNKNOWN: Mapping[str, Any] = {
    "engine": "transformers",
    "algorithm": "EAGLE3",
    "draft_steps": None,
    "topk": 1,
    "draft_tokens": None,
    "cuda_graphs": None,
    "attention_backend": None,
    "flags": (),
    "speedup_interval": None,
    "ttft_seconds": None,
    "baseline_ttft_seconds": None,
    "itl_seconds": None,
    "baseline_itl_seconds": None,
    "verify_steps": None,
    "accepted_histogram": None,
    "cycle_seconds": None,
    "baseline_step_seconds": None,
    "baseline_completion_tokens": None,
    "simulated_accept_length": None,
    "target": None,
    "server": None,
    "server_packages": (),
    "findings": (),
    "uncompared": None,
}


@dataclass(frozen=True)
class Ground:
    """What a drafter and the target alone have in common in a cell: the machine, the engine and how it runs, speculation apart."""

    machine: str
    engine: str
    dtype: str
    cuda_graphs: bool | None
    attention_backend: str | None
    flags: tuple[str, ...]

    @classmethod
    def of(cls, cell: Cell) -> "Ground":
        """The ground of a cell."""
        hardware = cell["machine"]["gpu"] or f"{cell['machine']['cpu']}, {cell['machine']['threads']} threads"
        return cls(
            hardware, cell["engine"], cell["dtype"], cell["cuda_graphs"], cell["attention_backend"], tuple(not_speculative(cell["flags"]))
        )

    @property
    def words(self) -> tuple[str, ...]:
        """Every part that has something to say, in words."""
        graphs = "without CUDA graphs" if self.cuda_graphs is False else ""
        attention = f"{self.attention_backend} attention" if self.attention_backend else ""
        return tuple(part for part in (self.machine, self.engine, self.dtype, graphs, attention, " ".join(self.flags)) if part)


def read_cells(parts: Sequence[Published]) -> list[Cell]:
    """The cells of published folders, in the order of the table; every file must be as its manifest says."""
    cells = []
    for part in parts:
        (shard,) = (shard for shard in part.manifest.shards if shard.name == "cell.json")
        cells.append(with_unknown(json.loads(checked_shard(part.folder, shard).read_text())))
    return sorted(cells, key=place)


def with_unknown(cell: Cell) -> Cell:
    """A cell with every key of UNKNOWN. A chain's steps are its ceiling less one, and it checks one token more than it drafts."""
    full = {**UNKNOWN, **cell}
    if full["draft_steps"] is None and full["algorithm"] != "NGRAM" and full["ceiling"] is not None:
        full["draft_steps"] = full["ceiling"] - 1
    if full["draft_tokens"] is None and full["draft_steps"] is not None and full["topk"] == 1:
        full["draft_tokens"] = full["draft_steps"] + 1
    return full


def place(cell: Cell) -> tuple[Any, ...]:
    """Where a row stands: by task and concurrency, the target alone first."""
    return cell["task"], cell["concurrency"], not is_baseline(cell), cell["variant"]


def is_baseline(row: Cell) -> bool:
    """Is a row of the table the target alone?"""
    return row["algorithm"] is None


def with_baselines(cells: Sequence[Cell]) -> list[Cell]:
    """The rows of the table: the cells, and for every task, concurrency and ground the target alone as it was measured beside them."""
    groups: dict[tuple[str, int, Ground], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["concurrency"], Ground.of(cell)), []).append(cell)
    names = ground_names({ground for _, _, ground in groups})
    baselines = [baseline_row(group, names[ground]) for (_, _, ground), group in groups.items()]
    return sorted([*cells, *baselines], key=place)


def ground_names(grounds: set[Ground]) -> dict[Ground, str]:
    """What tells each ground from the others in words, empty for a run's only one."""
    shared = set.intersection(*(set(ground.words) for ground in grounds)) if grounds else set()
    return {ground: ", ".join(word for word in ground.words if word not in shared) for ground in grounds}


def baseline_row(group: Sequence[Cell], name: str) -> Cell:
    """The target alone over the cells of one task, concurrency and ground. Speed is that of all their tokens together."""
    largest = max(group, key=lambda cell: (cell["prompts"], cell["variant"]))
    speed = pooled_speed(group)
    speeds = [cell["baseline_tok_s"] for cell in group if cell["baseline_tok_s"] is not None]
    notes = [f"measured beside {len(group)} variants: {min(speeds):,.1f} to {max(speeds):,.1f} tok/s"] if len(speeds) > 1 else []
    alone = {
        "variant": f"{BASELINE} {name}" if name else BASELINE,
        "drafter": "",
        "algorithm": None,
        "baseline_tok_s": speed,
        "tok_s": speed,
        "speedup": None if speed is None else 1.0,
        "completion_tokens": largest["baseline_completion_tokens"],
        "ttft_seconds": pooled_latency(group, "baseline_ttft_seconds"),
        "itl_seconds": pooled_latency(group, "baseline_itl_seconds"),
        "baseline_step_seconds": middle(cell["baseline_step_seconds"] for cell in group),
        "notes": notes,
    }
    kept = ("task", "concurrency", "engine", "dtype", "cuda_graphs", "attention_backend", "prompts", "machine", "versions")
    flags = list(not_speculative(largest["flags"]))
    return dict.fromkeys(largest) | dict(UNKNOWN) | {key: largest[key] for key in kept} | {"topk": None, "flags": flags} | alone


def pooled_speed(group: Sequence[Cell]) -> float | None:
    """Tokens of the target alone over its seconds in all cells; a cell whose tokens are unknown counts like the others."""
    known = [(cell["baseline_completion_tokens"] or 1, cell["baseline_tok_s"]) for cell in group if cell["baseline_tok_s"] is not None]
    return sum(tokens for tokens, _ in known) / sum(tokens / speed for tokens, speed in known) if known else None


def pooled_latency(group: Sequence[Cell], key: str) -> dict[str, float] | None:
    """The median over cells of each figure of a latency."""
    known = [cell[key] for cell in group if cell[key]]
    return {name: median(latency[name] for latency in known) for name in known[0]} if known else None


def middle(values: Any) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def machines(cells: Sequence[Cell]) -> list[str]:
    """Each machine that cells were measured on, once, with the versions here and, where there is one, in the server."""
    lines = set()
    for cell in cells:
        machine = cell["machine"]
        hardware = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
        driver = f", driver {machine['driver']}" if machine.get("driver") else ""
        server = f"; server: {listed(cell['server_packages'])}" if cell["server_packages"] else ""
        lines.add(f"{hardware}{driver}, device {machine['device']}; {listed(cell['versions'])}{server}")
    return sorted(lines)


def targets(cells: Sequence[Cell]) -> list[str]:
    """What cells were measured on, once: source, revision and template of each target."""
    return sorted({f"target: {listed(cell['target'])}" for cell in cells if cell["target"]})


def listed(versions: Mapping[str, str | None]) -> str:
    """Packages with their versions, or other names with what they name, by name."""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version)


def servers(cells: Sequence[Cell]) -> list[str]:
    """The command of each server that cells were measured on, with drafts and without, once."""
    kinds = ("command", "baseline_command")
    commands = {shlex.join(cell["server"][kind]) for cell in cells for kind in kinds if cell["server"] and cell["server"].get(kind)}
    return sorted(commands)
