"""On a GPU: states are those of the CPU, copies beside the forward passes are whole, and attention runs in the flash kernels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.engines.transformers_engine import TransformersEngine, choices, load_target
from scripts.lib.ground.manifest import Manifest
from scripts.lib.ground.stage import run
from scripts.lib.states import hidden as stage
from scripts.lib.states.capture import Batching, capture
from scripts.lib.states.checks import largest
from scripts.lib.states.encoded import decoded
from scripts.lib.states.hidden import hidden
from scripts.lib.states.landing import Landing
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rounded import rounded_aux, rounded_final
from scripts.lib.states.rounding import FINENESS, off_grid, on_grid, quantised
from scripts.lib.states.rows import TokenRow
from tests.stage_inputs import data_files, hidden_job, publish_merged, publish_target, some_token_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOUNDARIES = [2, 4, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_target(tmp_path_factory.mktemp("published") / "target")


@pytest.mark.parametrize(("stored", "bits"), [("bfloat16", 6), ("fp8", 3)])
def test_any_number_of_finishing_threads_gives_the_states_of_the_cpu(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, bits: int
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    merged = publish_merged(tmp_path / "merged", some_token_rows(60), some_token_rows(3, "e"))
    made: dict[tuple[str, int], Manifest] = {}
    for device, count in (("cpu", 0), ("cuda", 0), ("cuda", 3)):
        job = hidden_job(tmp_path, merged, target, stored=stored)
        monkeypatch.setattr(stage, "workers", lambda _, count=count: count)
        (tmp_path / f"{device}{count}").mkdir()
        made[device, count] = hidden(replace(job, runtime={**job.runtime, "device": device}), tmp_path / f"{device}{count}").manifest
    assert made["cuda", 0].shards == made["cuda", 3].shards
    rows = [dict(states(tmp_path / folder)) for folder in ("cpu0", "cuda3")]
    assert rows[0].keys() == rows[1].keys()
    for name, state in rows[0].items():
        assert torch.allclose(rows[1][name], state, rtol=2**-bits, atol=2e-3), name


def test_states_that_were_known_are_rounded_on_the_gpu_too(target: Path, tmp_path: Path) -> None:
    """The bytes must be those of a run that never saw the states that were published before."""
    merged = publish_merged(tmp_path / "merged", some_token_rows(60), some_token_rows(3, "e"))
    for name, stored in (("out", "bfloat16"), ("out", "fp8"), ("fresh", "fp8")):
        job = hidden_job(tmp_path, merged, target, name, stored=stored)
        run(replace(job, runtime={**job.runtime, "device": "cuda"}), hidden)
    assert json.loads((tmp_path / "out" / "cost.json").read_text())["reused_rows"] == 63
    assert data_files(tmp_path / "out") == data_files(tmp_path / "fresh")


def states(folder: Path) -> Any:
    """Id and aux states of each row."""
    for path in sorted(folder.glob("*.safetensors")):
        shard = read_shard(path)
        for number, name in enumerate(shard.ids):
            start, end = shard.row_offsets[number : number + 2].tolist()
            yield name, decoded(shard.aux[start:end]).float()


@pytest.mark.parametrize("late", [False, True])
def test_batches_that_are_copied_while_others_run_are_those_that_are_waited_for(
    target: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also where the GPU has not begun with a batch when the next two are queued."""
    engine = TransformersEngine(load_target(target.parent, torch.bfloat16, "cuda"), frozenset())
    if late:
        plain = engine.states
        monkeypatch.setattr(engine, "states", lambda *asked: torch.cuda._sleep(10**8) or plain(*asked))
    rows = [TokenRow(f"{number}", tuple(3 + (number * 31 + place) % 250 for place in range(400)), ((10, 400),)) for number in range(64)]
    made = capture(engine, rows, BOUNDARIES, Batching(1600, leads=False)).wait()
    for row, state in zip(rows, made, strict=True):
        batch = [StateRequest(other.input_ids, other.final_index) for other in rows[int(row.id) // 4 * 4 :][:4]]
        (wanted,) = engine.states(batch, BOUNDARIES)[int(row.id) % 4 :][:1]
        assert torch.equal(state.aux, wanted.aux.cpu()) and torch.equal(state.final, wanted.final.cpu())
        assert torch.equal(state.argmax, wanted.argmax.cpu())


def test_states_that_the_gpu_rounds_are_those_that_the_host_would_make_of_the_same(target: Path) -> None:
    """And of those as they are there are all final ones, and the aux ones of the row that will be checked."""
    engine = TransformersEngine(load_target(target.parent, torch.bfloat16, "cuda"), frozenset())
    rows = [TokenRow(f"{number}", tuple(3 + (number * 31 + place) % 250 for place in range(400)), ((10, 400),)) for number in range(64)]
    plain = capture(engine, rows, BOUNDARIES, Batching(1600, leads=False)).wait()
    captured = capture(engine, rows, BOUNDARIES, Batching(1600, leads=False, rounding=torch.device("cuda")))
    states, made = captured.wait(), captured.rounded()
    for number, (state, wanted, own) in enumerate(zip(states, plain, made, strict=True)):
        values, scales = quantised(wanted.aux)
        assert torch.equal(own.aux.view(torch.uint8), values.view(torch.uint8)) and torch.equal(own.scales, scales)
        check_rounded(wanted.final, own.final)
        assert torch.equal(state.final, wanted.final) and torch.equal(state.argmax, wanted.argmax)
        assert torch.equal(state.aux, wanted.aux if number == captured.whole else wanted.aux[:0])


def check_rounded(final: Tensor, made: Tensor) -> None:
    """`made` is `final` on its grid. A step is a mean, added up in another order: a number in a thousand may go to the next one."""
    wanted, got = off_grid(*on_grid(final)).float(), made.float()
    step = final.float().square().mean(-1, keepdim=True).sqrt() / FINENESS
    assert (wanted != got).float().mean() < 1e-3 and ((wanted - got).abs() <= wanted.abs() * 2**-7 + step * 1.01).all()


def test_rounding_on_the_gpu_is_that_of_the_host_for_numbers_of_every_size() -> None:
    """Also where a division by a constant and a product with its reciprocal part, and where the host's own states are sent there."""
    torch.manual_seed(0)
    aux = (torch.randn(20000, 3, 64) * torch.logspace(-30, 30, 20000, base=2)[:, None, None]).bfloat16()
    final = aux[:, 0].contiguous()
    values, scales = quantised(aux)
    bits, factors, peaks = (made.cpu() for made in rounded_aux(aux.cuda()))
    assert torch.equal(bits, values.view(torch.uint8)) and torch.equal(factors, scales) and torch.equal(peaks, largest(aux))
    even, final_peaks = (made.cpu() for made in rounded_final(final.cuda()))
    check_rounded(final, even)
    assert torch.equal(final_peaks, largest(final))
    states = [RowStates(aux[:50], final[:9], torch.arange(9)), RowStates(aux[50:90], final[9:12], torch.arange(3))]
    landed = Landing(torch.device("cuda")).land(states, 1)
    assert [len(state.aux) for state in landed.wait()] == [0, 40] and landed.defects() == [None, None]
    assert torch.equal(torch.cat([row.scales for row in landed.rounded]), scales[:90])


@pytest.mark.parametrize("size", [64, 576, 7168])
def test_states_that_are_no_numbers_or_nought_are_told_as_on_the_host(size: int) -> None:
    torch.manual_seed(0)
    aux = torch.randn(40, 3, size).bfloat16()
    aux[3, 1, 5], aux[4, 0, -1], aux[5, 2, 7], aux[6, 2] = torch.nan, torch.inf, -torch.inf, 0
    final = aux[:, 2].contiguous()
    assert torch.equal(rounded_aux(aux.cuda())[2].cpu().nan_to_num(-1), largest(aux).nan_to_num(-1))
    even, peaks = (made.cpu() for made in rounded_final(final.cuda()))
    assert torch.equal(peaks.nan_to_num(-1), largest(final).nan_to_num(-1))
    finite = final.isfinite().all(1)
    check_rounded(final[finite], even[finite])
    assert not even[6].any() and len(rounded_final(final[:0].cuda())[0]) == len(rounded_aux(aux[:0].cuda())[0]) == 0


@pytest.mark.parametrize("vocabulary", [50, 4096, 49152, 128256])
def test_the_first_of_the_best_tokens_is_chosen(vocabulary: int) -> None:
    """Many are tied in bfloat16."""
    torch.manual_seed(0)
    logits = torch.randint(0, 300, (64, vocabulary)).bfloat16()
    logits[0], logits[1] = -torch.inf, 0
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert choices(logits.cuda()).tolist() == wanted and choices(logits[:0].cuda()).tolist() == []
    logits[2] = torch.nan
    assert 0 <= int(choices(logits.cuda())[2]) < vocabulary


def test_rows_with_a_common_beginning_run_in_the_flash_kernels(target: Path) -> None:
    """With a beginning that is computed once attention needs a mask, which these kernels do not take; others are forbidden here."""
    engine = TransformersEngine(load_target(target.parent, torch.bfloat16, "cuda"), frozenset())
    rows = [StateRequest((*range(3, 63), *range(9, 9 + length)), (4, 5)) for length in (20, 60, 100)]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        states = engine.states(rows, BOUNDARIES)
    assert [len(state.aux) for state in states] == [80, 120, 160]
