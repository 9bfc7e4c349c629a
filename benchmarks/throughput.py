"""Stage generate against a bare loop and `sglang.bench_serving`, on one running server.

All three ask for the same prompts, greedily, with the same number of requests in flight; the server's cache is emptied before each.
The full phase is read from the server's own log: the mean of its generation throughput while nearly all places are taken.

    python -m benchmarks.throughput --url http://127.0.0.1:30000 --server-log server.log --target T --prepared P/manifest.json \
        --server-python /path/of/sglang/python

The last line is JSON: tokens, seconds and tokens_per_second of each, full_phase_tokens_per_second of each, and the two ratios.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from scripts.lib.chat.messages import from_rows
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.files import canonical
from scripts.lib.ground.manifest import checked_shard, read_manifest

DECODING = re.compile(r"Decode batch.*#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)")
FULL = 0.9  # of the places: the line in the log counts those that run at that moment, and stage generate refills a sixteenth at a time


def main() -> None:
    """Run the three one after the other and print their figures."""
    arguments = parsed()
    log = Path(arguments.server_log)
    figures: dict[str, Any] = {}
    for name, run in (("bare_loop", bare_loop), ("generate", stage), ("bench_serving", bench_serving)):
        if name not in arguments.only.split(","):
            continue
        urllib.request.urlopen(urllib.request.Request(f"{arguments.url}/flush_cache", method="POST")).read()
        time.sleep(2)
        begin = log.stat().st_size
        figures[name] = run(arguments)
        figures[name]["full_phase_tokens_per_second"] = full_phase(log, begin, arguments.concurrency)
        print(name, json.dumps(figures[name]), flush=True)
    if {"bare_loop", "generate"} <= set(figures):
        figures["whole_run_over_bare_loop"] = round(figures["generate"]["tokens_per_second"] / figures["bare_loop"]["tokens_per_second"], 3)
    if "generate" in figures and len(figures) > 1:
        best = max(part["full_phase_tokens_per_second"] for name, part in figures.items() if name in ("bare_loop", "bench_serving"))
        figures["full_phase_over_best_peer"] = round(figures["generate"]["full_phase_tokens_per_second"] / best, 3)
    print(json.dumps(figures))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--server-log", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--gather", type=float, default=0.5, help="runtime.requests.gather of the stage")
    parser.add_argument("--bench-prompts", type=int, default=4000, help="of bench_serving, which is read for its full phase only")
    parser.add_argument("--only", default="bare_loop,generate,bench_serving")
    return parser.parse_args()


def full_phase(log: Path, begin: int, concurrency: int) -> float:
    """Mean throughput of the server's decode lines behind byte `begin` of its log, while it is full; NaN when it never was."""
    with log.open("rb") as lines:
        lines.seek(begin)
        found = [DECODING.search(line.decode(errors="replace")) for line in lines]
    rates = [float(match[2]) for match in found if match and int(match[1]) >= FULL * concurrency]
    rates = rates[1:]  # the first line after a start also counts the idle time before
    return round(sum(rates) / len(rates), 1) if rates else float("nan")


def prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """The ids of every prompt, in a shuffled order."""
    template = ChatTemplate.load(arguments.target)
    manifest = read_manifest(arguments.prepared, "prepare")
    rows = pl.concat([pl.read_parquet(checked_shard(arguments.prepared.parent, shard)) for shard in manifest.shards])
    first = [list(from_rows(messages)) for messages in rows["messages"].to_list()]
    opened = [messages[: next(place for place, message in enumerate(messages) if message.role == "user") + 1] for messages in first]
    ids = [list(template.prompt_ids(messages)) for messages in opened]
    random.Random(0).shuffle(ids)
    return ids


def bare_loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """A semaphore and one HTTP request a prompt: what most people write first."""
    ids = prompts(arguments)
    begin = time.perf_counter()
    tokens = asyncio.run(ask_all(arguments, ids))
    return rate(tokens, time.perf_counter() - begin) | {"prompts": len(ids)}


async def ask_all(arguments: argparse.Namespace, ids: Sequence[list[int]]) -> int:
    """Completion tokens of all answers."""
    import aiohttp

    places = asyncio.Semaphore(arguments.concurrency)
    greedy = {"temperature": 0, "max_new_tokens": arguments.max_tokens}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(prompt: list[int]) -> int:
            async with (
                places,
                session.post(f"{arguments.url}/generate", json={"input_ids": prompt, "sampling_params": greedy}) as reply,
            ):
                return int((await reply.json())["meta_info"]["completion_tokens"])

        return sum(await asyncio.gather(*map(ask, ids)))


def stage(arguments: argparse.Namespace) -> dict[str, Any]:
    """The stage as Snakemake runs it, from the start of its process to its published files."""
    options = json.loads(canonical(defaults()["generate"])) | {
        "engine": "sglang",
        "dtype": "bfloat16",
        "max_tokens": {"short": arguments.max_tokens, "long": arguments.max_tokens},
    }
    asking = {"concurrency": {"short": arguments.concurrency, "long": arguments.concurrency}, "gather": arguments.gather}
    runtime = {
        "device": "cuda",
        "threads": 1,
        "server": {"tp": 1, "dp": 1, "urls": [arguments.url]},
        "requests": defaults()["runtime"]["requests"] | asking,
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results" / "throughput" / "responses" / "prompts" / "manifest.json"
        begin = time.perf_counter()
        subprocess.run(
            [
                *(sys.executable, "-m", "scripts.generate", "--prepared", str(arguments.prepared.resolve())),
                *("--target", str(arguments.target.resolve() / "manifest.json"), "--output", str(output)),
                *("--settings", canonical({"generate": options, "name": "prompts", "seed": 7}), "--runtime", canonical(runtime)),
            ],
            check=True,
        )
        seconds = time.perf_counter() - begin
        answers = pl.concat([pl.read_parquet(path) for path in sorted(output.parent.glob("responses-*.parquet"))])
        cost = json.loads((output.parent / "cost.json").read_text())
    return rate(int(answers["output_ids"].list.len().sum()), seconds) | {"prompts": answers.height, "stage_seconds": cost["seconds"]}


def defaults() -> dict[str, Any]:
    """The project's own config."""
    import yaml

    return dict(yaml.safe_load(Path("config.yaml").read_text()))


def bench_serving(arguments: argparse.Namespace) -> dict[str, Any]:
    """SGLang's own client on the same prompts as text, as it has no way to take ids from a file."""
    template = ChatTemplate.load(arguments.target)
    ids = prompts(arguments)[: arguments.bench_prompts]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.json"
        texts = [template.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in ids]
        turns = [{"conversations": [{"value": text}, {"value": "an answer of a few words"}]} for text in texts]
        data.write_text(json.dumps(turns))
        command = [
            *(arguments.server_python, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", arguments.url),
            *("--model", str(arguments.target), "--tokenizer", str(arguments.target)),
            *("--dataset-name", "sharegpt", "--dataset-path", str(data), "--sharegpt-output-len", str(arguments.max_tokens)),
            *("--num-prompts", str(len(ids)), "--max-concurrency", str(arguments.concurrency), "--disable-ignore-eos", "--disable-tqdm"),
            *("--output-file", str(Path(folder) / "result.jsonl")),
        ]
        subprocess.run(command, check=True)
        result = json.loads((Path(folder) / "result.jsonl").read_text().splitlines()[-1])
    return rate(result["total_output_tokens"], result["duration"]) | {"prompts": result["completed"]}


def rate(tokens: int, seconds: float) -> dict[str, Any]:
    """The three figures of a run."""
    return {"tokens": tokens, "seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds, 1)}


if __name__ == "__main__":
    main()
