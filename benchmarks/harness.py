"""What measuring costs: the same prompts through a benchmark cell's client and through a bare loop, against the same server.

`python -m benchmarks.harness` on a stub that writes a token every few milliseconds; with `--python INTERPRETER [--device cuda]
[--flag=--mem-fraction-static --flag=0.5 …]` on a real server of a tiny target, the fastest one there is, which a client can slow down most;
or with `--target DIR --prepared MANIFEST` besides, of another one.
The bare loop is threads that post a prompt and read its answer, which is streamed too, to the end without looking at any piece or clock.
Both take turns, so that what else the machine does reaches both. The last line is JSON: at each concurrency the median tokens a second of
both, by how much the cell's client is slower (the median over turns) with the 95 % interval of that, drawn anew from the turns, and the CPU
milliseconds that each client took for a token.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from scripts.lib.benchmark.load import Load
from scripts.lib.benchmark.prompts import Prompt, first_turn, prepared_rows
from scripts.lib.benchmark.served import flush
from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.serving.asking import healthy
from scripts.lib.serving.launch import free_port
from scripts.lib.serving.server import server
from scripts.lib.serving.settings import ServerSettings
from tests.tiny import save_tiny_target

STUB = Path(__file__).parents[1] / "tests/stub_speculation.py"
HOST = "127.0.0.1"
DRAWS = 2000


def bare_loop(url: str, load: Load, prompts: Sequence[Prompt]) -> tuple[float, int]:
    """Seconds and tokens of a loop that does nothing but ask."""
    waiting, lock, tokens = iter(prompts), threading.Lock(), []
    address = urlsplit(url)

    def work() -> None:
        connection = http.client.HTTPConnection(address.hostname or HOST, address.port)
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            connection.request("POST", "/generate", load.body(prompt.ids), {"Content-Type": "application/json"})
            last = connection.getresponse().read().split(b"\n\n")[-3]  # behind it come the mark of the end and nothing
            tokens.append(json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"])

    threads = [threading.Thread(target=work) for _ in range(load.concurrency)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, sum(tokens)


def cell_client(url: str, load: Load, prompts: Sequence[Prompt]) -> tuple[float, int]:
    """Seconds and tokens of a cell's client."""
    seconds, talks = load.run(url, prompts)
    return seconds, sum(len(turn.answer.ids) for talk in talks for turn in talk)


def compared(url: str, load: Load, prompts: Sequence[Prompt], repeats: int) -> dict[str, float]:
    """Tokens a second of both in `repeats` runs that take turns, after one of each that is not counted."""
    speeds: dict[str, list[float]] = {"bare": [], "cell": []}
    busy: dict[str, list[float]] = {"bare": [], "cell": []}
    ways = {"bare": bare_loop, "cell": cell_client}
    for number in range(-1, repeats):
        for name in sorted(ways, reverse=number % 2 == 1):
            flush(url)
            begin = time.process_time()
            seconds, tokens = ways[name](url, load, prompts)
            if number >= 0:
                speeds[name].append(tokens / seconds)
                busy[name].append(1000 * (time.process_time() - begin) / tokens)
    slower = [1 - cell / bare for bare, cell in zip(speeds["bare"], speeds["cell"], strict=True)]
    draw = random.Random(0)
    drawn = statistics.quantiles((statistics.median(draw.choices(slower, k=repeats)) for _ in range(DRAWS)), n=40)
    found = {f"{name}_tok_s": statistics.median(values) for name, values in speeds.items()}
    found |= {"slower": statistics.median(slower), "from": drawn[0], "to": drawn[-1]}
    found |= {f"{name}_cpu_ms": statistics.median(values) for name, values in busy.items()}
    return {name: round(value, 4) for name, value in found.items()}


@contextlib.contextmanager
def stub(target: Path, seconds: float) -> Iterator[str]:
    """The URL of a server that takes `seconds` for a step."""
    port = free_port(HOST)
    environment = {**os.environ, "STUB_SECONDS": str(seconds), "STUB_FOLDER": str(target), "STUB_TOKENS": "0"}
    flags = ["--host", HOST, "--port", str(port), "--model-path", str(target), "--speculative-algorithm", "EAGLE3"]
    process = subprocess.Popen([sys.executable, "-S", "-E", str(STUB), *flags], env=environment)
    try:
        while not healthy(f"http://{HOST}:{port}", 1.0):
            time.sleep(0.05)
        yield f"http://{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


def made_up(template: ChatTemplate, count: int) -> list[Prompt]:
    """Prompts for the stub."""
    asked = [Message("user", f"How much does asking cost, for the {number}th time?") for number in range(count)]
    return [Prompt(str(n), tuple(template.prompt_ids([message])), (message,), (1,)) for n, message in enumerate(asked)]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="a target in HF layout; without it, a tiny one")
    parser.add_argument("--prepared", type=Path, help="manifest of a prepared task, for --target")
    parser.add_argument("--python", help="SGLang's interpreter; without it, the stub")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--flag", action="append", default=[], help="a further word of the server's command line")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.004, help="of a step of the stub")
    return parser.parse_args()


def main() -> None:
    """Start a server, compare, print."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = options.target or save_tiny_target(folder / "target", layers=1)
        template = ChatTemplate.load(target)
        if options.prepared:
            found = [prompt for row in prepared_rows(options.prepared) if (prompt := first_turn(row, template))][: options.prompts]
        else:
            found = made_up(template, options.prompts)
        if options.python:
            settings = ServerSettings(python=options.python, device=options.device)
            running = stack.enter_context(server(settings, target, folder / "log", ["--incremental-streaming-output", *options.flag]))
            (url,) = running.urls
        else:
            url = stack.enter_context(stub(target, options.seconds))
        results = {}
        for concurrency in options.concurrency:
            load = Load(template, options.max_tokens, concurrency, "first")
            results[f"c{concurrency}"] = compared(url, load, found, options.repeats)
            print(f"concurrency {concurrency}: {results[f'c{concurrency}']}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
