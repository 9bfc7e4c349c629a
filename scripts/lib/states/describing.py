"""What a person wants to know of a shard: sizes, rows, norms of the states, and whether it is whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open

from scripts.lib.ground.manifest import NAME, Manifest, checked_shard, read_manifest
from scripts.lib.states.encoded import States, decoded
from scripts.lib.states.format import HiddenShard
from scripts.lib.states.reader import each_states, read_shard

SHOWN = 3  # first and last rows


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of the states of one layer: smallest, mean and largest, and how many states are not finite."""

    smallest: float
    mean: float
    largest: float
    bad: int


def described(path: Path) -> str:
    """A page about the shard at `path`. Raises StageError when it is not a whole shard, or not the one in the manifest beside it."""
    shard, (manifest, against) = read_shard(path), checked_against(path)
    boundaries = manifest.facts["boundaries"] if manifest else ["?"] * shard.aux.shape[1]
    lines = [f"{path}", "", *header(path), "", *sizes(path, shard), against, "", "states, norms:"]
    for name, states, borders in each_states(shard):
        layers = [f"aux at boundary {boundary}" for boundary in boundaries] if name == "aux" else ["final, post-norm"]
        for layer, norms in zip(layers, norms_of(states, borders), strict=True):
            bad = f"  {norms.bad:,} NOT FINITE" if norms.bad else ""
            lines.append(f"  {layer:<22} {norms.smallest:>12.4g} … mean {norms.mean:.4g} … {norms.largest:.4g}{bad}")
    return "\n".join([*lines, "", *rows(shard)])


def header(path: Path) -> Iterator[str]:
    """The tensors of the file."""
    yield "tensors:"
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_slice(name)
            yield f"  {name:<16} {tensor.get_dtype():<8} {tensor.get_shape()}"


def sizes(path: Path, shard: HiddenShard) -> Iterator[str]:
    """Rows, tokens and bytes."""
    size, teachers = path.stat().st_size, len(shard.final_index)
    yield f"rows {len(shard.ids):,}, tokens {shard.tokens:,}, with a final state {teachers:,} ({teachers / shard.tokens:.1%})"
    yield f"bytes {size:,}, {size / shard.tokens:,.1f} a token"


def checked_against(path: Path) -> tuple[Manifest | None, str]:
    """The manifest beside the shard at `path` if it names it, and what the check of size and sha256 gave."""
    beside = path.parent / NAME
    if not beside.is_file():
        return None, f"no {NAME} beside it: neither sha256 nor boundary ids are known"
    manifest = read_manifest(beside, "hidden")
    for record in manifest.shards:
        if record.name == path.name:
            checked_shard(path.parent, record)
            return manifest, f"sha256 {record.sha256} as in {NAME}"
    return manifest, f"NOT NAMED in {beside}"


def norms_of(states: States, borders: Sequence[int]) -> list[Norms]:
    """The norms of each layer of `states` [N, L, H], or of the one layer of [N, H]; a row is in memory at a time."""
    parts = []
    for start, end in pairwise(borders):
        row = decoded(states[start:end]).float()
        parts.append(row.view(len(row), -1, row.shape[-1]).norm(dim=-1))
    result = []
    for layer in torch.cat(parts).unbind(1):
        good = layer[layer.isfinite()]
        summary = (float(good.min()), float(good.mean()), float(good.max())) if len(good) else (float("nan"),) * 3
        result.append(Norms(*summary, len(layer) - len(good)))
    return result


def rows(shard: HiddenShard) -> Iterator[str]:
    """The first and the last rows."""
    count = len(shard.ids)
    shown = sorted({*range(min(SHOWN, count)), *range(max(count - SHOWN, 0), count)})
    borders, spans = shard.row_offsets.tolist(), shard.loss_spans.tolist()
    yield "rows:"
    for before, number in zip([-1, *shown], shown, strict=False):
        if number != before + 1:
            yield f"  … {number - before - 1:,} more"
        start, end = borders[number], borders[number + 1]
        own = [(first - start, last - start) for first, last in spans if start <= first < end]
        ids = shortened(shard.input_ids[start:end].tolist())
        yield f"  {number:>6} {shard.ids[number]}: {end - start:,} tokens, loss spans {shortened(own)}, ids {ids}"


def shortened(values: Sequence[object], limit: int = 8) -> str:
    """`values`, at most `limit` of them."""
    return ", ".join(map(str, values[:limit])) + (" …" if len(values) > limit else "")
