"""A working directory with a tiny target and tiny datasets, in which the real rules run in seconds."""

import copy
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.tiny import save_tiny_target

REPO = Path(__file__).parents[1]
PROJECT = ("Snakefile", "config.yaml", "rules", "scripts", "profiles", "envs")
WORDS = ["river", "stone", "light", "green", "bread", "winter", "paper", "cloud", "north", "glass", "salt", "wheel"]
PROMPTS = {"format": "messages", "columns": {"messages": "messages"}, "kind": "prompts", "partition": "short", "samples": 12}


def sentence(number: int) -> str:
    """A short text that differs for each `number`."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5)) + f" {number}"


def messages_row(number: int) -> dict:
    """A row of a messages dataset."""
    return {"messages": [{"role": "user", "content": sentence(number)}, {"role": "assistant", "content": sentence(number + 7)}]}


def sharegpt_row(number: int) -> dict:
    """A row of a ShareGPT dataset with two user turns."""
    turns = [("human", sentence(number)), ("gpt", sentence(number + 1)), ("human", sentence(number + 2)), ("gpt", sentence(number + 3))]
    return {"id": f"s{number}_0", "conversations": [{"from": label, "value": text} for label, text in turns]}


def columns_row(number: int) -> dict:
    """A row of a prompt/answer dataset."""
    return {"question": sentence(number), "answer": sentence(number + 5)}


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def toy_config(data: Path) -> dict:
    """The default config on toy data: three datasets (two regenerated, one native), two tasks, one small drafter."""
    config = yaml.safe_load((REPO / "config.yaml").read_text())
    config["run"] = "toy"
    config["target"] = {"source": f"path:{data}/target"}
    config["datasets"] = {
        "set0": PROMPTS | {"source": f"path:{data}/set0.jsonl"},
        "set1": PROMPTS | {"source": f"path:{data}/set1.jsonl", "format": "sharegpt", "columns": {"messages": "conversations", "id": "id"}},
        "set2": PROMPTS
        | {
            "source": f"path:{data}/set2.jsonl",
            "format": "columns",
            "columns": {"prompt": "question", "response": "answer"},
            "kind": "native",
        },
    }
    config["generate"] |= {"batch": 8, "max_tokens": {"short": 12, "long": 24}}
    config["merge"] |= {"eval_share": 0.2, "rows_per_shard": 16}
    config["vocab"]["size"] = 128
    config["hidden"] |= {"batch_tokens": 512, "tokens_per_shard": 1024}
    config["drafters"]["eagle3"] |= {"epochs": 2, "batch_tokens": 64, "eval_every": 8, "checkpoint_every": 4, "ttt_steps": 2}
    task = {"format": "columns", "columns": {"prompt": "prompt"}, "samples": 3, "max_tokens": 8}
    config["benchmark"]["tasks"] = {name: task | {"source": f"path:{data}/{name}.jsonl"} for name in ("task0", "task1")}
    config["benchmark"]["variants"] = {"chain2": {"drafter": "eagle3", "draft_steps": 2, "dtype": "float32"}}
    config["runtime"]["threads"] = dict.fromkeys(config["runtime"]["threads"], 1)
    return copy.deepcopy(config)


def write_data(data: Path) -> None:
    """The tiny target and raw files; set3 and task2 are there to be added."""
    save_tiny_target(data / "target")
    write_rows(data / "set0.jsonl", [messages_row(number) for number in range(0, 12)])
    write_rows(data / "set1.jsonl", [sharegpt_row(number) for number in range(100, 112)])
    write_rows(data / "set2.jsonl", [columns_row(number) for number in range(200, 212)])
    write_rows(data / "set3.jsonl", [messages_row(number) for number in range(300, 312)])
    for index in range(3):
        write_rows(data / f"task{index}.jsonl", [{"prompt": sentence(1000 * (index + 1) + number)} for number in range(3)])


def copy_project(directory: Path) -> None:
    """The project's own files with new times, as a fresh clone has them."""
    for name in PROJECT:
        source, destination = REPO / name, directory / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, destination, ignore=ignore, dirs_exist_ok=True, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, destination)


def make_toy(directory: Path) -> Path:
    """A fresh project in `directory` with the toy config and data; nothing has run yet."""
    directory.mkdir(parents=True)
    copy_project(directory)
    write_data(directory / "data")
    write_config(directory, toy_config(directory / "data"))
    return directory


def write_config(directory: Path, config: dict) -> None:
    """Replace the config."""
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def edit_config(directory: Path, edit: Callable[[dict], object]) -> None:
    """Apply `edit` to the config in place."""
    config = yaml.safe_load((directory / "config.yaml").read_text())
    edit(config)
    write_config(directory, config)


def command(*args: str) -> list[str]:
    """The command line of Snakemake in this interpreter's environment."""
    return [str(Path(sys.executable).with_name("snakemake")), "--nocolor", *args]


def snakemake(directory: Path, *args: str) -> str:
    """Run Snakemake in `directory`; its standard output, or an AssertionError with all that it printed."""
    done = subprocess.run(command(*args), cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stale_files(directory: Path) -> dict[str, set[str]]:
    """Rule to the outputs that the next run would build, as `--summary` says."""
    table = csv.DictReader(io.StringIO(snakemake(directory, "--summary")), delimiter="\t")
    stale: dict[str, set[str]] = {}
    for row in table:
        if row["plan"] != "no update":
            stale.setdefault(row["rule"], set()).add(row["output_file"])
    return stale


def stale(directory: Path) -> set[str]:
    """Rules with outputs that the next run would build."""
    return set(stale_files(directory))
