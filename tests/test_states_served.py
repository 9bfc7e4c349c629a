"""States that a server writes: put together exactly whatever the passes cut, whatever is lost, and wrong ones are caught."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from scripts.lib.engines.protocol import StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Counts, Manifest, read_manifest
from scripts.lib.ground.stage import Job, run
from scripts.lib.serving.launch import CPU_FOLDER, environment
from scripts.lib.serving.settings import ServerSettings
from scripts.lib.states import served_asking
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.checks import BETWEEN, check_sample
from scripts.lib.states.encoded import decoded
from scripts.lib.states.format import final_borders
from scripts.lib.states.hidden import hidden
from scripts.lib.states.hook.aerie_states_hook import Outbox, asked, request_id
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rows import TokenRow
from scripts.lib.states.served import HOOK, ServedEngine, Serving
from scripts.lib.states.served_asking import Asking, grouped, ranges
from scripts.lib.states.served_models import check_flags, modules_of
from scripts.lib.states.served_pieces import Inbox, Piece, joined
from tests.stage_inputs import disk_full_at, hidden_job, publish_merged, some_token_rows, token_row
from tests.states_server import Faults, States, served_states
from tests.tiny import save_tiny_target

BOUNDARIES = [2, 4, 5]
POISON = 258
ROWS = [
    TokenRow(f"r{number}", tuple(3 + (number * 31 + place * 17) % 250 for place in range(length)), ((4, 9), (11, length)))
    for number, length in enumerate((13, 40, 61, 12, 25, 90, 17))
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return TransformersEngine(load_target(save_tiny_target(tmp_path_factory.mktemp("tiny")), torch.float32, "cpu"), frozenset())


@dataclass(frozen=True)
class StandIn(Serving):
    """Opens no SGLang but `states`."""

    states: States

    @contextmanager
    def open(self) -> Iterator[Asking]:
        with served_states(self.states):
            asking = Asking(self.states, Inbox(self.states.folder))
            yield asking
            asking.close()


@contextmanager
def opened(states: States, rows: list[TokenRow]) -> Iterator[ServedEngine]:
    """The engine on a stand-in server, `rows` announced."""
    serving = StandIn(ServerSettings(), states.folder, "float32", tuple(states.boundaries), states.folder, states)
    engine = ServedEngine(serving, lambda: states.engine)
    engine.announce(StateRequest(row.input_ids, row.final_index) for row in rows)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_asking, "PIECE_SECONDS", 0.3)
    monkeypatch.setattr(served_asking, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(served_asking, "GROUP_TOKENS", 100)


def check_all(engine: TransformersEngine, served: ServedEngine, rows: list[TokenRow]) -> None:
    """All tokens and layers of `rows` are those of transformers, and nothing is left in the folder."""
    for row, state in zip(rows, capture(served, rows, BOUNDARIES, Batching(1)).wait(), strict=True):
        aux, final = engine.reference(row.input_ids, BOUNDARIES)
        assert torch.allclose(state.aux.float(), aux, rtol=2**-7, atol=1e-3), row.id
        assert torch.allclose(state.final.float(), final[list(row.final_index)], rtol=2**-7, atol=1e-3), row.id
        assert state.argmax.tolist() == engine.logits(final[list(row.final_index)]).argmax(-1).tolist(), row.id
        check_sample(served, row, state, BOUNDARIES, "float32")
    assert not list(served.serving.folder.iterdir())


@pytest.mark.parametrize(("pass_tokens", "packed"), [(7, False), (24, True), (1000, False)])
def test_rows_cut_by_passes_come_whole(engine: TransformersEngine, tmp_path: Path, pass_tokens: int, packed: bool) -> None:
    """Chunked prefill once gave the last chunk alone, and padding shifted what came after it."""
    states = States(engine, tmp_path, BOUNDARIES, pass_tokens)
    states.decoder.packed = packed
    with opened(states, ROWS) as served:
        check_all(engine, served, ROWS)
    assert states.requests < len(ROWS)


@pytest.mark.parametrize("gathered", [False, True])
def test_the_best_tokens_are_those_of_the_whole_vocabulary(engine: TransformersEngine, tmp_path: Path, gathered: bool) -> None:
    """Straight from the head, without what pads it, or as the server puts together what ranks have of it."""
    states = States(engine, tmp_path, BOUNDARIES)
    states.processor.do_tensor_parallel_all_gather = gathered
    with opened(states, ROWS) as served:
        check_all(engine, served, ROWS)
    assert bool(states.processor.whole) == gathered


def test_rows_that_were_not_announced_are_asked_for(engine: TransformersEngine, tmp_path: Path) -> None:
    with opened(States(engine, tmp_path, BOUNDARIES), ROWS[2:4]) as served:
        check_all(engine, served, [*ROWS, ROWS[0]])


def test_requests_of_others_are_left_alone(engine: TransformersEngine, tmp_path: Path) -> None:
    states = States(engine, tmp_path, BOUNDARIES)
    rid = request_id("1", [(0, 2)])
    states.run(["x", rid, "y"], [[5, 6], [7, 8, 9], [10]], [0, 0, 0])
    assert states.decoder.layers_to_capture == BOUNDARIES
    states.run(["x"], [[5, 6]], [0])
    assert states.decoder.layers_to_capture == []
    inbox = Inbox(tmp_path)
    inbox.expect(["1"])
    while not inbox.poll():
        pass
    row = inbox.row("1", StateRequest((7, 8, 9), (0, 1)))
    assert row is not None
    assert torch.allclose(row.aux.float(), engine.reference([7, 8, 9], BOUNDARIES)[0], rtol=2**-7, atol=1e-3)


def test_a_crash_loses_only_what_was_in_flight(engine: TransformersEngine, tmp_path: Path) -> None:
    states = States(engine, tmp_path, BOUNDARIES, faults=Faults(crash_until=3))
    with opened(states, ROWS) as served:
        check_all(engine, served, ROWS)
    assert states.checks >= 3


def test_nobody_waits_for_a_server_that_was_ended(engine: TransformersEngine, tmp_path: Path) -> None:
    """A stage that fails must not stay alive because a thread of it still asks."""
    states = States(engine, tmp_path, BOUNDARIES, faults=Faults(crash_until=10**6))
    with ThreadPoolExecutor() as pool:
        with opened(states, ROWS) as served:
            asked_for = pool.submit(served.states, [StateRequest(ROWS[0].input_ids, ROWS[0].final_index)], BOUNDARIES)
            while states.checks < 3:
                time.sleep(0.01)
        assert "was ended while rows were asked for" in str(asked_for.exception(10))


def test_a_hit_in_the_prefix_cache_is_seen_and_the_row_asked_for_again(engine: TransformersEngine, tmp_path: Path) -> None:
    """A cached beginning has no states: a 16-token prompt once gave one."""
    states = States(engine, tmp_path, BOUNDARIES, faults=Faults(prefix=5))
    with opened(states, ROWS) as served:
        check_all(engine, served, ROWS)


def test_rows_that_stay_incomplete_stop_the_stage(engine: TransformersEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_asking, "ATTEMPTS", 1)
    states = States(engine, tmp_path, BOUNDARIES, 1000, Faults(prefix=5))
    with opened(states, ROWS[:1]) as served, pytest.raises(StageError, match=r"states of 1 rows .* of which tokens \[\(5, 13\)\] came"):
        served.states([StateRequest(ROWS[0].input_ids, ROWS[0].final_index)], BOUNDARIES)


@pytest.mark.parametrize("faults", [Faults(layers=1), Faults(tokens=1)], ids=["layer", "token"])
def test_a_shift_in_the_server_is_caught(engine: TransformersEngine, tmp_path: Path, faults: Faults) -> None:
    with opened(States(engine, tmp_path, BOUNDARIES, faults=faults), ROWS[:1]) as served:
        state = capture(served, ROWS[:1], BOUNDARIES, Batching(1)).wait()[0]
        with pytest.raises(StageError, match=r"row r0, state at boundary 2, token"):
            check_sample(served, ROWS[0], state, BOUNDARIES, "bfloat16" + BETWEEN)


def test_values_that_are_not_finite_are_seen(engine: TransformersEngine, tmp_path: Path) -> None:
    poison = ROWS[1].input_ids[-1]
    states = States(engine, tmp_path, BOUNDARIES, faults=Faults(poison=poison))
    with opened(states, ROWS[:2]) as served:
        made = capture(served, ROWS[:2], BOUNDARIES, Batching(1)).defects()
    assert made == [None if poison not in ROWS[0].input_ids else "non_finite", "non_finite"]


def piece(first: int, ids: list[int], finals: int) -> Piece:
    size = len(ids)
    return Piece(first, torch.tensor(ids), torch.ones(size, 3, 4), torch.ones(finals, 4), torch.ones(finals))


def test_pieces_must_cover_a_row_exactly() -> None:
    row = StateRequest((5, 6, 7, 8), (1, 2))
    whole = joined("a", [piece(0, [5, 6], 1), piece(2, [7, 8], 1)], row)
    assert whole is not None and whole.aux.shape == (4, 3, 4) and whole.final.shape == (2, 4)
    assert joined("a", [piece(0, [5, 6], 1)], row) is None
    assert joined("a", [piece(1, [6, 7, 8], 2)], row) is None
    assert joined("a", [piece(0, [5, 6], 1), piece(1, [6, 7, 8], 2)], row) is None
    with pytest.raises(StageError, match="row a: the server's states of tokens 2 to 3 belong to other tokens"):
        joined("a", [piece(0, [5, 6], 1), piece(2, [8, 7], 1)], row)
    with pytest.raises(StageError, match="2 final states came where 1 were wanted"):
        joined("a", [piece(0, [5, 6], 2), piece(2, [7, 8], 1)], row)


def test_request_ids_say_where_teachers_are() -> None:
    assert ranges((4, 5, 6, 9)) == [(4, 7), (9, 10)]
    assert asked(request_id("12", [(4, 7), (9, 10)])) == ("12", [(4, 7), (9, 10)])
    assert asked(request_id("12", [])) == ("12", [])
    assert asked("HEALTH_CHECK_1") is None and asked(None) is None


def test_groups_hold_many_rows_or_one_long_one() -> None:
    rows = [StateRequest((1,) * length, ()) for length in (40, 60, 1, 200, 30)]
    assert [[len(row.input_ids) for row in group] for group in grouped(rows)] == [[40, 60], [1], [200], [30]]


def test_a_disk_that_is_full_stops_the_server_and_not_the_row(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path / "gone"))
    tensors = {"aux": torch.zeros(2, 3, 4, dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match=r"states cannot be written: .*No such file"):
        for _ in range(50):
            outbox.send([("1", 0, 2, 0)], tensors)


def test_an_unknown_architecture_is_an_error_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(StageError, match=r"does not know where MambaForCausalLM keeps its states.*hidden\.engine: transformers"):
        modules_of(tmp_path)


def test_flags_that_spread_states_over_ranks_are_refused() -> None:
    check_flags(("--chunked-prefill-size", "64"))
    with pytest.raises(StageError, match="cannot work with --pp-size=2"):
        check_flags(("--pp-size=2",))


def test_the_server_finds_the_hook_and_keeps_its_own_folders(tmp_path: Path) -> None:
    runtime = {"device": "cpu", "server": {"urls": ["http://other:1"], "environment": {"A": "b"}}}
    serving = Serving.of(runtime, save_tiny_target(tmp_path, layers=1), "bfloat16", BOUNDARIES, tmp_path / "pieces")
    made = environment(serving.hooked, Path("/python"), "")
    folders = made["PYTHONPATH"].split(":")
    assert {str(HOOK.parent), str(CPU_FOLDER)} <= set(folders) and made["A"] == "b"
    assert serving.settings.urls == () and isinstance(serving.settings, ServerSettings)
    hook = json.loads(serving.flags[serving.flags.index("--forward-hooks") + 1])[0]
    assert hook["target_modules"] == ["model", "logits_processor"] and hook["config"]["boundaries"] == BOUNDARIES
    assert serving.flags[serving.flags.index("--context-length") + 1] == "520"


@pytest.fixture
def asked_rows(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Lets stage hidden find a stand-in where it would start SGLang; the tokens of all rows that it is asked for."""
    asked_for: list[tuple[int, ...]] = []

    @contextmanager
    def open_stand_in(serving: Serving) -> Iterator[Asking]:
        serving.folder.mkdir(parents=True)
        states = States(engine, serving.folder, serving.boundaries, faults=Faults(poison=POISON))
        states.asked_for = asked_for
        with StandIn(serving.settings, serving.target, serving.dtype, serving.boundaries, serving.folder, states).open() as asking:
            yield asking
        assert not list(serving.folder.iterdir())
        serving.folder.rmdir()

    monkeypatch.setattr(Serving, "open", open_stand_in)
    monkeypatch.setattr(Serving, "versions", lambda _: {"sglang": "0.5.23", "torch": "2.13.0"})
    return asked_for


@pytest.fixture(scope="module")
def target(engine: TransformersEngine) -> Path:
    folder = Path(engine.model.config._name_or_path)
    Manifest("target", {}, {}, Counts(0, 0)).write(folder)
    return folder / "manifest.json"


def test_the_stage_writes_the_same_rows_with_either_engine(target: Path, tmp_path: Path, asked_rows: list[tuple[int, ...]]) -> None:
    train = some_token_rows(12)
    train[4] = token_row("bad", [5, POISON, *range(20, 40)], [(4, 20)])
    merged = publish_merged(tmp_path / "merged", train, some_token_rows(2, "e"))
    jobs = [hidden_job(tmp_path, merged, target, name, engine=name) for name in ("transformers", "sglang")]
    for job in jobs:
        run(job, hidden)
    ours, theirs = (read_manifest(job.output / "manifest.json", "hidden") for job in jobs)
    assert theirs.facts["quarantined"] == [["bad", "non_finite"]] and theirs.counts.rows_out == 13
    assert (theirs.facts["engine"], theirs.facts["versions"]) == ("sglang", {"sglang": "0.5.23", "torch": "2.13.0"})
    rows = dict(each_row(jobs[0], ours))
    for name, (aux, final) in each_row(jobs[1], theirs):
        assert torch.allclose(aux, rows[name][0], rtol=2**-6, atol=1e-3) and torch.allclose(final, rows[name][1], rtol=2**-6, atol=1e-3)
    assert len(asked_rows) == 14


def each_row(job: Job, manifest: Manifest) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    for record in manifest.shards:
        shard = read_shard(job.output / record.name)
        finals = final_borders(shard.row_offsets, shard.final_index)
        for row, name in enumerate(shard.ids):
            start, end = shard.row_offsets[row : row + 2].tolist()
            yield name, (decoded(shard.aux[start:end]).float(), decoded(shard.final[finals[row] : finals[row + 1]]).float())


def test_after_a_failure_only_missing_shards_are_asked_for_and_rows_come_back_in_another_mix(
    target: Path, tmp_path: Path, asked_rows: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_token_rows(12)
    merged = publish_merged(tmp_path / "merged", rows, some_token_rows(2, "e"))
    job = hidden_job(tmp_path, merged, target, engine="sglang")
    with disk_full_at("train-00001.safetensors"), pytest.raises(OSError, match="No space left"):
        run(job, hidden)
    first = len(read_shard(next(job.work.glob("hidden/*/train-00000.safetensors"))).ids)
    asked_rows.clear()
    run(job, hidden)
    assert len(asked_rows) == 14 - first
    asked_rows.clear()
    other = publish_merged(tmp_path / "other", [rows[5], token_row("new", [7, 8, 9, 10, 11], [(2, 5)]), rows[2]], some_token_rows(2, "e"))
    run(hidden_job(tmp_path, other, target, engine="sglang"), hidden)
    assert asked_rows == [(7, 8, 9, 10, 11)]
