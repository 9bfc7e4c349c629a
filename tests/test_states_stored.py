"""Shards in fewer bytes: lossless planes give the states back bit by bit, fp8 within its precision, and rows are decoded alone."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from scripts.lib.ground.errors import StageError
from scripts.lib.states.encoded import (
    EncodedStates,
    Factored,
    compressed,
    decoded,
    factored,
    joined,
    joined_multiples,
    planes,
    split_multiples,
)
from scripts.lib.states.finite import finite
from scripts.lib.states.format import HiddenShard, write_shard
from scripts.lib.states.reader import check_finite, read_shard
from scripts.lib.states.rounding import FINENESS, FP8, dequantised, off_grid, on_grid, quantised
from scripts.lib.states.storing import Storing, every_storing
from scripts.lib.training.packed import Capacity, collate_factored, collate_packed
from scripts.lib.training.rows import shard_rows

H = 64
LENGTHS = (1, 40, 7, 300)
SPANS = ((0, 1), (4, 30), (2, 5), (10, 200))


def shard(seed: int = 0) -> HiddenShard:
    """Rows of noise whose layers and first tokens differ in scale as a target's do; the first has no teacher."""
    torch.manual_seed(seed)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    aux = torch.randn(int(offsets[-1]), 3, H) * torch.tensor([0.3, 3.0, 8.0])[:, None]
    aux[offsets[:-1]] *= 1000
    spans = [(int(start) + first, int(start) + last) for start, (first, last) in zip(offsets, SPANS, strict=False)]
    places = torch.tensor([place for first, last in spans for place in range(first, last - 1)])
    return HiddenShard(
        input_ids=torch.arange(int(offsets[-1]), dtype=torch.int32),
        row_offsets=offsets,
        aux=aux.bfloat16(),
        final=torch.randn(len(places), H).bfloat16(),
        final_index=places,
        argmax=torch.zeros(len(places), dtype=torch.int32),
        loss_spans=torch.tensor(spans),
        ids=tuple("abcd"),
    )


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_states_come_back_exact_or_within_fp8_and_equal_shards_are_equal_bytes(tmp_path: Path, storing: Storing) -> None:
    for name in ("one", "two"):
        write_shard(tmp_path / name, shard(), storing)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    back, made = read_shard(tmp_path / "one"), shard()
    check_finite(tmp_path / "one", back)
    assert back.ids == made.ids
    wanted, got = decoded(made.aux).float(), decoded(back.aux).float()
    if storing.dtype == "bfloat16":
        assert torch.equal(wanted, got) and torch.equal(decoded(back.final), decoded(made.final))
    else:
        largest = wanted.abs().amax(-1, keepdim=True)
        assert not torch.equal(wanted, got)
        assert ((wanted - got).abs() <= wanted.abs() / 16 * 1.01 + largest / 448 * 2**-10 * 1.01).all()
        assert torch.nn.functional.cosine_similarity(wanted, got, dim=-1).min() > 0.999


def test_every_multiple_of_a_grid_survives_its_planes() -> None:
    """The largest of H numbers may be √H times their root mean square: thousands of steps."""
    multiples = torch.arange(-(2**15), 2**15 - 2**11, dtype=torch.int16).view(-1, 64)
    upper, lowest = split_multiples(multiples)
    assert torch.equal(joined_multiples(upper, lowest), multiples) and lowest.shape[1] == 32


def test_a_grid_is_even_and_as_fine_as_the_state_is_large() -> None:
    wanted = torch.randn(50, 4096) * torch.logspace(-30, 30, 50, base=2)[:, None]
    wanted[:, 5] *= 60
    wanted = wanted.bfloat16()
    multiples, steps = on_grid(wanted)
    level = wanted.float().square().mean(-1).sqrt()
    assert torch.allclose(steps, level / FINENESS) and multiples.abs().max() > 2**12
    error = (off_grid(multiples, steps).float() - wanted.float()).abs()
    assert (error <= steps[:, None] / 2 * 1.001 + wanted.float().abs() * 2**-8).all()
    assert not off_grid(*on_grid(torch.zeros(2, 8, dtype=torch.bfloat16))).any()


def test_fp8_states_are_the_same_with_and_without_compression(tmp_path: Path) -> None:
    for compression in ("none", "lossless"):
        write_shard(tmp_path / compression, shard(), Storing("fp8", compression))
    plain, packed = (read_shard(tmp_path / compression) for compression in ("none", "lossless"))
    assert torch.equal(decoded(plain.aux), decoded(packed.aux)) and torch.equal(decoded(plain.final), decoded(packed.final))
    wanted, got = decoded(shard().final).float(), decoded(packed.final).float()
    assert not torch.equal(wanted, got)
    assert ((wanted - got).abs() <= wanted.square().mean(-1, keepdim=True).sqrt() / FINENESS / 2 + wanted.abs() * 2**-8).all()


def test_an_even_grid_costs_a_teacher_far_less_than_e4m3_for_a_few_more_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    final = (torch.randn(200, 256, generator=generator) * (0.4 * torch.randn(256, generator=generator)).exp()).bfloat16()
    head = torch.randn(500, 256, generator=generator) / 8
    teacher, *others = (
        torch.softmax(states.float() @ head.T, -1)
        for states in (final, off_grid(*on_grid(final)), dequantised(*quantised(final[:, None]))[:, 0])
    )
    even, scaled = (float((teacher - other).abs().sum(-1).mean() / 2) for other in others)
    assert even < 0.005 and scaled > 3 * even
    upper, lowest = split_multiples(on_grid(final)[0])
    size = len(compressed(upper, [0, len(final)])["frames"]) + lowest.nbytes
    assert size < 1.25 * len(compressed(quantised(final[:, None])[0].view(torch.uint8), [0, len(final)])["frames"])


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_the_formula_is_near_the_size_of_states_as_a_target_has_them(tmp_path: Path, storing: Storing) -> None:
    """Layers, channels and first tokens of different scale; the width of channels is that of SmolLM2-135M."""
    torch.manual_seed(0)
    tokens, teachers, size = 1500, 750, 512
    channels = (0.4 * torch.randn(size)).exp()
    aux = torch.randn(tokens, 3, size) * channels * torch.tensor([0.3, 3.0, 8.0])[:, None]
    aux[0] *= 1000
    made = HiddenShard(
        input_ids=torch.zeros(tokens, dtype=torch.int32),
        row_offsets=torch.tensor([0, tokens]),
        aux=aux.bfloat16(),
        final=(torch.randn(teachers, size) * channels).bfloat16(),
        final_index=torch.arange(teachers),
        argmax=torch.zeros(teachers, dtype=torch.int32),
        loss_spans=torch.tensor([[0, teachers + 1]]),
        ids=("a",),
    )
    write_shard(tmp_path / "x", made, storing)
    states = storing.state_bytes(tokens, teachers, size) + 4 * tokens + 12 * teachers
    assert 0.94 < (tmp_path / "x").stat().st_size / states < 1.01


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_a_shard_is_the_file_that_safetensors_writes(tmp_path: Path, storing: Storing) -> None:
    made = shard()
    odd = HiddenShard(**{**vars(made), "ids": ('ä\n"\\/', "\u2028\x7f\x01", "c", "\U0001f600")})
    for name, one in (("plain", made), ("odd", odd)):
        write_shard(tmp_path / name, one, storing)
        tensors = load_file(tmp_path / name)
        assert (tmp_path / name).read_bytes() == save(tensors, {"ids": json.dumps(one.ids, ensure_ascii=False)})
    assert read_shard(tmp_path / "odd").ids == odd.ids


def test_every_bit_pattern_of_bfloat16_survives_its_planes() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    assert torch.equal(joined(*planes(bits.view(torch.bfloat16))).view(torch.int16), bits)


@pytest.mark.parametrize("storing", list(every_storing())[1:], ids=str)
def test_a_training_row_decodes_its_own_states_and_no_other(tmp_path: Path, storing: Storing) -> None:
    """Whole shards in memory would be terabytes; a row is decoded when its batch is made."""
    write_shard(tmp_path / "x.safetensors", shard(), storing)
    back = read_shard(tmp_path / "x.safetensors")
    plain = HiddenShard(**{**vars(back), "aux": decoded(back.aux), "final": decoded(back.final)})
    rows, wanted = (list(shard_rows(tmp_path / "x.safetensors", one)) for one in (back, plain))
    for row, other in zip(rows, wanted, strict=True):
        assert row.aux.shape == other.aux.shape and len(row.final) == len(other.final)
        assert torch.equal(decoded(row.aux), decoded(other.aux)) and torch.equal(decoded(row.final), decoded(other.final))
        assert torch.equal(decoded(row.aux[row.slots]), decoded(other.aux)[row.slots])
    for name in ("aux.frames", "aux.scales", "final.frames", "final.steps"):  # the first row cannot be read any more, the others can
        tensors = load_file(tmp_path / "x.safetensors")
        if name in tensors:
            tensors[name].view(torch.uint8).flatten()[:9] = 0xFF
            save_file(tensors, tmp_path / "y.safetensors", {"ids": json.dumps(back.ids)})
            torn = list(shard_rows(tmp_path / "y.safetensors", read_shard(tmp_path / "y.safetensors")))
            assert torch.equal(decoded(torn[3].aux), decoded(wanted[3].aux)) and torch.equal(
                decoded(torn[3].final), decoded(wanted[3].final)
            )


def test_any_range_of_encoded_states_is_that_of_the_tensor(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", shard(), Storing(compression="lossless"))
    encoded, plain = read_shard(tmp_path / "x").aux, decoded(shard().aux)
    assert isinstance(encoded, EncodedStates)
    for start, end in [*pairwise([0, 1, 20, 41, 48, 348]), (0, 348), (5, 5), (47, 49)]:
        assert torch.equal(decoded(encoded[start:end]), plain[start:end])
        assert torch.equal(decoded(encoded[start:end][1:9]), plain[start:end][1:9])
    places = torch.tensor([3, 40, 41, 200])
    assert torch.equal(decoded(encoded[places]), plain[places])


def test_the_formula_is_six_and_two_bytes_a_hidden_unit() -> None:
    assert Storing().state_bytes(1000, 400, 7168) == 1000 * 43_008 + 400 * 14_336
    assert Storing("fp8").state_bytes(1000, 400, 7168) == 1000 * (21_504 + 12) + 400 * 14_336
    packed = Storing("fp8", "lossless")
    assert packed.token_bytes(7168) == pytest.approx(18_923.5 + 12, 1e-4) and packed.teacher_bytes(7168) == 7168 + 4


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("aux.offsets", "offsets do not cut"),
        ("aux.scales", "scales are"),
        ("aux.frames", "cut"),
        ("final.offsets", "offsets do not cut"),
        ("final.steps", "final.steps are"),
        ("final.frames", "cut"),
        ("final.lowest", "final.steps are"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    write_shard(tmp_path / "x", shard(), Storing("fp8", "lossless"))
    tensors = load_file(tmp_path / "x")
    save_file({**tensors, name: tensors[name][:-1].clone()}, tmp_path / "y", {"ids": '["a","b","c","d"]'})
    with pytest.raises(StageError, match=problem):
        read_shard(tmp_path / "y")


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_a_shard_without_one_of_its_tensors_is_refused(tmp_path: Path, storing: Storing) -> None:
    write_shard(tmp_path / "x", shard(), storing)
    tensors = load_file(tmp_path / "x")
    for lost in tensors:
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "y", {"ids": '["a","b","c","d"]'})
        with pytest.raises(StageError, match="to rebuild stage hidden"):
            read_shard(tmp_path / "y")


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_batch_decoded_by_the_device_is_that_which_the_host_decodes(tmp_path: Path, storing: Storing, dtype: torch.dtype) -> None:
    """Page-locked memory aside, which needs a GPU. The last row's teachers are no range of the file's: some are left out."""
    write_shard(tmp_path / "x", shard(), storing)
    rows = [row for row in shard_rows(tmp_path / "x", read_shard(tmp_path / "x")) if len(row.slots)]
    some = torch.tensor([0, 2, 5])
    last = rows[-1]
    rows.append(replace(last, final=last.final[some], argmax=last.argmax[some], slots=last.slots[some], remaining=last.remaining[some]))
    capacity = Capacity(768, 384)
    wanted, got = collate_packed(rows, capacity, dtype), collate_factored(rows, capacity, dtype, pinned=False).to("cpu")
    for name, tensor in vars(wanted).items():
        assert torch.equal(tensor, getattr(got, name)) if isinstance(tensor, torch.Tensor) else tensor == getattr(got, name), name
    assert wanted.aux.abs().max() > 100 and wanted.final.dtype == got.final.dtype == dtype


@pytest.mark.parametrize("storing", list(every_storing()), ids=str)
def test_a_number_that_is_not_finite_is_found_however_it_is_stored(tmp_path: Path, storing: Storing) -> None:
    """All but a multiple of a grid can hold one; a scale or a step can be infinite too."""
    write_shard(tmp_path / "x", shard(), storing)
    content = read_shard(tmp_path / "x")
    for states in (content.aux, content.final):
        plain = decoded(states).float()
        assert finite(factored(states[:40])).all() and plain.isfinite().all()
    numbers = factored(content.aux[1:41]).numbers.clone()
    for value in (math.nan,) if numbers.dtype == FP8 else (math.nan, math.inf, -math.inf):  # an e4m3 knows no infinity
        broken = numbers.float()
        broken[7, 2, 5] = value
        spoilt = Factored(broken.to(numbers.dtype), factored(content.aux[1:41]).factors)
        assert finite(spoilt).tolist() == [True] * 7 + [False] + [True] * 32
    assert finite(Factored(torch.ones(2, 4, dtype=torch.int16), torch.tensor([1.0, math.inf]))).tolist() == [True, False]
    assert finite(Factored(torch.ones(2, 3, 4).to(FP8), torch.tensor([[1.0, 1.0, 1e38], [1.0, 1.0, 1e35]]))).tolist() == [False, True]
