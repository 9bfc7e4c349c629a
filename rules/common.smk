"""Names, constraints and params that all rules share."""

import json

from snakemake.exceptions import WorkflowError

from scripts.lib.ground.config import check_config, without_nulls
from scripts.lib.ground.files import canonical
from scripts.lib.ground.provenance import code

config = without_nulls(config)
check_config(config, Path(workflow.basedir) / "rules/config.schema.json", WorkflowError)

RUN = config["run"]
DATASETS = sorted(config["datasets"])
PROMPTS = [name for name in DATASETS if config["datasets"][name]["kind"] == "prompts"]
TASKS = sorted(config["benchmark"]["tasks"])
DRAFTERS = sorted(config["drafters"])
VARIANTS = sorted(config["benchmark"]["variants"])

# What of a dataset decides which bytes are fetched, and what only the benchmark or the mix reads; `prepare` takes the rest.
FETCHED = ("source", "revision", "subset", "split", "members", "exclude", "generator", "licence")
BENCHMARKED = ("max_tokens",)
MIXED = ("weight",)


wildcard_constraints:
    run=RUN,
    source="|".join(DATASETS + TASKS),
    dataset="|".join(DATASETS),
    task="|".join(TASKS),
    drafter="|".join(DRAFTERS),
    variant="|".join(VARIANTS),


def settings(*sections, **extra):
    """The named config sections as canonical JSON: one param to pass to a script and to compare."""
    return canonical({name: config[name] for name in sections} | extra)


def source_config(name):
    """The config of a dataset or a benchmark task, which are fetched and prepared alike."""
    tasks = config["benchmark"]["tasks"]
    return config["datasets"][name] if name in config["datasets"] else {"kind": "prompts", "partition": "short"} | tasks[name]


def fetch_settings(wildcards):
    """Where the bytes of a source come from; the seed counts only where they are generated."""
    source = source_config(wildcards.source)
    seed = config["seed"] if source["source"].startswith("generator:") else 0
    return canonical({"source": {key: source[key] for key in FETCHED if key in source}, "name": wildcards.source, "seed": seed})


def prepare_settings(wildcards):
    """How raw records become rows."""
    source = source_config(wildcards.source)
    dataset = {key: value for key, value in source.items() if key not in FETCHED + BENCHMARKED + MIXED}
    return canonical({"dataset": dataset, "name": wildcards.source, "seed": config["seed"]})


def encode_rows(wildcards):
    """The target's own answers, or the prepared rows of a native dataset."""
    folder = "responses" if wildcards.dataset in PROMPTS else "prepared"
    return f"results/{RUN}/{folder}/{wildcards.dataset}/manifest.json"


def generate_settings(wildcards):
    """How the target answers."""
    return settings("generate", "seed", name=wildcards.dataset)


def encode_settings(wildcards):
    """How rows become tokens and loss spans."""
    return settings("encode", name=wildcards.dataset, kind=config["datasets"][wildcards.dataset]["kind"])


def merge_settings(wildcards):
    """How the datasets are mixed; a weight of 1 is as good as none."""
    weights = {name: config["datasets"][name].get("weight", 1) for name in DATASETS}
    return settings("merge", "seed", weights={name: weight for name, weight in weights.items() if weight != 1})


def hidden_settings(wildcards):
    """How states are made and stored, and in which datasets every next token was the target's first choice."""
    hidden = {key: value for key, value in config["hidden"].items() if key != "max_bytes"}
    return canonical({"hidden": hidden, "greedy": PROMPTS if config["generate"]["temperature"] == 0 else []})


def train_settings(wildcards):
    """The drafter's own recipe."""
    return settings("seed", drafter=config["drafters"][wildcards.drafter], name=wildcards.drafter)


def variant_drafter(wildcards):
    """The drafter that a variant serves."""
    drafter = config["benchmark"]["variants"][wildcards.variant]["drafter"]
    return f"results/{RUN}/drafters/{drafter}/manifest.json"


def cell_settings(wildcards):
    """One task and one variant: a change to another cell's options is none of this one's business."""
    benchmark = config["benchmark"]
    task = {key: value for key, value in benchmark["tasks"][wildcards.task].items() if key in BENCHMARKED}
    return canonical(
        {
            "task": task,
            "variant": benchmark["variants"][wildcards.variant],
            "task_name": wildcards.task,
            "variant_name": wildcards.variant,
            "repeats": benchmark["repeats"],
            "seed": config["seed"],
        }
    )


def on_machine(wildcards, threads):
    """Device and threads: Snakemake does not compare params that are derived from threads."""
    return json.dumps({"device": config["runtime"]["device"], "threads": threads})


def hidden_machine(wildcards, threads):
    """Device, threads, and the bytes that states may take, which decide whether the job starts and no byte of what it writes."""
    return json.dumps({**json.loads(on_machine(wildcards, threads)), "max_bytes": config["hidden"]["max_bytes"]})


THREADS = config["runtime"]["threads"]
GPUS = int(config["runtime"]["device"].startswith("cuda"))


# The keys of `runtime` that a generate job reads beside device and threads.
SERVING = ("server", "requests")
ATTACHED = bool(config["runtime"].get("server", {}).get("urls"))
SERVED = config["generate"]["engine"] == "sglang"


def generate_runtime(wildcards, threads):
    """Device, threads, servers and requests: Snakemake does not compare params that are derived from threads."""
    runtime = config["runtime"]
    return json.dumps({"device": runtime["device"], "threads": threads} | {key: runtime[key] for key in SERVING if key in runtime})


def asks(partition):
    """How many of the one place for jobs that ask servers about rows of `partition` a job takes.

    Servers that others run are asked by one job of each partition at a time, which share their memory for keys and
    values as `runtime.requests.concurrency` says. A job that starts a server takes both places: it is alone.
    """
    return lambda wildcards: int(SERVED and (not ATTACHED or config["datasets"][wildcards.dataset]["partition"] == partition))


def train_machine(wildcards, threads):
    """Device, threads and processes: as little compared as `on_machine`."""
    return json.dumps({**json.loads(on_machine(wildcards, threads)), "ranks": config["runtime"].get("ranks", 1)})
