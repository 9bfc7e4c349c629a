"""How much memory each training of a run will take, as far as the config and the target's sizes say."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.lib.reporting.table import Table, number, size
from scripts.lib.training.memory import Sizes, estimate, expected_load


def memory_section(target: Path, settings: Mapping[str, Any], share: float) -> list[str]:
    """A table of the drafters in `settings`, for the target whose manifest is at `target`, when a `share` of all tokens is trained."""
    config = json.loads(target.with_name("config.json").read_text())
    lines = []
    for name, drafter in sorted(settings["drafters"].items()):
        sizes = Sizes.of(config, settings["vocab"]["size"], drafter.get("intermediate_size"), drafter.get("layers", 1))
        load = expected_load(drafter, share, settings["runtime"])
        memory = estimate(sizes, load)
        parts = (memory.masters + memory.optimizer, memory.copies, memory.target, memory.states, memory.activations + memory.logits)
        lines.append([name, number(sizes.weights), number(load.slots), *(size(part) for part in parts), size(memory.total)])
    header = ["drafter", "weights", "slots of a batch", "masters, optimizer", "copies", "target's head", "states", "activations", "all"]
    return [
        "## Memory of training",
        "On each GPU, or of the machine where there is none. `micro_tokens` sets that of states and activations; `runtime.recompute` takes "
        "most of the activations away, `runtime.shard` spreads masters and optimizer over `runtime.ranks` GPUs. A training that cannot fit "
        "says so before it starts.",
        Table(header, lines, ("drafter",)).markdown(),
    ]
