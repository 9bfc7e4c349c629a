"""Products of numbers in 8 bits: how far they are from exact ones, that filler counts nothing, and where they are refused."""

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from scripts.lib.eagle3.export import load_drafter
from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.training import fp8_products
from scripts.lib.training.build import train
from scripts.lib.training.distil import PlainHead, plain_epilogue
from scripts.lib.training.fp8_head import HEAD, KEPT, Fp8Head, head_logits, refined, rounding
from scripts.lib.training.fp8_numbers import rounded, turned
from scripts.lib.training.fp8_products import check_fp8, fp8_mlp, fp8_product, fp8_weight, scaled, weight_gradient
from scripts.lib.training.objectives import soft_cross_entropy_
from scripts.lib.training.packed import BLOCK, Capacity, collate_packed
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.stepping import Recipe
from tests.test_eagle3_depth import deeper
from tests.test_train import curve
from tests.test_train_packed import STEPS, drafter_for, rows  # noqa: F401
from tests.test_train_packed import teacher as odd_teacher  # noqa: F401
from tests.train_case import SETTINGS, job, make_case

HALF_STEP = 2.0**-4  # what rounding to e4m3 takes from a number at most, as a share of it
IN_BF16, IN_FP8 = (Recipe(torch.bfloat16, "cpu", 0.8, 1.0, soft_cross_entropy_, fp8=fp8) for fp8 in (False, True))


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    """With a draft vocabulary that hardware takes."""
    return drafter_for(torch.arange(1, 193, 2))


@pytest.fixture(scope="module")
def teacher(odd_teacher):  # noqa: F811
    return replace(odd_teacher, head=odd_teacher.head[:96])


def uneven(count: int, size: int, seed: int) -> Tensor:
    """bf16[count, size] of rows whose sizes lie a factor of up to 4,000 apart."""
    generator = torch.Generator().manual_seed(seed)
    factors = 2.0 ** (-12 * torch.rand(count, 1, generator=generator))
    return (torch.randn(count, size, generator=generator) * factors).bfloat16()


def value(rows_: Tensor) -> Tensor:
    """What became of `rows_`."""
    numbers, scale = rounded(rows_)
    return numbers.float() * scale


def away(found: Tensor, wanted: Tensor) -> float:
    """Distance as a share."""
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())


def test_every_row_has_a_scale_of_its_own_and_loses_half_a_step_at_most():
    given = uneven(64, 48, 0)
    numbers, scale = rounded(given)
    assert numbers.dtype == torch.float8_e4m3fn and (scale.log2() == scale.log2().round()).all()
    assert ((numbers.float().abs().amax(1) > 224 - 1) & (numbers.float().abs().amax(1) <= 448)).all(), "the range is used"
    large = given.float().abs() > given.float().abs().amax(1, keepdim=True) * 2.0**-13
    assert ((value(given) - given.float()).abs() <= HALF_STEP * given.float().abs())[large].all()


@pytest.mark.parametrize("largest", [448.0, 449.0, 2.0**-45, 1e38, 1.75, 1.7578125])
def test_the_largest_number_of_a_row_never_leaves_the_range(largest):
    given = torch.tensor([[largest, -largest, largest / 2, 0.0]])
    torch.testing.assert_close(value(given), given, rtol=HALF_STEP, atol=0)


def test_nought_stays_nought_and_what_is_no_number_is_seen():
    given = torch.zeros(3, 16)
    given[1, 4], given[2, 5] = float("nan"), float("inf")
    found = value(given)
    assert (found[0] == 0).all() and found[1].isnan().any() and found[2].isnan().any()


def test_a_product_and_its_gradients_are_near_the_exact_ones():
    inputs, grad = uneven(256, 64, 1).requires_grad_(), uneven(256, 96, 2)
    weight = uneven(96, 64, 3).requires_grad_()
    output = fp8_product(inputs, fp8_weight(weight))
    output.backward(grad)
    assert output.dtype == inputs.grad.dtype == weight.grad.dtype == torch.bfloat16
    with torch.no_grad():
        left, right, back = inputs.float(), weight.float(), grad.float()
        exact = (left @ right.t(), back @ right, back.t() @ left)
    for found, wanted in zip((output, inputs.grad, weight.grad), exact, strict=True):
        assert 1e-3 < away(found, wanted) < 0.05, "rounded, and no more than that"


def test_a_gated_mlp_and_its_gradients_are_those_of_its_products():
    """One by one, with what is between them rounded to bfloat16 as well: some numbers of 8 bits are the next ones."""
    given = uneven(256, 64, 1), uneven(192, 64, 3), uneven(64, 96, 4)
    found, wanted = ([one.clone().requires_grad_() for one in given] for _ in range(2))
    gate, up = fp8_product(wanted[0], fp8_weight(wanted[1])).chunk(2, -1)
    one_by_one = fp8_product(functional.silu(gate) * up, fp8_weight(wanted[2]))
    output = fp8_mlp(found[0], *(fp8_weight(weight) for weight in found[1:]))
    for product in (output, one_by_one):
        product.backward(uneven(256, 64, 2))
    assert away(output, one_by_one) < 0.02 and output.dtype == torch.bfloat16
    for near, exact in zip(found, wanted, strict=True):
        assert away(near.grad, exact.grad) < 0.03 and near.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_behind_a_gated_mlp(odd):
    """In its inputs, and in the gradient that comes back."""
    weights = [fp8_weight(uneven(192, 64, 3).requires_grad_()), fp8_weight(uneven(64, 96, 4).requires_grad_())]
    inputs, grad = uneven(32, 64, 1), uneven(32, 64, 2)
    inputs[3, 5], grad[7, 9] = odd, odd
    output = fp8_mlp(inputs.requires_grad_(), *weights)
    output.backward(grad)
    assert not output[3].isfinite().all() and output[4].isfinite().all()
    assert not inputs.grad[7].isfinite().all() and inputs.grad[4].isfinite().all()
    assert not weights[1].weight.grad.isfinite().all()


def test_a_matrix_of_one_row_is_turned_into_memory_of_its_own():
    for shape in ((1, 16), (16, 1), (0, 16), (3, 16)):
        numbers = torch.ones(shape).to(torch.float8_e4m3fn)
        found = turned(numbers)
        assert found.shape == shape[::-1] and found.is_contiguous() and (found.float() == 1).all()


@pytest.mark.parametrize(("grad", "inputs"), [(0.0, 0.0), (0.0, 2.0**-34), (2.0**-70, 2.0**-80), (1.0, 0.0)])
def test_rows_of_nothing_add_nothing_to_a_weights_gradient(grad, inputs):
    """Of filler, and behind an MLP that is dead: the product of two scales must not be nought itself."""
    found = weight_gradient(rounded(torch.full((16, 32), grad)), rounded(torch.full((16, 48), inputs)), torch.float32)
    assert (found == 0).all() and found.shape == (32, 48)


def test_small_rows_add_to_a_weights_gradient_what_they_are():
    """A thousand rows, each a thousandth of the first: a scale for all rows would leave little of them."""
    grad, inputs = (torch.full((1025, 16), 2.0**-5) for _ in range(2))
    grad[0], inputs[0] = 1.0, 1.0
    found = weight_gradient(rounded(grad), rounded(inputs), torch.float32)
    torch.testing.assert_close(found, torch.full((16, 16), 2.0), rtol=1e-6, atol=0)


def test_a_head_learns_what_a_plain_one_learns_and_adds_up_its_gradient_over_chunks():
    weight, states, teacher = uneven(96, 64, 4), uneven(32, 64, 5), uneven(8, 96, 6)
    share, epilogue = torch.rand(32, generator=torch.Generator().manual_seed(7)), plain_epilogue(soft_cross_entropy_)
    exact, near = PlainHead(epilogue, weight.float()), Fp8Head(HEAD, rounding(epilogue, HEAD), weight, states)
    for part in (slice(16), slice(16, 32)):
        (wanted, wanted_back), (losses, back) = (
            head.learn(rows_, teacher, share[part]) for head, rows_ in ((exact, states[part].float()), (near, states[part]))
        )
        torch.testing.assert_close(losses, wanted, rtol=0.03, atol=0)
        assert 1e-3 < away(back, wanted_back) < 0.15
    assert 1e-3 < away(near.gradient, exact.gradient) < 0.15 and near.gradient.dtype == torch.float32


def test_the_inputs_that_give_most_to_logits_are_there_in_two_pieces():
    """Where few inputs are large, as in states of real targets, logits are far nearer to the exact ones than those of numbers in 8 bits."""
    generator = torch.Generator().manual_seed(8)
    states, weight = (torch.randn(count, 576, generator=generator) for count in (64, 128))
    states[:, 5], states[:, 300:303] = 50.0 + states[:, 5], states[:, 300:303] * 20
    states, weight = states.bfloat16(), weight.bfloat16()
    exact = states.float() @ weight.float().t()
    rows_, _, kept = refined(weight, states)
    assert {5, 300, 301, 302} <= set(kept.tolist()) and rows_.numbers.shape == (128, 576 + 2 * KEPT)
    found = head_logits(states, rows_, kept)
    assert away(found, exact) < 0.4 * away(scaled(rounded(states), rounded(weight), torch.bfloat16), exact)


def test_inputs_are_chosen_by_states_and_weight_together():
    states, weight = torch.ones(32, 576), torch.ones(128, 576)
    states[:, :100], weight[:, :100] = 8.0, 0.01  # large, and of no weight
    weight[:, 200:300] = 8.0
    states[:, 250:300] = 0.01
    assert set(range(200, 250)) <= set(refined(weight, states).kept.tolist()) <= set(range(100, 250)) | set(range(300, 576))


def gradients(drafter: Drafter, teacher, batch, recipe: Recipe):
    """Summed losses of each draft step and the masters' gradients of one batch."""
    step = PackedStep(drafter, teacher, recipe, Capacity(len(batch.positions), len(batch.slots)))
    losses = step.gradients(batch, torch.full((STEPS,), 0.01))
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    drafter.zero_grad()
    return losses, found


@pytest.mark.parametrize("layers", [1, 2])
def test_every_product_of_layers_and_head_is_of_numbers_in_8_bits(drafter, teacher, rows, monkeypatch, layers):  # noqa: F811
    """Counted by what a sum runs over and the outputs: each forward, and twice backward."""
    drafter, seen, product = drafter if layers == 1 else deeper(drafter, layers), Counter(), torch._scaled_mm

    def counted(left, right, *scales, **options):
        seen[left.shape[1], right.shape[1]] += 1
        return product(left, right, *scales, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    for name in ("gated", "gated_back"):
        monkeypatch.setattr(fp8_products, name, noted(getattr(fp8_products, name), name, seen))
    batch = collate_packed(rows, Capacity.of(rows), torch.bfloat16)
    gradients(drafter, teacher, batch, IN_FP8)
    slots, hidden, inner, vocabulary = len(batch.slots), 64, 128, 96
    runs = STEPS * layers  # at the first step layers before the last run at positions
    assert seen[hidden, 2 * inner] == seen[2 * inner, hidden] == runs and seen[hidden, hidden] == 2 * runs, "gate and up; output"
    assert seen[hidden, inner] == seen[inner, hidden] == runs + (runs - 1), "down; heads, as wide as the MLP here"
    assert seen[hidden + 2 * KEPT, vocabulary] == seen[vocabulary, hidden] == 1 and seen[STEPS * slots, hidden] == 1
    assert seen.pop("gated") == seen.pop("gated_back") == runs, "between the MLP's products"
    assert sum(seen.values()) == 3 * (3 * runs + (runs - 1) + 1), "nothing else, and each of them three times"


def noted(function, name: str, seen: Counter):
    """`function`, whose calls are counted."""

    def called(*arguments):
        seen[name] += 1
        return function(*arguments)

    return called


@pytest.mark.parametrize("recompute", [False, True])
def test_a_batch_has_nearly_the_losses_and_gradients_of_bfloat16(drafter, teacher, rows, recompute):  # noqa: F811
    batch = collate_packed(rows, Capacity.of(rows), torch.bfloat16)
    recipe = replace(IN_FP8, recompute=recompute)
    (found, near), (wanted, exact) = (gradients(drafter, teacher, batch, way) for way in (recipe, IN_BF16))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0)
    assert near.keys() == exact.keys() and all(1e-4 < away(near[name], exact[name]) < 0.25 for name in exact)
    cosines = {name: float(torch.cosine_similarity(near[name].flatten(), exact[name].flatten(), 0)) for name in exact}
    assert min(cosines.values()) > 0.97, cosines


def test_filler_counts_nothing(drafter, teacher, rows):  # noqa: F811
    small = Capacity.of(rows)
    found, wanted = (
        gradients(drafter, teacher, collate_packed(rows, capacity, torch.bfloat16), IN_FP8)
        for capacity in (Capacity(small.positions + BLOCK, small.slots + 2 * BLOCK), small)
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=0)
    assert all(away(found[1][name], wanted[1][name]) < 0.02 for name in wanted[1])


def test_the_stage_learns_what_it_learns_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.lib.training.trainer.new_stepper", PackedStep)
    make_case(tmp_path)
    jobs = {name: job(tmp_path, tmp_path / name, precision=name, epochs=4) for name in ("bfloat16", "fp8")}
    for one in jobs.values():
        run(one, train)
    near, exact = ([row["eval_loss"] for row in curve(tmp_path / name) if "eval_loss" in row] for name in ("fp8", "bfloat16"))
    assert near != exact and near[-1] < near[0] - 0.1
    assert near == pytest.approx(exact, rel=0.02)
    load_drafter(tmp_path / "fp8", torch.float32, "cpu")


def test_what_cannot_multiply_in_8_bits_is_named(tmp_path, caplog):
    make_case(tmp_path)
    with caplog.at_level(logging.INFO), pytest.raises(StageError, match=r"precision fp8: cpu has no .* set the drafter's `precision` to"):
        run(job(tmp_path, tmp_path / "out", precision="fp8"), train)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, no multiple of 16"),
        ({"num_attention_heads": 5, "head_dim": 8}, "size of all query heads is 40"),
        ({}, None),
    ],
)
def test_sizes_that_hardware_does_not_take_are_named(drafter, monkeypatch, sizes, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = replace(drafter.config, **sizes)
    if said is None:
        check_fp8(config, "cuda")
        return
    with pytest.raises(StageError, match=said):
        check_fp8(config, "cuda")


def test_an_older_gpu_is_named(drafter, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(StageError, match=r"A100 has no products in 8 bits.*8\.9"):
        check_fp8(drafter.config, "cuda")


def test_the_config_says_fp8():
    recipe = TrainSettings.of(SETTINGS | {"drafter": SETTINGS["drafter"] | {"precision": "fp8"}}).recipe("cuda", {})
    assert recipe.fp8 and recipe.dtype == torch.bfloat16
