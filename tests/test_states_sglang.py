"""States that a real SGLang writes on the CPU against those of transformers: rows cut into chunks, with the prefix cache and without."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from scripts.lib.engines.protocol import RowStates
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.serving import launch
from scripts.lib.states import served
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.checks import BETWEEN, check_sample
from scripts.lib.states.encoded import decoded
from scripts.lib.states.hidden import hidden
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import TokenRow
from scripts.lib.states.served import ServedEngine, Serving
from scripts.lib.states.served_asking import Asking
from scripts.lib.states.served_models import FAMILIES
from scripts.lib.states.served_pieces import Inbox
from tests.sglang_parts import BOUNDARIES, RealServer, sglang_python
from tests.stage_inputs import RUNTIME, hidden_job, publish_merged, token_row
from tests.tiny import save_tiny_target

pytest_plugins = ["tests.sglang_parts"]
pytestmark = pytest.mark.sglang
START = [3 + place * 17 % 250 for place in range(100)]


def rows(count: int, longest: int) -> list[TokenRow]:
    """Rows with the same first 100 tokens, where they are that long, and two spans."""
    lengths = [12 + (longest - 12) * number // (count - 1) for number in range(count)]
    ids = [[*START, *(3 + (number * 31 + place * 7) % 250 for place in range(longest))][:length] for number, length in enumerate(lengths)]
    return [TokenRow(f"r{number:02d}", tuple(row), ((3, 6), (8, len(row)))) for number, row in enumerate(ids)]


def test_states_of_sglang_are_those_of_transformers_and_a_shift_is_not(sglang_server: RealServer) -> None:
    """Rows are cut at the borders of passes of 64 tokens. The shared target multiplies rounding errors, so that means are compared."""
    engine = TransformersEngine(load_target(sglang_server.target, torch.bfloat16, "cpu"), frozenset())
    asking = Asking(sglang_server.running, Inbox(sglang_server.states))
    given = rows(12, 60)
    try:
        made = capture(Taker(asking, engine), given, BOUNDARIES, Batching(1)).wait()
    finally:
        asking.close()
    for row, states in zip(given, made, strict=True):
        aux, final = engine.reference(row.input_ids, BOUNDARIES)
        beyond, _ = engine.reference(row.input_ids, [boundary + 1 for boundary in BOUNDARIES])
        assert likeness(states.aux, aux).min() > 0.995 and likeness(states.final, final[list(row.final_index)]) > 0.99, row.id
        assert likeness(states.aux, beyond).max() < 0.97 and likeness(states.aux, aux.roll(1, 0)).max() < 0.97, row.id


def likeness(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean cosine over the tokens, by layer."""
    return cosine_similarity(got.float(), wanted.float(), dim=-1).mean(0)


class Taker(ServedEngine):
    """Asks a server that runs already."""

    def __init__(self, asking: Asking, engine: TransformersEngine) -> None:
        super().__init__(Serving.__new__(Serving), lambda: engine)
        self._asking = asking


def test_the_stage_starts_its_own_server_and_its_prefix_cache_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is cut into chunks and one fills the context. Transformers gives the same states, token by token and layer by layer."""
    cached = [tuple(flag for flag in flags if flag != "--disable-radix-cache") for flags in (launch.CPU_FLAGS, served.FLAGS)]
    monkeypatch.setattr(launch, "CPU_FLAGS", cached[0])
    monkeypatch.setattr(served, "FLAGS", cached[1])
    save_tiny_target(tmp_path / "target", scale=2.0)
    Manifest("target", {}, {}, Counts(0, 0)).write(tmp_path / "target")
    target = tmp_path / "target/manifest.json"
    table = [token_row(row.id, row.input_ids, row.spans) for row in rows(10, 512)]
    merged = publish_merged(tmp_path / "merged", table, [token_row(f"e{row['id']}", row["input_ids"][1:], [(8, 11)]) for row in table[:2]])
    jobs = {
        name: hidden_job(tmp_path, merged, target, name, engine=name, dtype="bfloat16", tokens_per_shard=1000)
        for name in ("transformers", "sglang")
    }
    server = {"python": str(sglang_python()), "flags": ["--chunked-prefill-size", "64"]}
    jobs["sglang"] = replace(jobs["sglang"], runtime={**RUNTIME, "server": server})
    for job in jobs.values():
        run(job, hidden)
    ours, theirs = (read_manifest(job.output / "manifest.json", "hidden") for job in jobs.values())
    assert ours.counts == theirs.counts and theirs.counts.rows_out == 12
    assert theirs.facts["engine"] == "sglang" and set(theirs.facts["versions"]) == {"sglang", "torch"}
    for record in theirs.shards:
        one, other = (read_shard(job.output / record.name) for job in jobs.values())
        assert one.ids == other.ids and torch.equal(one.final_index, other.final_index)
        for wanted, got in ((one.aux, other.aux), (one.final, other.final)):
            assert cosine_similarity(decoded(wanted).float(), decoded(got).float(), dim=-1).min() > 0.999, record.name
    check_shifts(jobs["sglang"], target.parent)


def check_shifts(job: Job, target: Path) -> None:
    """The built-in check lets the last row pass, and neither when it is one token late nor when it is taken for the next layers'."""
    engine = TransformersEngine(load_target(target, torch.bfloat16, "cpu"), frozenset())
    shard = read_shard(sorted(job.output.glob("train-*.safetensors"))[-1])
    row = TokenRow("last", tuple(shard.input_ids[shard.row_offsets[-2] :].tolist()), ())
    aux = decoded(shard.aux[int(shard.row_offsets[-2]) : shard.tokens])
    state = RowStates(aux, aux[:0, 0], torch.zeros(0))
    check_sample(engine, row, state, BOUNDARIES, "bfloat16" + BETWEEN)
    beyond = [boundary + 1 for boundary in BOUNDARIES]
    for shifted, boundaries in ((replace(state, aux=aux.roll(1, 0)), BOUNDARIES), (state, beyond)):
        with pytest.raises(StageError, match=r"row last, state at boundary \d, token"):
            check_sample(engine, row, shifted, boundaries, "bfloat16" + BETWEEN)


@functools.cache
def model_sources() -> dict[str, str]:
    """SGLang's model files."""
    models = next(sglang_python().parent.parent.glob("lib/python3*/site-packages/sglang/srt/models"))
    return {path.name: path.read_text() for path in models.glob("*.py")}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_families_are_those_of_sglang(architecture: str) -> None:
    """The class is there, and it or the class that it derives from or wraps captures for EAGLE-3 in a way that the hook knows."""
    sources = model_sources()
    text = next(source for source in sources.values() if re.search(rf"^class {architecture}\(", source, re.MULTILINE))
    if architecture in ("MistralForCausalLM", "KimiK25ForConditionalGeneration"):
        text += sources["llama.py" if architecture.startswith("Mistral") else "deepseek_v2.py"]
    if architecture == "Qwen3MoeForCausalLM":
        text += sources["qwen2_moe.py"]
    assert re.search(r"i in self\.layers_to_capture|_is_layer_to_capture", text)
    for name in (FAMILIES[architecture].decoder, FAMILIES[architecture].logits):
        assert f"self.{name.rpartition('.')[2]} = " in text, name
