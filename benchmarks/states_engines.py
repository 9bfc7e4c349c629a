"""States of SGLang against those of transformers on real rows, and what dumping costs the server.

python -m benchmarks.states_engines --target results/demo/target --rows results/demo/tokens/*/manifest.json

Starts one server, as stage hidden does with `hidden.engine: sglang`. Plain prefills of the rows and dumps of them take turns on it: the
hook leaves requests alone that do not ask for states. Then the rows are written as a shard, beside a plain file of as many bytes, and
transformers computes them too. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch.nn.functional import cosine_similarity

from benchmarks.hidden_stage import timed, write_speeds
from scripts.lib.eagle3.layers import default_boundaries
from scripts.lib.engines.opening import DTYPES, open_engine
from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.engines.settings import EngineSettings, TargetShape
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.format import write_rows
from scripts.lib.states.rows import TokenRow
from scripts.lib.states.served import Serving
from scripts.lib.states.served_asking import ANSWER_SECONDS, IN_FLIGHT, Asking, grouped


def main() -> None:
    """Measure and print."""
    options = arguments()
    rows = real_rows(options.rows, options.count, options.max_tokens)
    boundaries = default_boundaries(TargetShape.of(options.target).layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        runtime = {"device": options.device, "server": {"python": options.python, "flags": options.flags.split()}}
        serving = Serving.of(runtime, options.target, options.dtype, boundaries, folder / "partial" / "pieces")
        with serving.open() as asking:
            speeds, states = dumped(asking, rows, options.repeats)
        speeds |= write_speeds(folder, partial(write_rows, rows=rows, states=states))
        print(speeds, flush=True)
    settings = EngineSettings("transformers", options.dtype, options.device, options.threads)
    engine = open_engine(settings, options.target, frozenset())
    start = time.perf_counter()
    plain = capture(engine, rows, boundaries, Batching(options.batch_tokens, leads=options.device == "cpu")).wait()
    speeds["transformers_tokens_per_second"] = round(tokens(rows) / (time.perf_counter() - start), 1)
    versions = serving.versions()
    print(
        json.dumps(
            {"rows": len(rows), "tokens": tokens(rows), "dtype": options.dtype, "device": options.device, **versions, **speeds}
            | {"layers": likeness(boundaries, states, plain), "argmax_alike": alike(states, plain)}
        )
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder in HF layout")
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="manifests of stages encode or merge")
    parser.add_argument("--python", help="SGLang's interpreter, if not what `make sglang` or `make sglang-cpu` set up")
    parser.add_argument("--flags", default="", help="further flags of the server, in one string")
    parser.add_argument("--count", type=int, default=200, help="rows, evenly drawn")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a row; longer ones are cut")
    parser.add_argument("--repeats", type=int, default=5, help="plain prefills and dumps of all rows, in turns")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of transformers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="where states are written")
    return parser.parse_args()


def real_rows(manifests: Sequence[Path], count: int, most: int) -> list[TokenRow]:
    """`count` rows, evenly drawn; of longer ones the first `most` tokens."""
    columns = ["id", "dataset", "input_ids", "loss_spans"]
    tables = [pl.read_parquet(path, columns=columns) for manifest in manifests for path in sorted(manifest.parent.glob("t*-*.parquet"))]
    table = pl.concat(tables)
    drawn = table.gather_every(max(1, table.height // count)).head(count)
    return [cut(TokenRow(name, tuple(ids), spans_of(spans), dataset), most) for name, dataset, ids, spans in drawn.iter_rows()]


def spans_of(spans: Sequence[dict[str, int]]) -> tuple[tuple[int, int], ...]:
    """Loss spans as pairs."""
    return tuple((span["start"], span["end"]) for span in spans)


def cut(row: TokenRow, most: int) -> TokenRow:
    """The first `most` tokens of `row`."""
    spans = tuple((start, min(end, most)) for start, end in row.spans if start < most)
    return replace(row, input_ids=row.input_ids[:most], spans=spans)


def tokens(rows: Sequence[TokenRow]) -> int:
    """Of all rows."""
    return sum(len(row.input_ids) for row in rows)


def dumped(asking: Asking, rows: Sequence[TokenRow], repeats: int) -> tuple[dict[str, Any], list[RowStates]]:
    """Tokens a second of plain prefills and of dumps, in turns on one server after a turn of all rows that is not counted; the states."""
    requests = [StateRequest(row.input_ids, row.final_index) for row in rows]
    states: list[RowStates] = []
    seconds: dict[str, list[float]] = {"prefill": [], "dump": []}
    for _ in range(repeats + 1):
        seconds["prefill"].append(timed(lambda: prefill(asking, requests)))
        states.clear()
        asking.announce(requests)
        seconds["dump"].append(timed(lambda: states.extend(asking.take(request) for request in requests)))
        print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    seconds = {name: values[1:] for name, values in seconds.items()}
    speeds = {name: tokens(rows) / statistics.median(values) for name, values in seconds.items()}
    shares = [plain / dump for plain, dump in zip(seconds["prefill"], seconds["dump"], strict=True)]
    figures = {f"{name}_tokens_per_second": round(speed, 1) for name, speed in speeds.items()}
    return figures | {"dump_of_prefill": round(statistics.median(shares), 3)}, states


def prefill(asking: Asking, requests: Sequence[StateRequest]) -> None:
    """The same requests in the same groups, without asking for states."""

    def ask(group: Sequence[StateRequest]) -> None:
        body = {"input_ids": [row.input_ids for row in group], "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{asking.running.urls[0]}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            answer.read()

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(ask, grouped(requests)))


def likeness(boundaries: Sequence[int], states: Sequence[RowStates], plain: Sequence[RowStates]) -> dict[str, dict[str, float]]:
    """Smallest and mean cosine over all tokens, by layer."""
    pairs = [("final", (one.final, other.final)) for one, other in zip(states, plain, strict=True)]
    for place, boundary in enumerate(boundaries):
        pairs += [(f"{boundary}", (one.aux[:, place], other.aux[:, place])) for one, other in zip(states, plain, strict=True)]
    values: dict[str, list[torch.Tensor]] = {}
    for name, (one, other) in pairs:
        values.setdefault(name, []).append(cosine_similarity(one.double(), other.double(), dim=-1))
    joined = {name: torch.cat(parts) for name, parts in values.items()}
    return {name: {"min": round(float(all_.min()), 6), "mean": round(float(all_.mean()), 7)} for name, all_ in joined.items()}


def alike(states: Sequence[RowStates], plain: Sequence[RowStates]) -> float:
    """Share of teachers whose best token is the same."""
    same = torch.cat([one.argmax == other.argmax for one, other in zip(states, plain, strict=True)])
    return round(float(same.double().mean()), 5)


if __name__ == "__main__":
    main()
