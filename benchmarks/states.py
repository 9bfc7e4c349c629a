"""How fast hidden states are written and read, and how many bytes they take, by the way in which they are stored.

`python benchmarks/states.py [--states results/demo/hidden] [--specforge CHECKOUT]`. Without `--states` the states are made up, of the
sizes of an 8B target, with layers, channels and first tokens of different scale. Reading is what the trainer does: rows of a shard in the
page cache are decoded in its loader's threads and put together in memory that is used again for each batch (page-locked where there is a
GPU, which then gets them). GB are 10^9 bytes of bfloat16 states, a second on the wall and, as machines are shared, a second of the CPU.
Writing includes fsync, and is compared with plain writes of as many bytes. The last line is JSON.
"""

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.states_specforge import Sample, written
from scripts.lib.ground.files import write_bytes
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import HiddenShard, write_shard
from scripts.lib.states.reader import read_shard
from scripts.lib.states.storing import Storing, every_storing
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.loader import packed_batches
from scripts.lib.training.packed import Capacity
from scripts.lib.training.rows import shard_rows

ROW_TOKENS, PROMPT_TOKENS = 512, 160  # of made-up rows
BATCH_SLOTS = 8192
REPEATS = 3


def main() -> None:
    """Measure, print a line for each way of storing, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=Path, help="folder of stage hidden")
    parser.add_argument("--hidden-size", type=int, default=4096, help="of made-up states")
    parser.add_argument("--tokens", type=int, default=8192, help="of made-up states")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; a temporary one if not given")
    parser.add_argument("--specforge", type=Path, help="a checkout of its repository: its writer gets the same rows")
    parser.add_argument("--gzip", action="store_true", help="let SpecForge compress, too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shards = [in_memory(path) for path in sorted(options.states.glob("*.safetensors"))] if options.states else [made_up(options)]
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    figures: dict[str, Any] = {"tokens": sum(shard.tokens for shard in shards), "threads": torch.get_num_threads()}
    try:
        figures |= by_option(shards, folder)
        if options.specforge:
            kinds = (False, True) if options.gzip else (False,)
            figures["specforge"] = against_specforge(shards, folder, (options.specforge, kinds), figures["bytes_per_token"])
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures))


FIGURES = (
    "read_gb_per_second",
    "read_gb_per_cpu_second",
    "write_gb_per_second",
    "write_gb_per_cpu_second",
    "write_of_disk",
    "bytes_per_token",
)


def by_option(shards: Sequence[HiddenShard], folder: Path) -> dict[str, Any]:
    """`FIGURES` of each way of storing; `write_of_disk` is the speed of writing over that of writing as many plain bytes."""
    plain = sum(decoded(states).nbytes for shard in shards for states in (shard.aux, shard.final))
    tokens = sum(shard.tokens for shard in shards)
    figures: dict[str, Any] = {name: {} for name in FIGURES}
    paths = [folder / f"{number}.safetensors" for number in range(len(shards))]
    for storing in every_storing():
        wrote, wrote_cpu = best(functools.partial(write_all, paths, shards, storing))
        size = sum(path.stat().st_size for path in paths)
        disk, _ = best(functools.partial(copy_all, [path.read_bytes() for path in paths], folder / "plain"))
        read, read_cpu = read_speeds(paths)
        found = (read, read_cpu, plain / wrote / 1e9, plain / wrote_cpu / 1e9, disk / wrote, size / tokens)
        name = f"{storing.dtype} {storing.compression}"
        for key, value in zip(FIGURES, found, strict=True):
            figures[key][name] = round(value, 3 if value < 100 else 1)
        print(name, {key: values[name] for key, values in figures.items()})
    return figures


def write_all(paths: Sequence[Path], shards: Sequence[HiddenShard], storing: Storing) -> None:
    """Write each of `shards` as stage hidden does."""
    for path, shard in zip(paths, shards, strict=True):
        write_shard(path, shard, storing)


def copy_all(contents: Sequence[bytes], path: Path) -> None:
    """Write each of `contents` to the disk."""
    for content in contents:
        write_bytes(path, content)


def read_speeds(paths: Sequence[Path]) -> tuple[float, float]:
    """GB of states, a second on the wall and of the CPU, that are read from mapped shards in the page cache."""
    runs = list(in_runs([row for path in paths for row in shard_rows(path, read_shard(path)) if len(row.slots)]))
    capacity = Capacity.of(*runs)
    width = runs[0][0].aux.shape[2]
    memory = torch.zeros(capacity.positions, 3, width, dtype=torch.bfloat16), torch.zeros(capacity.slots, width, dtype=torch.bfloat16)
    size = sum(2 * width * (3 * len(row.aux) + len(row.final)) for run in runs for row in run)

    def read() -> None:
        if torch.cuda.is_available():
            for _ in packed_batches(runs, capacity, torch.bfloat16, "cuda"):
                pass
            torch.cuda.synchronize()
        else:
            into_memory(runs, memory)

    read()
    wall, cpu = best(read)
    return size / wall / 1e9, size / cpu / 1e9


def into_memory(runs: Sequence[Sequence[TrainingRow]], memory: tuple[Tensor, Tensor]) -> None:
    """Put the states of each of `runs` into the same `memory`, as the loader does with page-locked memory where there is a GPU."""
    with ThreadPoolExecutor(torch.get_num_threads()) as readers:
        for run in runs:
            for whole, parts in zip(memory, ([row.aux for row in run], [row.final for row in run]), strict=True):
                place = 0
                for part in readers.map(decoded, parts):
                    whole[place : place + len(part)].copy_(part)
                    place += len(part)


def in_runs(rows: Sequence[TrainingRow]) -> Iterator[list[TrainingRow]]:
    """Runs of rows of about `BATCH_SLOTS` slots."""
    run: list[TrainingRow] = []
    for row in rows:
        run.append(row)
        if sum(len(other.slots) for other in run) >= BATCH_SLOTS:
            yield run
            run = []
    if run:
        yield run


def best(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall and of the CPU, each of the quickest of several runs."""
    wall, cpu = [], []
    for _ in range(REPEATS):
        start, used = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu)


def in_memory(path: Path) -> HiddenShard:
    """A shard with all its states as tensors in memory."""
    shard = read_shard(path)
    return HiddenShard(**{**vars(shard), "aux": decoded(shard.aux).clone(), "final": decoded(shard.final).clone()})


def made_up(options: argparse.Namespace) -> HiddenShard:
    """States of noise: channels differ in scale by a lognormal factor, layers by 3 and 8, first tokens by 1000."""
    size, rows = options.hidden_size, max(options.tokens // ROW_TOKENS, 1)
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(4, size, generator=generator).mul(0.5).exp() * torch.tensor([0.3, 1.0, 2.5, 2.0])[:, None]
    teachers = ROW_TOKENS - PROMPT_TOKENS - 1
    aux = torch.cat([torch.randn(ROW_TOKENS, 3, size, generator=generator).mul(scales[:3]).bfloat16() for _ in range(rows)])
    aux[::ROW_TOKENS] *= 1000
    final = torch.cat([torch.randn(teachers, size, generator=generator).mul(scales[3]).bfloat16() for _ in range(rows)])
    starts = torch.arange(rows) * ROW_TOKENS
    places = (starts[:, None] + torch.arange(PROMPT_TOKENS, ROW_TOKENS - 1)).flatten()
    return HiddenShard(
        input_ids=torch.randint(0, 32_000, (rows * ROW_TOKENS,), dtype=torch.int32, generator=generator),
        row_offsets=torch.arange(rows + 1) * ROW_TOKENS,
        aux=aux,
        final=final,
        final_index=places,
        argmax=torch.zeros(len(places), dtype=torch.int32),
        loss_spans=torch.stack([starts + PROMPT_TOKENS, starts + ROW_TOKENS], 1),
        ids=tuple(f"row{number}" for number in range(rows)),
    )


def against_specforge(
    shards: Sequence[HiddenShard], folder: Path, writer: tuple[Path, Sequence[bool]], ours: Mapping[str, float]
) -> dict[str, Any]:
    """Bytes a token that its `writer` (a checkout, whether it compresses) takes for the same rows in batches of 8 and 32, and ours."""
    sources, kinds = writer
    samples = [sample for shard in shards for sample in samples_of(shard)]
    tokens = sum(len(sample.ids) for sample in samples)
    figures: dict[str, Any] = {}
    for batch in (8, 32):
        for compress in kinds:
            place = folder / f"specforge-{batch}-{compress}"
            size = written(samples, batch, place, sources, compress) / tokens
            shutil.rmtree(place)
            name = f"batch {batch}{', gzip' if compress else ''}"
            figures[name] = {"bytes_per_token": round(size, 1), "ours": {key: round(value / size, 3) for key, value in ours.items()}}
            print("SpecForge,", name, figures[name])
    return figures


def samples_of(shard: HiddenShard) -> Iterator[Sample]:
    """The rows of `shard` as SpecForge has them; where we keep no final state it gets another one of the row."""
    borders, spans = shard.row_offsets.tolist(), shard.loss_spans.tolist()
    aux, final = decoded(shard.aux), decoded(shard.final)
    for start, end in pairwise(borders):
        mask = torch.zeros(end - start, dtype=torch.int64)
        for first, last in spans:
            if start <= first < end:
                mask[first - start : last - start] = 1
        low, high = torch.searchsorted(shard.final_index, torch.tensor([start, end])).tolist()
        teachers = low + torch.arange(end - start) % (high - low)
        yield Sample(shard.input_ids[start:end].long(), mask, aux[start:end].flatten(1), final[teachers])


if __name__ == "__main__":
    main()
