import pytest
import torch
from torch import nn

from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.engines.transformers_engine import forward_states, load_target
from scripts.lib.speculation.decoding import PlainRun, decode_chain, decode_plain, matches
from scripts.lib.speculation.figures import accept_length, histogram, tokens_per_second
from scripts.lib.speculation.limits import Limits
from scripts.lib.speculation.lossless import compare
from scripts.lib.speculation.verdict import first_difference, noise
from tests.scripted_drafter import BOUNDARIES, ScriptedDrafter, random_drafter
from tests.tiny import save_tiny_target

PROMPT = [1, 40, 41, 90, 7, 200]
NO_EOS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_target(save_tiny_target(tmp_path_factory.mktemp("tiny")), torch.float32, "cpu")


def uncached(model, prompt, count):
    """Greedy tokens by whole forward passes of transformers, without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_plain_decoding_writes_what_the_model_writes_without_a_cache(model):
    assert decode_plain(model, PROMPT, Limits(NO_EOS, 24)).output_ids == uncached(model, PROMPT, 24)


def test_an_oracle_reaches_the_ceiling_exactly(model):
    sequence = [*PROMPT, *uncached(model, PROMPT, 40)]
    for steps in (1, 2, 4):
        limits = Limits(NO_EOS, 1 + 5 * (steps + 1))
        run = decode_chain(model, ScriptedDrafter(model, sequence), steps, PROMPT, limits)
        assert run.output_ids == tuple(sequence[len(PROMPT) :][: limits.max_tokens])
        assert run.accepted == (steps,) * 5
        assert accept_length(run.accepted) == steps + 1


def test_an_untrained_drafter_gains_next_to_nothing(model):
    accepted = []
    for first in range(3, 15):
        accepted += decode_chain(model, random_drafter(model, seed=first), 4, [1, first, first + 60], Limits(NO_EOS, 16)).accepted
    assert len(accepted) > 100
    assert accept_length(accepted) < 1.1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompt", [PROMPT, [5]])
def test_random_drafters_change_nothing(model, seed, prompt):
    limits = Limits(NO_EOS, 20)
    plain = decode_plain(model, prompt, limits)
    chain = decode_chain(model, random_drafter(model, seed), 1 + seed, prompt, limits)
    assert chain.output_ids == plain.output_ids == uncached(model, prompt, 20)


@pytest.mark.parametrize(("prompt", "layers"), [(PROMPT, 1), ([5], 1), (PROMPT, 2)])
def test_partly_accepted_chains_change_nothing_and_leave_true_features_behind(model, prompt, layers):
    """Every cycle length from none to all accepted; afterwards the drafter's cache is that of one pass over the whole text."""
    sequence = [*prompt, *uncached(model, prompt, 48)]
    drafter = ScriptedDrafter(model, sequence, wrong=frozenset({9, 12, 13, 17, 24, 25, 26, 33}), layers=layers)
    run = decode_chain(model, drafter, 3, prompt, Limits(NO_EOS, 40))
    assert run.output_ids == tuple(sequence[len(prompt) : len(prompt) + 40])
    assert set(run.accepted) == {0, 1, 2, 3}
    left = drafter.seen
    tokens = [*prompt, *run.output_ids]
    _, aux = forward_states(model, torch.tensor([tokens[:-1]]), None, BOUNDARIES)
    whole = DraftCache()
    embeds = model.get_input_embeddings()(torch.tensor(tokens[1:]))
    drafter.decode(embeds, drafter.fuse(aux), torch.arange(len(embeds)), whole)
    assert left.length == whole.length == len(tokens) - 1
    assert left.layers.keys() == whole.layers.keys() == set(range(layers))
    for number in range(layers):
        found, wanted = (cache.layers[number].keys[: left.length] for cache in (left, whole))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_drafts_after_an_end_token_are_neither_written_nor_counted(model):
    """The target ends inside accepted drafts: what follows is not output (vllm-project/vllm issue 56101)."""
    free = uncached(model, PROMPT, 40)
    end = next(place for place in range(6, 40) if place % 5 in (2, 3) and free[place] not in free[:place])
    run = decode_chain(model, ScriptedDrafter(model, [*PROMPT, *free]), 4, PROMPT, Limits(frozenset({free[end]}), 40))
    assert run.output_ids == free[: end + 1]
    assert 1 + sum(accepted + 1 for accepted in run.accepted) == len(run.output_ids)
    assert run.accepted[-1] == (end - 1) % 5 < 4


def test_a_step_that_ends_gives_three_tokens_not_six():
    limits = Limits(frozenset({2}), 100)
    assert limits.cut([11, 12, 2, 14, 15, 16], written=1) == [11, 12, 2]


def test_accept_length_counts_the_bonus_and_not_the_prefill():
    """Steps that accept 2, 0 and 3 of 3 drafts give 8 tokens in 3 steps, one more than without bonus tokens."""
    assert accept_length([2, 0, 3]) == pytest.approx(8 / 3)
    assert histogram([2, 0, 3], 3) == [1, 0, 1, 1]
    assert accept_length([]) is None


def test_speed_counts_tokens_not_steps():
    """Eight tokens in one second are eight a second, in however few events they come (sgl-project/sglang pull 22063)."""
    events = [3, 1, 4]
    assert tokens_per_second(sum(events) + 1, 1, 1.0) == 8
    assert tokens_per_second(2, 2, 0.0) is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7])
def test_max_tokens_is_kept_to_the_token(model, max_tokens):
    free = uncached(model, PROMPT, 12)
    limits = Limits(NO_EOS, max_tokens)
    run = decode_chain(model, ScriptedDrafter(model, [*PROMPT, *free]), 4, PROMPT, limits)
    assert run.output_ids == decode_plain(model, PROMPT, limits).output_ids == free[:max_tokens]
    assert len(run.accepted) == (max_tokens + 3) // 5
    assert 1 + sum(accepted + 1 for accepted in run.accepted) == max_tokens


def test_an_end_token_from_the_prefill_ends_both(model):
    first = uncached(model, PROMPT, 1)[0]
    limits = Limits(frozenset({first}), 10)
    assert decode_plain(model, PROMPT, limits).output_ids == (first,)
    run = decode_chain(model, random_drafter(model), 4, PROMPT, limits)
    assert (run.output_ids, run.accepted) == ((first,), ())


def test_matches_stops_at_the_first_wrong_draft():
    assert matches([5, 6, 7], [5, 6, 9, 1]) == 2
    assert matches([5, 6, 7], [4, 6, 7, 1]) == 0
    assert matches([5, 6, 7], [5, 6, 7, 1]) == 3


def plain_run(ids, logits):
    return PlainRun(tuple(ids), 0.0, 0.0, tuple(logits))


def logits_with(dtype, best, second):
    logits = torch.zeros(12, dtype=dtype)
    logits[9], logits[8] = best, second
    return [logits] * 4


@pytest.mark.parametrize(
    ("dtype", "best", "second", "kind"),
    [
        (torch.float32, 20.0, 19.99, "different"),
        (torch.float32, 20.0, 19.9995, "near_tie"),
        (torch.bfloat16, 20.0, 20.0, "near_tie"),
        (torch.bfloat16, 20.0, 19.5, "near_tie"),
        (torch.bfloat16, 20.0, 19.0, "different"),
        (torch.bfloat16, 5.0, 4.5, "different"),
    ],
)
def test_a_difference_is_forgiven_only_within_the_noise(dtype, best, second, kind):
    """The baseline writes 5 9 9 2, speculation 5 9 8 7 7 2: first difference at index 2 (vllm-project/vllm issue 7627)."""
    verdict = compare(plain_run([5, 9, 9, 2], logits_with(dtype, best, second)), [5, 9, 8, 7, 7, 2], nn.Identity())
    assert (verdict.kind, verdict.first_difference) == (kind, 2)
    assert verdict.gap == pytest.approx(best - second, abs=1e-4)


def test_a_third_token_is_no_tie_however_close_the_two_best_are():
    logits = torch.zeros(12)
    logits[9], logits[8], logits[3] = 20.0, 20.0, 10.0
    assert compare(plain_run([9], [logits]), [3], nn.Identity()).kind == "different"


def test_an_answer_that_goes_on_or_stops_early_differs():
    run = plain_run([5, 9], logits_with(torch.float32, 20.0, 20.0)[:2])
    assert compare(run, [5, 9], nn.Identity()).kind == "identical"
    assert compare(run, [5, 9, 9], nn.Identity()).first_difference == 2
    assert compare(run, [5], nn.Identity()).kind == "different"
    assert first_difference([1, 2], [1, 2]) is None


def test_noise_grows_with_the_logit_in_half_precision_alone():
    assert noise("bfloat16", 20.0) == 0.5
    assert noise("bfloat16", 40.0) == 1.0
    assert noise("float16", 20.0) == 0.0625
    assert noise("float32", 40.0) == noise("float32", 1.0)
