"""The engine in process: its answers and states are those of transformers, alone or in any batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from scripts.lib.engines import decoding
from scripts.lib.engines.decoder import tapped
from scripts.lib.engines.opening import open_engine
from scripts.lib.engines.protocol import Request, StateRequest
from scripts.lib.engines.sampling import Sampler
from scripts.lib.engines.settings import EngineSettings
from scripts.lib.engines.transformers_engine import SHARED_TOKENS, TransformersEngine, forward_states, load_target
from scripts.lib.ground.errors import StageError
from tests.tiny import save_tiny_target

NO_EOS = frozenset({-1})
PREFIX = (1, 9, 9, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_target(folder, torch.float32, "cpu")


def prompts(lengths: Sequence[int], prefix: tuple[int, ...] = PREFIX) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(3)
    return [prefix + tuple(torch.randint(3, 259, (length,), generator=draw).tolist()) for length in lengths]


def requests(lengths: Sequence[int], max_tokens: Sequence[int] | int = 20, prefix: tuple[int, ...] = PREFIX) -> list[Request]:
    limits = [max_tokens] * len(lengths) if isinstance(max_tokens, int) else max_tokens
    rows = zip(prompts(lengths, prefix), limits, strict=True)
    return [Request(f"r{number}", prompt, limit) for number, (prompt, limit) in enumerate(rows)]


def reference(model: Any, request: Request, eos: int | None = None) -> list[int]:
    """What `generate` of transformers answers to one prompt alone."""
    ids = torch.tensor([request.prompt_ids])
    options = {"eos_token_id": eos if eos is not None else -1, "pad_token_id": 0, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, **options)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prefix", [PREFIX, ()])
def test_greedy_answers_are_those_of_transformers(model: PreTrainedModel, prefix: tuple[int, ...]) -> None:
    asked = requests([1, 2, 2, 9, 17, 30, 31], prefix=prefix)
    answers = TransformersEngine(model, NO_EOS).generate(asked)
    assert [list(done.output_ids) for done in answers] == [reference(model, request) for request in asked]
    assert {done.finish_reason for done in answers} == {"length"}


def test_rows_that_end_early_leave_the_others_as_they_are(model: PreTrainedModel) -> None:
    asked = requests([3, 4, 5, 6, 7, 8, 9, 10], max_tokens=[1, 3, 20, 5, 20, 8, 2, 16])
    eos = reference(model, asked[2])[6]  # ends row 2 at its seventh token, and any other row that writes it
    answers = TransformersEngine(model, frozenset({eos})).generate(asked)
    assert [list(done.output_ids) for done in answers] == [reference(model, request, eos) for request in asked]
    assert answers[2].finish_reason == "stop" and answers[2].output_ids[-1] == eos
    assert [done.finish_reason == "stop" for done in answers] == [done.output_ids[-1] == eos for done in answers]


def test_prefill_in_groups_gives_the_same_answers(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests([1, 2, 8, 9, 20])
    whole = TransformersEngine(model, NO_EOS).generate(asked)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 16)
    assert [(part.start, part.stop) for part in decoding.groups([1, 2, 8, 9, 20])] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert TransformersEngine(model, NO_EOS).generate(asked) == whole


def test_identical_and_single_prompts_keep_a_token_to_feed(model: PreTrainedModel) -> None:
    assert decoding.shared([PREFIX, PREFIX]) == len(PREFIX) - 1
    assert decoding.shared([PREFIX]) == 0
    twins = [Request("a", PREFIX, 6), Request("b", PREFIX, 6)]
    first, second = TransformersEngine(model, NO_EOS).generate(twins)
    assert list(first.output_ids) == list(second.output_ids) == reference(model, twins[0])


def test_sampling_depends_on_seed_and_key_alone(model: PreTrainedModel) -> None:
    asked = requests([2, 5, 5, 11])

    def answers(order: Callable[[list[Request]], list[Request]], seed: int) -> dict[str, tuple[int, ...]]:
        engine = TransformersEngine(model, NO_EOS, temperature=1.0, seed=seed)
        return {done.key: done.output_ids for done in engine.generate(order(asked))}

    assert answers(list, 7) == answers(lambda rows: rows[::-1], 7) == answers(lambda rows: rows[::-1], 7)
    assert answers(list, 7) != answers(list, 8)


def test_sampling_follows_the_probabilities() -> None:
    sampler = Sampler(temperature=0.5, seed=1)
    logits = torch.tensor([[0.0, -50.0, 0.5493061, -50.0]]).repeat(4000, 1)  # at temperature 0.5: one to three
    picks = sampler.pick(logits, [str(number) for number in range(4000)])
    assert set(picks.tolist()) == {0, 2}
    assert abs((picks == 2).float().mean().item() - 0.75) < 0.03


def test_states_are_the_hidden_states_of_transformers_in_any_batch(model: PreTrainedModel) -> None:
    rows = [StateRequest(ids, (1, 3, len(ids) - 2)) for ids in prompts([2, 9, 30])]
    boundaries = [1, 4, 7]
    engine = TransformersEngine(model, NO_EOS)
    for row, state in zip(rows, engine.states(rows, boundaries), strict=True):
        output = model(torch.tensor([row.input_ids]), output_hidden_states=True)
        wanted = torch.stack([output.hidden_states[boundary][0] for boundary in boundaries], dim=1)
        assert relative(state.aux, wanted) < 1e-5
        assert relative(state.final, output.hidden_states[-1][0, list(row.final_index)]) < 1e-5
        assert state.argmax.tolist() == output.logits[0, list(row.final_index)].argmax(-1).tolist()
        (alone,) = engine.states([row], boundaries)
        assert relative(state.aux, alone.aux) < 1e-5 and relative(state.final, alone.final) < 1e-5


def test_states_after_a_shared_beginning_are_those_of_the_rows_alone(model: PreTrainedModel) -> None:
    rows = [StateRequest(ids, (5, len(ids) - 2)) for ids in prompts([2, 9, 30], prefix=tuple(range(3, 3 + SHARED_TOKENS)))]
    engine = TransformersEngine(model, NO_EOS)
    passes = []
    handle = model.model.register_forward_pre_hook(lambda *arguments: passes.append(arguments[-1]["input_ids"].shape), with_kwargs=True)
    together = engine.states(rows, [1, 4, 7])
    handle.remove()
    assert passes == [(1, SHARED_TOKENS), (3, 30)]
    for row, state in zip(rows, together, strict=True):
        (alone,) = engine.states([row], [1, 4, 7])
        assert relative(state.aux, alone.aux) < 1e-5 and relative(state.final, alone.final) < 1e-5
        assert state.argmax.tolist() == alone.argmax.tolist()


def relative(states: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, in units of the largest value."""
    assert states.shape == wanted.shape
    return float((states - wanted).abs().max() / wanted.abs().max())


def test_a_cached_row_in_pieces_has_the_states_of_the_whole_row(model: PreTrainedModel) -> None:
    """A prompt that is fed in chunks once came back as one block per chunk (speculators issue 279)."""
    (ids,) = prompts([16])
    whole, aux = forward_states(model, torch.tensor([ids]), None, [2, 4, 5])
    cache = DynamicCache()
    parts = [forward_states(model, torch.tensor([ids[start : start + 8]]), cache, [2, 4, 5]) for start in (0, 8, 16)]
    assert relative(torch.cat([final for final, _ in parts]), whole) < 1e-5
    assert relative(torch.cat([part for _, part in parts]), aux) < 1e-5
    assert aux.shape == (20, 3, 64) and cache.get_seq_length() == 20


class AddOne(torch.nn.Module):
    def forward(self, states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return states + 1


def test_boundary_ids_are_inputs_of_layers(folder: Path) -> None:
    """With an embedding of zero and layers that add one, the stream that enters layer k is k (TorchSpec issue 87)."""
    model = load_target(folder, torch.float32, "cpu")
    model.model.layers = torch.nn.ModuleList([AddOne() for _ in range(36)])
    model.model.config.num_hidden_layers = 36
    model.model.embed_tokens.weight.zero_()
    with tapped(model, [2, 18, 33, 36]) as taps:
        model.model(input_ids=torch.tensor([[5, 6]]))
    assert {boundary: state.unique().tolist() for boundary, state in taps.items()} == {2: [2.0], 18: [18.0], 33: [33.0], 36: [36.0]}


def test_a_target_without_a_weight_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"1 weights are missing.*layers\.3\.mlp\.up_proj.*rebuild stage target"):
        load_target(tmp_path, torch.float32, "cpu")


def test_an_empty_folder_and_unknown_names_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="cannot load the target"):
        load_target(tmp_path, torch.float32, "cpu")
    with pytest.raises(StageError, match="set engine: transformers"):
        open_engine(EngineSettings("vllm", "float32", "cpu", 1), folder, NO_EOS)
    with pytest.raises(StageError, match="choose one of float32"):
        open_engine(EngineSettings("transformers", "int4", "cpu", 1), folder, NO_EOS)
