"""Names, constraints and params that all rules share."""

import json
from functools import cache

from snakemake.exceptions import WorkflowError
from snakemake.jobs import Job

from scripts.lib.ground.config import check_config, without_nulls
from scripts.lib.ground.files import canonical, sha256_file
from scripts.lib.ground.provenance import code
from scripts.lib.training.memory import Sizes, estimate, expected_load, trained_share

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
BENCHMARKED = ("max_tokens", "turns")
MIXED = ("weight",)
DRAFTER_SUFFIXES = (".json", ".safetensors", ".bin")


wildcard_constraints:
    run=RUN,
    source="|".join(DATASETS + TASKS),
    dataset="|".join(DATASETS),
    task="|".join(TASKS),
    drafter="|".join(DRAFTERS),
    variant="|".join(VARIANTS),
    concurrency=r"\d+",


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


ROLLING = config["hidden"]["mode"] == "rolling"


def rolled_rows(wildcards):
    """The merged rows, which a training needs where its states come and go."""
    return [f"results/{RUN}/merged/manifest.json"] if ROLLING else []


def train_settings(wildcards):
    """The drafter's own recipe, and the bytes of what it starts from where no other job of this run makes them."""
    drafter = config["drafters"][wildcards.drafter]
    outside = drafter.get("start_from") and not start_drafter(wildcards)
    start = drafter_files(drafter["start_from"]) if outside else {}
    return settings("seed", drafter=drafter, name=wildcards.drafter, **({"start": start} if start else {}))


def start_drafter(wildcards):
    """The drafter of this run that a drafter starts from."""
    start = Path(config["drafters"][wildcards.drafter].get("start_from") or ".")
    own = start.parent == Path(f"results/{RUN}/drafters") and start.name in DRAFTERS
    return str(start.joinpath("manifest.json")) if own else []


@cache
def drafter_files(folder):
    """The digests of a drafter's files in a folder that no job of this run writes; none where there is none, of which the job will complain."""
    paths = sorted(path for path in Path(folder).expanduser().glob("*") if path.suffix in DRAFTER_SUFFIXES)
    return {path.name: sha256_file(path) for path in paths}


def train_memory(wildcards, input):
    """Expected memory of a training on each GPU, or else of the machine, in 10^6 bytes: a dry run says it once the target is there."""
    path = Path(input.target).with_name("config.json")
    if not path.exists():
        return None
    merged = Path(f"results/{RUN}/merged/manifest.json")
    mix = json.loads(merged.read_text())["facts"] if merged.exists() else {}
    drafter = config["drafters"][wildcards.drafter]
    sizes = Sizes.of(json.loads(path.read_text()), config["vocab"]["size"], drafter.get("intermediate_size"), drafter.get("layers", 1))
    load = expected_load(drafter, trained_share(mix), config["runtime"])
    return round(estimate(sizes, load).total / 1e6)


def served(variant):
    """Whether SGLang serves the variant."""
    return config["benchmark"]["variants"][variant].get("engine", "transformers") == "sglang"


# One cell for each task, variant and number of requests at a time.
CELLS = [
    f"results/{RUN}/benchmark/{task}/{variant}/c{concurrency}/manifest.json"
    for task in TASKS
    for variant in VARIANTS
    for concurrency in (config["benchmark"].get("concurrencies", [1]) if served(variant) else [1])
]


def variant_drafter(wildcards):
    """The drafter of this run that a variant serves; none where another's is served, or no drafter."""
    drafter = config["benchmark"]["variants"][wildcards.variant].get("drafter")
    return [f"results/{RUN}/drafters/{drafter}/manifest.json"] if drafter in DRAFTERS else []


# Variants whose target alone is served with the same flags stand together.
SERVER_FLAGS = ("dtype", "cuda_graphs", "attention_backend", "flags")
SERVER_ORDER = sorted(VARIANTS, key=lambda name: canonical([config["benchmark"]["variants"][name].get(key) for key in SERVER_FLAGS]) + name)


def cell_priority(wildcards):
    """Cells of one served variant before those of the next, so that each server starts once; others may go in any order."""
    return (1 + SERVER_ORDER.index(wildcards.variant)) / (2 + len(VARIANTS)) if served(wildcards.variant) else 0


def cell_settings(wildcards):
    """One task, one variant, one concurrency: a change to another cell's options is none of this one's business."""
    benchmark = config["benchmark"]
    kind, _, folder = benchmark["variants"][wildcards.variant].get("drafter", "").partition(":")
    files = drafter_files(folder) if kind == "path" else {}
    task = {key: value for key, value in benchmark["tasks"][wildcards.task].items() if key in BENCHMARKED}
    return canonical(
        {
            "task": task,
            "variant": benchmark["variants"][wildcards.variant],
            "task_name": wildcards.task,
            "variant_name": wildcards.variant,
            "concurrency": int(wildcards.concurrency),
            "repeats": benchmark["repeats"],
            "seed": config["seed"],
        }
        | ({"drafter_files": files} if files else {})
    )


def on_machine(threads, *keys):
    """Device, threads and the named parts of `runtime` that the config has.

    It reaches a script only through a function of `threads`, since Snakemake does not compare such params.
    """
    runtime = config["runtime"]
    return {"device": runtime["device"], "threads": threads} | {key: runtime[key] for key in keys if key in runtime}


def cell_machine(wildcards, threads):
    """Where a cell is measured, and of served variants how servers are started."""
    return json.dumps(on_machine(threads, *(["server"] if served(wildcards.variant) else [])))


def states_machine(threads):
    """Where states are made, how a server of them is started, and the bytes that they may take: whether the job starts, no byte of it."""
    server = ["server"] if config["hidden"]["engine"] == "sglang" else []
    return on_machine(threads, "device_map", *server) | {"max_bytes": config["hidden"]["max_bytes"]}


def hidden_machine(wildcards, threads):
    """Where states are made."""
    return json.dumps(states_machine(threads))


THREADS = config["runtime"]["threads"]
GPUS = int(config["runtime"]["device"].startswith("cuda"))


ATTACHED = bool(config["runtime"].get("server", {}).get("urls"))
SERVED = config["generate"]["engine"] == "sglang"


def generate_runtime(wildcards, threads):
    """Where the target answers, which servers are asked, and how."""
    return json.dumps(on_machine(threads, "server", "requests"))


def asks(partition):
    """How many of the one place for jobs that ask servers about rows of `partition` a job takes.

    Servers that others run are asked by one job of each partition at a time, which share their memory for keys and
    values as `runtime.requests.concurrency` says. A job that starts a server takes both places: it is alone.
    """
    return lambda wildcards: int(SERVED and (not ATTACHED or config["datasets"][wildcards.dataset]["partition"] == partition))


def launcher(wildcards, threads):
    """What starts the processes of a training: as little compared as threads."""
    return config["runtime"].get("launcher") or "python"


def train_machine(wildcards, threads):
    """Where a drafter is trained, by which processes, and how states are dumped where they come and go."""
    dumping = {"hidden": states_machine(THREADS["hidden"])} if ROLLING else {}
    return json.dumps(on_machine(threads, "ranks", "shard", "recompute") | dumping)


def record_nothing_of_failed_jobs():
    """From now on keep the mark that a job began when it fails: it counts as unfinished, as that of a killed run does.

    Snakemake puts back what a failed job was to replace, and would write down that the job made it with its new settings: the next run
    would take it for up to date.
    """
    failing, after, record = set(), Job.postprocess, workflow.persistence.finished

    async def postprocess(job, *arguments, error=False, **options):
        if error:
            failing.add(job)
        try:
            await after(job, *arguments, error=error, **options)
        finally:
            failing.discard(job)
            if error:  # where a file could not be put back the mark is gone
                workflow.persistence.started(job)

    async def finished(job):
        if job not in failing:
            await record(job)

    Job.postprocess, workflow.persistence.finished = postprocess, finished
