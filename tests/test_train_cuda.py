"""On a GPU the compiled kernels give what the plain ones give."""

import json
from dataclasses import replace

import pytest
import torch

from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.stage import run
from scripts.lib.training import fp8_numbers
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.build import train
from scripts.lib.training.distil import plain_epilogue
from scripts.lib.training.fp8_products import check_fp8
from scripts.lib.training.loader import QUEUED, packed_batches
from scripts.lib.training.loss import Teacher
from scripts.lib.training.objectives import objective, soft_cross_entropy_
from scripts.lib.training.packed import BLOCK, Capacity, collate_packed
from scripts.lib.training.packed_step import PackedStep
from scripts.lib.training.replayed import Replayed
from scripts.lib.training.stepping import Recipe
from scripts.lib.training.trainer import Trainer
from tests.test_eagle3_depth import deeper
from tests.test_train import curve
from tests.test_train_fp8 import drafter as eighths  # noqa: F401
from tests.test_train_fp8 import odd_teacher  # noqa: F401
from tests.test_train_fp8 import teacher as eighths_teacher  # noqa: F401
from tests.test_train_packed import STEPS, drafter, rows, teacher  # noqa: F401
from tests.train_case import job, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("precision", "made"),
    [
        ((torch.float32, 2e-3), ("soft", 1)),
        ((torch.bfloat16, 5e-2), ("soft", 1)),
        ((torch.float32, 2e-3), ("lk_lambda", 1)),
        ((torch.float32, 2e-3), ("soft", 3)),
        ((torch.bfloat16, 5e-2), ("soft", 2)),
    ],
)
def test_a_step_on_cuda_has_the_losses_and_gradients_of_the_cpu(drafter, teacher, rows, precision, made):  # noqa: F811
    torch.backends.cuda.matmul.allow_tf32 = False
    (dtype, bound), (kind, layers) = precision, made
    judge = objective(kind, 0.9, 2.0)
    drafter = drafter if layers == 1 else deeper(drafter, layers)
    found, wanted = (gradients(drafter, teacher, rows, Recipe(dtype, device, 0.8, 1.0, judge)) for device in ("cuda", "cpu"))
    torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=bound, atol=0)
    for name, gradient in wanted[1].items():
        assert (found[1][name].cpu() - gradient).norm() <= bound * gradient.norm(), name


@pytest.mark.parametrize("recompute", [False, True])
def test_products_in_8_bits_on_cuda_give_what_the_plain_ones_give(eighths, eighths_teacher, rows, recompute):  # noqa: F811
    """Fused kernels round a state once where plain ones round it to bfloat16 before: some numbers of 8 bits are the next ones."""
    check_fp8(eighths.config, "cuda")
    recipes = (Recipe(torch.bfloat16, device, 0.8, 1.0, soft_cross_entropy_, recompute, fp8=True) for device in ("cuda", "cpu"))
    found, wanted = (gradients(eighths, eighths_teacher, rows, recipe) for recipe in recipes)
    torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=5e-2, atol=0)
    for name, gradient in wanted[1].items():
        assert (found[1][name].cpu() - gradient).norm() <= 0.25 * gradient.norm(), name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(130, 257), (128, 14336), (1, 16)])
def test_a_matrix_is_turned_as_on_the_cpu(shared, shape):
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
    share = 2.0 ** -torch.randint(0, 9, (shape[0], 1), generator=generator).float() if shared else None
    found = fp8_numbers.turned(numbers.cuda(), share.cuda() if shared else None)
    assert torch.equal(found.cpu().view(torch.uint8), fp8_numbers.turned(numbers, share).view(torch.uint8))


def gated_case(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient bf16[70, width] of a gated row, of any size, and gate and up."""
    generator = torch.Generator().manual_seed(width)
    sizes = 2.0 ** (-8 * torch.rand(70, 1, generator=generator))
    gate_up, grad = (torch.randn(70, count, generator=generator) for count in (2 * width, width))
    return (grad * sizes).bfloat16(), (gate_up * 3).bfloat16()


@pytest.mark.parametrize("width", [16, 500, 8208, 14336])
def test_rows_are_gated_as_on_the_cpu(width):
    """Narrower than a block, and of two blocks, the second of which they do not fill."""
    grad, gate_up = gated_case(width)
    for function, given in ((fp8_numbers.gated, (gate_up,)), (fp8_numbers.gated_back, (grad, gate_up))):
        (numbers, scale), (wanted, wanted_scale) = (
            [one.cpu().float() for one in function(*to)] for to in ([t.cuda() for t in given], given)
        )
        assert (scale == wanted_scale).float().mean() > 0.98
        assert (numbers * scale - wanted * wanted_scale).norm() < 1e-3 * (wanted * wanted_scale).norm()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_seen_where_rows_are_gated(odd):
    for place in (5, 8200, 8208 + 5):
        grad, gate_up = gated_case(8208)
        gate_up[3, place], grad[9, place % 8208] = odd, odd
        numbers, back = fp8_numbers.gated(gate_up.cuda())[0].float(), fp8_numbers.gated_back(grad.cuda(), gate_up.cuda())[0].float()
        assert numbers.isnan().any(1).nonzero().flatten().tolist() == [3]
        assert back.isnan().any(1).nonzero().flatten().tolist() == [3, 9]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_draft_step_computed_again_on_cuda_has_the_gradients_of_one_that_was_kept(drafter, teacher, rows, layers):  # noqa: F811
    drafter = drafter if layers == 1 else deeper(drafter, layers)
    kept, again = (
        gradients(drafter, teacher, rows, Recipe(torch.bfloat16, "cuda", 0.8, 1.0, soft_cross_entropy_, recompute))
        for recompute in (False, True)
    )
    torch.testing.assert_close(again[0], kept[0], rtol=1e-3, atol=0)
    for name, gradient in kept[1].items():
        assert (again[1][name] - gradient).norm() <= 1e-2 * gradient.norm(), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_learn_what_one_learns(tmp_path, shard):
    """In float32 with several batches a step, sums over NCCL; also with masters, gradients and optimizer spread over both."""
    torch.backends.cuda.matmul.allow_tf32 = False
    make_case(tmp_path)
    one = replace(job(tmp_path, tmp_path / "one", micro_tokens=25), runtime={"device": "cuda", "threads": 1})
    two = replace(one, output=tmp_path / "two", runtime={**one.runtime, "ranks": 2, "shard": shard, "recompute": shard})
    run(one, train)
    run(two, train)
    for found, wanted in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-2)


def gradients(drafter: Drafter, teacher: Teacher, rows: list[TrainingRow], recipe: Recipe):  # noqa: F811
    """Summed losses of each step and the masters' gradients of one packed batch."""
    capacity = Capacity.of(rows)
    batch = collate_packed(rows, Capacity(capacity.positions + BLOCK, capacity.slots + BLOCK), recipe.dtype).to(recipe.device)
    step = PackedStep(drafter, teacher, recipe, capacity)
    counts = [int((batch.remaining > number).sum()) for number in range(STEPS)]
    losses = step.gradients(batch, torch.tensor([0.8**number / count for number, count in enumerate(counts)], device=recipe.device))
    masters = step.weights.masters.named_parameters()
    found = {name: parameter.grad.clone() for name, parameter in masters if parameter.grad is not None}
    step.weights.masters.zero_grad()
    drafter.to("cpu")
    return losses, found


def test_a_host_that_is_faster_than_the_gpu_does_not_fill_its_memory(rows):  # noqa: F811
    """Batches were once sent as fast as they were made: a large drafter took a fifth more memory than was said."""
    capacity = Capacity(2**17, 2**15)
    busy, size = torch.randn(8192, 8192, device="cuda"), capacity.positions * rows[0].aux.shape[2] * 3 * 2
    busy @ busy  # takes memory for more such products
    torch.cuda.reset_peak_memory_stats()
    before, seen = torch.cuda.memory_allocated(), 0
    for batch in packed_batches([rows[:2]] * 12, capacity, torch.bfloat16, "cuda"):
        for _ in range(20):
            busy @ busy
        seen += len(batch.ids)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before - busy.nbytes
    assert seen == 24 and size < most < (QUEUED + 2) * 1.5 * size


def epilogue_case(device: str):
    """Logits of 40 rows, those of the 10 teachers of each draft step, and what rows weigh, some of them nothing."""
    generator = torch.Generator(device).manual_seed(0)
    logits, taught = (torch.randn(count, 9008, generator=generator, device=device).bfloat16() * 3 for count in (40, 10))
    share = torch.rand(40, generator=generator, device=device)
    return logits, taught, share * (share > 0.1)


def test_the_triton_epilogue_is_the_plain_one():
    from scripts.lib.training.triton_epilogue import triton_epilogue  # Triton is there with CUDA only

    logits, taught, share = epilogue_case("cuda")
    plain, fast = logits.clone(), logits.clone()
    wanted = plain_epilogue(soft_cross_entropy_)(plain, taught, share)
    torch.testing.assert_close(triton_epilogue(fast, taught, share), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast, plain, rtol=2e-2, atol=1e-6)


def test_the_triton_epilogue_rounds_to_8_bits():
    from scripts.lib.training.triton_epilogue import triton_fp8_epilogue

    logits, taught, share = epilogue_case("cuda")
    exact = logits.float()
    wanted = plain_epilogue(soft_cross_entropy_)(exact, taught, share)
    losses, (numbers, scale) = triton_fp8_epilogue(logits, taught, share)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
    smallest = exact.abs().amax(1, keepdim=True) * 2.0**-17  # what e4m3 knows beside the largest, and a step of it
    assert ((numbers.float() * scale - exact).abs() <= 2.0**-4 * exact.abs() + smallest).all()
    assert (numbers.float()[share == 0] == 0).all()


def test_the_stage_on_cuda_learns_what_it_learns_on_the_cpu_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    """In float32, with several batches a step, stopped at a step behind a checkpoint."""
    torch.backends.cuda.matmul.allow_tf32 = False
    make_case(tmp_path)
    run(job(tmp_path, tmp_path / "cpu"), train)
    on_cuda = replace(job(tmp_path, tmp_path / "cuda", micro_tokens=25), runtime={"device": "cuda", "threads": 1})
    step, done = Trainer.step, []

    def stopping(*arguments):
        done.append(arguments)
        if len(done) == 6:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "step", stopping)
        run(on_cuda, train)
    run(on_cuda, train)
    assert json.loads((tmp_path / "cuda" / "cost.json").read_text())["resumed"]
    for found, wanted in zip(curve(tmp_path / "cuda"), curve(tmp_path / "cpu"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-2)


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_a_recorded_batch_adds_the_gradients_of_one_that_was_computed(request, rows, dtype, fp8):  # noqa: F811
    """Batches of other rows and other weights than those that were recorded, and two of them in one optimizer step."""
    torch.backends.cuda.matmul.allow_tf32 = False
    recipe = Recipe(dtype, "cuda", 0.8, 1.0, soft_cross_entropy_, fp8=fp8)
    parts = (request.getfixturevalue(name) for name in (("eighths", "eighths_teacher") if fp8 else ("drafter", "teacher")))
    step = PackedStep(*parts, recipe, Capacity.of(rows))
    assert isinstance(step.add_gradients, Replayed)
    batches = [collate_packed(some, step.capacity, dtype).to("cuda") for some in (rows, rows[1:], rows[:2])]
    weights = [torch.tensor([share, share / 2], device="cuda") for share in (0.1, 0.2, 0.3)]
    for batch, share in zip(batches, weights, strict=True):  # computed, recorded, replayed
        step.add_gradients(batch, share)
    assert step.add_gradients.recorded and step.add_gradients.steps == 2
    for used in ([0], [1], [2, 0]):
        made = [summed(step, add, [(batches[number], weights[number]) for number in used]) for add in (step.gradients, step.add_gradients)]
        torch.testing.assert_close(made[1], made[0], rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6)


def summed(step: PackedStep, add, batches) -> dict[str, torch.Tensor]:
    """Losses and gradients of `batches` together, by `add`."""
    step.weights.masters.zero_grad(set_to_none=False)
    losses = sum(add(*batch).clone() for batch in batches)
    return {"loss": losses} | {
        name: weight.grad.clone() for name, weight in step.weights.masters.named_parameters() if weight.grad is not None
    }
