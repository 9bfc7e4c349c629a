"""SpecForge's own writer of hidden states, as far as it runs without a GPU, on given rows.

Its `HiddenStatesGenerator`, `OfflineCaptureLayout` and `DataCollatorWithPadding` are taken from a checkout of its repository (Apache-2.0)
and run as they are; only what asks for processes of others is stood in for. Its loop moves each padded batch to a GPU, captures states of
all padded positions (`sglang_backend/capture.py` gives SGLang the padded ids) and saves one sample after the other: here the states come
from shards of ours, so that what is saved has its shapes, and padding holds the last state of the row.
"""

import ast
import gzip
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple  # noqa: UP035  # its code names them so

import torch
from torch import Tensor

PARTS = {
    "specforge/algorithms/common/providers.py": ("OfflineCaptureLayout", "_non_empty"),
    "specforge/data/utils.py": ("DataCollatorWithPadding",),
    "scripts/prepare_hidden_states.py": ("HiddenStatesGenerator",),
}


@dataclass(frozen=True)
class Sample:
    """One row: ids i64[T], loss mask i64[T], aux states bf16 [T, 3H] and final ones bf16 [T, H]."""

    ids: Tensor
    mask: Tensor
    aux: Tensor
    final: Tensor


def parts(sources: Path) -> Mapping[str, Any]:
    """The classes of a checkout in `sources`, with stand-ins for what they ask of other processes."""
    alone = SimpleNamespace(
        get_rank=lambda *_: 0,
        barrier=lambda *_: None,
        is_initialized=lambda: False,
        is_available=lambda: False,
        get_world_size=lambda *_: 1,
    )
    stood_in = SimpleNamespace(**{**vars(torch), "distributed": alone})
    space: dict[str, Any] = {"torch": stood_in, "dist": alone, "gzip": gzip, "os": os, "ThreadPoolExecutor": ThreadPoolExecutor}
    space |= {"Mapping": Mapping, "Callable": Callable, "Dict": Dict, "List": List, "Optional": Optional, "Tuple": Tuple, "Any": Any}  # noqa: UP006
    space |= {"dataclass": dataclass, "tqdm": lambda things, **_: things, "is_tp_rank_0": lambda: True, "__name__": __name__}
    space |= {"get_tp_group": lambda: None, "get_dp_group": lambda: None}
    for file, names in PARTS.items():
        tree = ast.parse((sources / file).read_text())
        tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
        exec(compile(tree, file, "exec"), space)
    return space


def written(samples: Sequence[Sample], batch: int, folder: Path, sources: Path, compress: bool = False) -> int:
    """Bytes of the files that its writer makes of `samples` in `folder`, in batches of `batch` rows in their order.

    Its loader drops the last, smaller batch; it is kept here, since rows must be the same.
    """
    space = parts(sources)
    with space["HiddenStatesGenerator"](None, num_io_threads=1, compress=compress) as writer:
        writer._prepare_output_dirs(str(folder), 0, len(samples))
        for number, record in enumerate(padded(samples, batch, space["DataCollatorWithPadding"]())):
            writer._save_tensor_async(writer.capture_layout.materialize(record), writer._get_file_path(str(folder), number))
    return sum(path.stat().st_size for path in folder.rglob("data_*"))


def padded(
    samples: Sequence[Sample], batch: int, collate: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """What its loop hands to its writer for each of `samples`, as its collator pads them."""
    for start in range(0, len(samples), batch):
        group = samples[start : start + batch]
        ids = [{"input_ids": one.ids[None], "attention_mask": torch.ones_like(one.ids)[None], "loss_mask": one.mask[None]} for one in group]
        tensors = collate(ids)
        length = tensors["input_ids"].shape[1]
        for place, one in enumerate(group):
            filler = torch.arange(length).clamp(max=len(one.ids) - 1)
            yield {
                "input_ids": tensors["input_ids"][place].clone(),
                "loss_mask": tensors["loss_mask"][place].clone(),
                "aux_hidden_states": one.aux[filler].unsqueeze(0),
                "last_hidden_states": one.final[filler].unsqueeze(0),
            }
