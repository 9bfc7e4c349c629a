"""How much memory of a GPU training takes, from sizes alone: before anything is loaded, and before the data is there.

On GPUs the whole of it, without a graph, was 8 % below to 2 % above what was measured. It imports nothing heavy: a dry run asks, too.
Letters: H hidden size, I feed-forward width, E head size, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.lib.ground.errors import StageError

GIB = 2**30
FINE = 4  # bytes of a float32: master weights, their gradients, moments
CHUNK, FP8_CHUNK = 1152, 2304  # teachers whose logits exist at a time, as in `distil` and `fp8_head`
MOST_OPERATIONS = 1e13  # of a draft step of a batch that is recorded: about 30 ms of an H200
TOO_HIGH = 1.05  # what the estimate was above the measured peak, and some more


@dataclass(frozen=True)
class Sizes:
    """Sizes of a drafter and of what it takes from its target."""

    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    layers: int = 1

    @classmethod
    def of(cls, target: Mapping[str, Any], draft_vocabulary: int, intermediate: int | None = None, layers: int = 1) -> "Sizes":
        """Those of a drafter of `layers` for the target whose `config.json` says `target`; its own `intermediate` size if it has one."""
        text = target.get("text_config", target)
        heads = text["num_attention_heads"]
        head_dim = text.get("v_head_dim") or text.get("head_dim") or text["hidden_size"] // heads
        groups = text.get("num_key_value_heads", heads)
        whole = text["vocab_size"]
        inner = intermediate or text["intermediate_size"]
        return cls(text["hidden_size"], inner, heads, groups, head_dim, whole, min(draft_vocabulary, whole), layers)

    @property
    def weights(self) -> int:
        """Weights of the drafter, but for its few norms."""
        # Queries, keys and values of the first layer see 2H, those of others H; the output writes H.
        heads = 3 * self.heads + 4 * self.groups + (self.layers - 1) * (2 * self.heads + 2 * self.groups)
        layers = heads * self.head_dim + self.layers * 3 * self.intermediate
        return self.hidden * (3 * self.hidden + layers + self.draft_vocabulary)


@dataclass(frozen=True)
class Load:
    """One batch as it is computed: slots and positions, draft steps, bytes of a number in matrix products.

    `recompute`: a draft step is computed again in the backward pass. `shards`: ranks that share masters, gradients and optimizer.
    `muon`: the matrices inside have one moment, which AdamW's have two of. `fp8`: products of numbers in 8 bits. `several`: a step has
    further batches on each rank, which find the gradients of those before.
    """

    slots: int
    positions: int
    steps: int
    itemsize: int
    recompute: bool = False
    shards: int = 1
    muon: bool = False
    fp8: bool = False
    several: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    `masters`: weights in float32 and their gradients. `optimizer`: moments. `copies`: weights for matrix products and their
    gradients. `target`: its embedding [V, H] and the draft rows [D, H] of its head. `states`: those of a batch, and of all draft steps
    what the head reads. `activations`: what draft steps leave for the backward pass. `logits`: of one chunk of teachers. `graph`: both
    once more, where a recorded batch keeps its own while the evaluation computes others.
    """

    masters: float
    optimizer: float
    copies: float
    target: float
    states: float
    activations: float
    logits: float
    graph: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{value / GIB:.1f} {name}" for name, value in vars(self).items())
        return f"{self.total / GIB:.1f} GiB ({parts})"


def estimate(sizes: Sizes, load: Load) -> Memory:
    """Memory of training a drafter of `sizes` on batches of `load`.

    A slot keeps at each step, in each layer, three times the feed-forward width, five states, four sets of query heads, keys and
    values; computed again, its state before and after, its keys and values, and all of it for one step only. Of the first step a slot
    has the last layer alone, and positions have the others. The head's gradient is in float32. With `fp8` that of a chunk is, too, weights
    are there by rows and by columns in a byte each, and logits' gradients twice; what a slot keeps counts as in bfloat16. The only batch of
    a step makes gradients of masters when what it kept is gone.
    """
    weights, item, layers = sizes.weights, load.itemsize, sizes.layers
    keys = 2 * sizes.groups * sizes.head_dim
    layer = 3 * sizes.intermediate + 5 * sizes.hidden + 4 * sizes.heads * sizes.head_dim + keys
    everywhere = load.positions * (layers - 1)
    if load.recompute:
        kept = load.slots * load.steps * (2 * sizes.hidden + layers * keys) + everywhere * (sizes.hidden + keys)
        kept += layer * max(load.slots * layers, load.positions * (layers > 1))
    else:
        kept = layer * (load.slots * (1 + (load.steps - 1) * layers) + everywhere)
    own = 2 * item if item < FINE else 0
    copies = item + FINE if load.shards > 1 else own  # shared gradients are added up in float32 first
    heads = FINE * sizes.hidden * sizes.draft_vocabulary * (1 + load.fp8)
    moments = 2 * weights - (weights - sizes.hidden * sizes.draft_vocabulary if load.muon else 0)
    teachers = min(FP8_CHUNK if load.fp8 else CHUNK, load.slots)
    activations, logits = kept * item, teachers * (load.steps + 1) * sizes.draft_vocabulary * (item + 2 * load.fp8)
    graph = load.shards == 1 and recorded(weights, load.slots)
    gradients = FINE * weights / load.shards
    if not (load.several or graph or load.shards > 1):
        gradients = max(gradients - activations - logits, 0)
    return Memory(
        masters=FINE * weights / load.shards + gradients,
        optimizer=FINE * moments / load.shards,
        copies=(copies + 2 * load.fp8) * weights + heads,
        target=(sizes.vocabulary + sizes.draft_vocabulary) * sizes.hidden * item,
        states=(10 * load.positions + load.steps * load.slots) * sizes.hidden * item,
        activations=activations,
        logits=logits,
        graph=activations + logits if graph else 0.0,
    )


def recorded(weights: int, slots: int) -> bool:
    """Whether what a batch of `slots` adds to the gradients of so many `weights` is little enough to be a graph (`replayed.py`)."""
    return 6 * weights * slots < MOST_OPERATIONS


def trained_share(mix: Mapping[str, Any]) -> float:
    """The share of all tokens that is trained, from the facts of the mix; half of them where it is not there yet."""
    datasets = mix.get("datasets", {}).values()
    tokens, trained = (sum(dataset[name] for dataset in datasets) for name in ("tokens", "trained_tokens"))
    return trained / tokens if trained else 0.5


def expected_load(drafter: Mapping[str, Any], share: float, runtime: Mapping[str, Any]) -> Load:
    """The batches of a drafter's section of the config when a `share` of all positions is trained, on the machine of `runtime`."""
    ranks, whole = runtime.get("ranks", 1), drafter["batch_tokens"]
    batches = -(-max(round(whole / drafter.get("micro_tokens", 8192)), 1) // ranks) * ranks
    slots = -(-whole // batches)
    itemsize = FINE if drafter["precision"] == "float32" else 2
    shards = ranks if runtime.get("shard") else 1
    ways = (drafter.get("optimizer") == "muon", drafter["precision"] == "fp8", batches > ranks)
    return Load(slots, round(slots / share), drafter["ttt_steps"], itemsize, bool(runtime.get("recompute")), shards, *ways)


def remedies(sizes: Sizes, load: Load, room: float, micro_tokens: int, longest: int) -> Iterator[str]:
    """What would make the batches of `load`, which come of `micro_tokens`, fit into `room` bytes; a batch holds the `longest` row."""

    def fit(changed: Load) -> bool:
        return estimate(sizes, changed).total <= room

    smaller = [replace(load, slots=load.slots // part, positions=load.positions // part, several=True) for part in (2, 4, 8)]
    cut = next((one for one in smaller if one.slots >= longest and fit(one)), None)
    if cut:
        yield f"micro_tokens to {micro_tokens * cut.slots // load.slots}"
    again = replace(load, recompute=True)
    if not load.recompute and fit(again):
        yield "runtime.recompute to true"
    if load.muon:
        return  # it wants matrices whole
    for start, words in ((load, ""), (again, " and runtime.recompute to true")):
        shards = next((number for number in (2, 4, 8, 16, 32) if number > load.shards and fit(replace(start, shards=number))), None)
        if shards:
            yield f"runtime.shard to true with {shards} ranks{words}"
            break


def check_room(sizes: Sizes, load: Load, room: float, micro_tokens: int, longest: int) -> None:
    """StageError when training cannot fit into the `room` bytes that a GPU has free, whichever way the estimate errs."""
    memory = estimate(sizes, load)
    if memory.total > TOO_HIGH * room:
        found = " or ".join(remedies(sizes, load, room, micro_tokens, longest))
        remedy = f"set {found}" if found else "take a GPU with more memory, or train on shorter rows"
        raise StageError(f"training needs about {memory} on each GPU, which has {room / GIB:.1f} GiB free: {remedy}")
