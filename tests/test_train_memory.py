"""The estimate of memory against peaks that were measured on a GPU, and what is said when a GPU has less."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.train_rows import SHAPES, Shape
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.stage import run
from scripts.lib.training import distil, fp8_head, trainer
from scripts.lib.training.build import train
from scripts.lib.training.memory import CHUNK, FP8_CHUNK, GIB, Load, Sizes, check_room, estimate, expected_load, trained_share
from tests.train_case import SETTINGS, job, make_case

KIMI = Load(slots=8192, positions=10240, steps=4, itemsize=2, several=True)


def sizes_of(shape: Shape) -> Sizes:
    return Sizes.of(json.loads(json.dumps(shape.target().to_dict())), shape.draft_vocabulary)


@pytest.mark.parametrize(
    ("shape", "positions", "slots", "ways", "measured"),
    [
        ("llama-8b", 10240, 8192, {}, 19.7e9),
        ("llama-8b", 20480, 16384, {}, 30.0e9),
        ("llama-8b", 11136, 8448, {"several": True}, 23.9e9),
        ("llama-8b", 11136, 8448, {"several": True, "fp8": True}, 24.8e9),
        ("kimi", 10240, 8192, {}, 33.9e9),
        ("smollm2", 41216, 32768, {}, 4.7e9),
    ],
)
def test_estimate_is_near_the_measured_peak(shape, positions, slots, ways, measured):
    memory = estimate(sizes_of(SHAPES[shape]), Load(slots, positions, SHAPES[shape].steps, 2, **ways))
    assert 0.9 < (memory.total - memory.graph) / measured < 1.05, "measured without graphs"
    assert bool(memory.graph) == (shape == "smollm2"), "a batch of a large drafter is no graph"
    assert str(memory).startswith(f"{memory.total / GIB:.1f} GiB (")


@pytest.mark.parametrize(("shape", "layers"), [("llama-8b", 1), ("kimi", 1), ("smollm2", 1), ("smollm2", 3)])
def test_sizes_are_those_of_the_drafter(shape, layers):
    one, sizes = SHAPES[shape].drafter("meta"), replace(sizes_of(SHAPES[shape]), layers=layers)
    with torch.device("meta"):
        drafter = Drafter(replace(one.config, num_hidden_layers=layers), one.d2t, one.t2d)
    whole = sum(parameter.numel() for parameter in drafter.parameters())
    assert 0 <= whole - sizes.weights <= (3 + 2 * layers) * sizes.hidden, "norms alone are left out"
    assert (CHUNK, FP8_CHUNK) == (distil.TEACHERS, fp8_head.TEACHERS)


def test_sizes_of_a_text_model_inside_a_larger_one_with_latent_attention():
    """As in Kimi-K2.5: the parts of a head are named apart, and its value part is the size of a plain one."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 300, "v_head_dim": 16, "head_dim": 24}
    assert Sizes.of({"text_config": text}, 50) == Sizes(64, 128, 4, 4, 16, 300, 50)
    target = SHAPES["smollm2"].target()
    config = DrafterConfig.from_target(target, 50, (2, 4, 5))
    found = asdict(Sizes.of(target.to_dict(), 50))
    assert found["head_dim"] == config.head_dim and found["groups"] == config.num_key_value_heads


def test_recomputing_and_sharing_take_memory_away_where_they_say():
    sizes = sizes_of(SHAPES["kimi"])
    plain, again, shared = (estimate(sizes, load) for load in (KIMI, replace(KIMI, recompute=True), replace(KIMI, shards=8)))
    assert again.activations < plain.activations / 2 and again.masters == plain.masters
    assert shared.masters + shared.optimizer == (plain.masters + plain.optimizer) / 8 and shared.activations == plain.activations


def test_products_in_8_bits_have_copies_of_their_own():
    sizes = sizes_of(SHAPES["kimi"])
    plain, rounded = (estimate(sizes, replace(KIMI, fp8=fp8)) for fp8 in (False, True))
    assert rounded.copies - plain.copies == 2 * sizes.weights + 4 * sizes.hidden * sizes.draft_vocabulary, "and a chunk's gradient"
    assert rounded.logits == 2 * 2 * plain.logits and rounded.masters == plain.masters


def test_the_only_batch_of_a_step_makes_gradients_of_masters_when_what_it_kept_is_gone():
    sizes = sizes_of(SHAPES["kimi"])
    only, one_of_several = (estimate(sizes, replace(KIMI, several=several)) for several in (False, True))
    assert one_of_several.masters == 2 * only.masters == 8 * sizes.weights
    small = estimate(sizes, replace(KIMI, slots=2048, positions=2560, several=False))
    assert only.masters < small.masters < one_of_several.masters, "they are more than what a small batch keeps"


def test_training_knows_whether_its_steps_have_several_batches(tmp_path, monkeypatch):
    """By its plan: a step may have more trained tokens than a whole batch, and so one batch more than the config's figures say."""
    seen = []
    monkeypatch.setattr(trainer, "check_memory", lambda _drafter, load, *_: seen.append(load.several))
    make_case(tmp_path)
    for micro_tokens in (8192, 25):
        run(job(tmp_path, tmp_path / str(micro_tokens), micro_tokens=micro_tokens), train)
    assert seen == [False, True]


def test_a_further_layer_keeps_its_part_of_later_steps_at_slots_and_the_layers_before_the_last_theirs_of_the_first_at_positions():
    sizes, load = sizes_of(SHAPES["smollm2"]), Load(slots=1000, positions=3000, steps=4, itemsize=2)
    one, two = (estimate(replace(sizes, layers=layers), load) for layers in (1, 2))
    assert two.activations / one.activations == (1000 * (1 + 3 * 2) + 3000) / (1000 * 4)
    assert two.masters > one.masters and two.states == one.states
    one, two = (estimate(replace(sizes, layers=layers), replace(load, recompute=True)) for layers in (1, 2))
    assert one.activations < two.activations < estimate(replace(sizes, layers=2), load).activations / 1.5


def test_a_training_that_cannot_fit_is_refused_with_what_would_fit():
    sizes = sizes_of(SHAPES["kimi"])
    check_room(sizes, replace(KIMI, several=False), 33.9e9, 8192, 2048)
    with pytest.raises(
        StageError, match=r"needs about 36\.4 GiB .*has 30\.0 GiB free: set micro_tokens to 2048 or .*shard to true with 2 ranks"
    ):
        check_room(sizes, KIMI, 30 * GIB, 8192, 1500)
    with pytest.raises(StageError, match=r"has 26\.0 GiB free: set micro_tokens to \d+[^,]*$") as refused:
        check_room(sizes, replace(KIMI, muon=True), 26 * GIB, 8192, 1500)
    assert "shard" not in str(refused.value), "which Muon is refused with"
    with pytest.raises(StageError, match=r"free: set runtime\.shard to true with 2 ranks$"):
        check_room(sizes, KIMI, 30 * GIB, 8192, 5000)  # a row of 5,000 trained tokens is in one batch
    with pytest.raises(StageError, match="take a GPU with more memory"):
        check_room(sizes, KIMI, 2 * GIB, 8192, 1500)


def test_the_batches_that_a_config_will_make():
    drafter = SETTINGS["drafter"] | {"batch_tokens": 32768, "micro_tokens": 8192, "precision": "bfloat16"}
    assert expected_load(drafter, 0.5, {"ranks": 3, "shard": True}) == Load(5462, 10924, 3, 2, False, 3, several=True)
    assert expected_load(drafter, 0.8, {"recompute": True}) == Load(8192, 10240, 3, 2, True, 1, several=True)
    assert expected_load(drafter | {"precision": "fp8"}, 0.8, {}) == Load(8192, 10240, 3, 2, fp8=True, several=True)
    assert not expected_load(drafter | {"batch_tokens": 8192}, 0.8, {}).several
    assert trained_share({"datasets": {"a": {"tokens": 30, "trained_tokens": 10}, "b": {"tokens": 10, "trained_tokens": 10}}}) == 0.5
    assert trained_share({}) == 0.5
