"""A drafter walked in process: a slip by one layer shows, whatever its config says, and so does a drafter that does nothing."""

import json

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.command import Case, examine
from scripts.lib.doctor.loading import load_any
from scripts.lib.doctor.walking import Text, chain_accepted, deviations, judged, questions, rows_of, walk_findings, walks
from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.export import load_drafter
from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.speculation.decoding import decode_chain, decode_plain
from scripts.lib.speculation.limits import Limits
from scripts.lib.speculation.target import CachedTarget
from tests.broken_drafters import Run, copied, edit_config, edit_weights, tiny_run
from tests.scripted_drafter import ScriptedDrafter, random_drafter
from tests.tiny import tiny_config

PROMPT = [1, 50, 60, 70, 80, 90]


class Listener(Drafter):
    """Knows one text by heart, and writes it only where it gets the target's states `known` [T, 3, H] of that text."""

    def __init__(self, model: PreTrainedModel, text: list[int], known: Tensor) -> None:
        scripted = ScriptedDrafter(model, text)
        super().__init__(scripted.config, scripted.d2t, scripted.t2d)
        self.eval().requires_grad_(False)
        self.script, self.known = scripted.script, known

    def fuse(self, aux: Tensor) -> Tensor:
        return aux.flatten(1)

    def decode(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """The position [T, 1] whose text comes next; -1 where the states are not the known ones."""
        cache.layers[0].append(torch.zeros(len(hidden), 1, 1), torch.zeros(len(hidden), 1, 1))
        fed_back = hidden.shape[1] == 1
        right = hidden[:, 0] >= 0 if fed_back else (hidden - self.known.flatten(1)[positions]).abs().amax(1) < 1e-4
        return torch.where(right, positions, -1)[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        scores = torch.zeros(len(hidden), self.config.draft_vocab_size)
        for row, place in enumerate(hidden[:, 0].long().tolist()):
            scores[row, self.script[place + 2] if 0 <= place < len(self.script) - 2 else -1] = 1.0
        return scores


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(tiny_config()).eval().requires_grad_(False)
    for parameter in tiny.parameters():
        parameter.mul_(4.0)
    return tiny


@pytest.fixture(scope="module")
def answer(model) -> list[int]:
    return list(decode_plain(model, PROMPT, Limits(frozenset(), 40)).output_ids)


def listener(model, answer, shift: int) -> Listener:
    """A drafter that was trained on layers `shift` above those that it names."""
    boundaries = [boundary + shift for boundary in (2, 4, 5)]
    return Listener(model, [*PROMPT, *answer], CachedTarget(model, 64).final_and_aux([*PROMPT, *answer], boundaries)[1])


def test_layers_as_trained_have_no_finding_and_accept_every_draft(model, answer):
    named, *shifted = walks(model, listener(model, answer, 0), [(PROMPT, answer)])
    assert named.accept_length == pytest.approx(1 + 29 / 10)  # 39 tokens after the first: nine full cycles, and the last writes three
    assert len(named.chances) == 39
    assert all(walk.accept_length == 1.0 and deviations(walk.chances, named.chances) < -3 for walk in shifted)
    assert judged(named, shifted) == []


@pytest.mark.parametrize("shift", [1, -1])
def test_a_slip_by_one_layer_is_named_with_the_layers_that_work(model, answer, shift):
    named, *shifted = walks(model, listener(model, answer, shift), [(PROMPT, answer)])
    (found,) = judged(named, shifted)
    assert found.name == "layers_shifted"
    assert f"the states before layers {[2 + shift, 4 + shift, 5 + shift]} accept length 3.90" in found.evidence
    assert "before layers [2, 4, 5] accept length 1.00" in found.evidence


def test_a_drafter_that_knows_nothing_is_no_slip_however_sure_its_preference(model, answer, monkeypatch):
    monkeypatch.setattr("scripts.lib.doctor.walking.SURE", -100.0)
    named, *shifted = walks(model, random_drafter(model), [(PROMPT, answer)])
    assert [finding.name for finding in judged(named, shifted)] == ["accept_near_one"]


def test_the_walk_accepts_what_chain_decoding_accepts(model, answer):
    tokens, wrong = [*PROMPT, *answer], frozenset({9, 20, 21, 33})
    decoded = decode_chain(model, ScriptedDrafter(model, tokens, wrong), 3, PROMPT, Limits(frozenset(), 40))
    assert list(decoded.output_ids) == answer
    _, aux = CachedTarget(model, 64).final_and_aux(tokens, (2, 4, 5))
    walked = chain_accepted(ScriptedDrafter(model, tokens, wrong), model.get_input_embeddings(), Text(tuple(tokens), len(PROMPT), aux))
    assert walked == list(decoded.accepted)
    assert len(set(walked)) > 1


def test_nothing_to_walk_is_no_finding(model):
    named, *shifted = walks(model, ScriptedDrafter(model, [1, 2]), [(PROMPT, [3])])
    assert judged(named, shifted) == []


def test_token_rows_are_walked_along_their_own_answers(tmp_path):
    spans = [[{"start": 3, "end": 9}, {"start": 12, "end": 15}], [], [{"start": 1, "end": 90}]]
    pl.DataFrame({"input_ids": [list(range(15)), [1], list(range(90))], "loss_spans": spans}).write_parquet(tmp_path / "rows.parquet")
    first, long = rows_of(tmp_path / "rows.parquet")
    assert first == ([0, 1, 2], [3, 4, 5, 6, 7, 8])
    assert (len(long[0]), len(long[1])) == (1, 64)
    with pytest.raises(StageError, match=r"other.parquet: not readable as token rows"):
        rows_of(tmp_path / "other.parquet")


def test_deviations_are_paired_and_leave_out_what_is_not_drafted():
    base = torch.tensor([-9.0, -1.0, -5.0, -3.0])
    assert deviations(base, base) == 0.0
    assert deviations(base + torch.tensor([0.9, 1.1, 1.0, 1.0]), base) == pytest.approx(1.0 / (0.0816497 / 2), rel=1e-4)
    assert deviations(base + 1, base) == float("inf")
    assert deviations(base.index_fill(0, torch.tensor([0]), float("nan")) - 1, base) == float("-inf")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("scripts.lib.doctor.walking.CANARY_TOKENS", 8)
    monkeypatch.setattr("scripts.lib.doctor.walking.QUESTIONS", ("Why is the sky blue?",))


def test_an_untrained_drafter_is_named_without_a_server(run, short):
    (found,) = walk_findings(run.target, run.drafter, questions(ChatTemplate.load(run.target)), "cpu")
    assert (found.name, found.fatal) == ("accept_near_one", True)
    assert "without any server" in found.evidence


def test_a_drafter_of_another_trainer_computes_the_same(run, tmp_path):
    foreign = copied(run, tmp_path)
    config = json.loads((foreign.drafter / "config.json").read_text())
    for name in ("head_dim", "rope_parameters", "eos_token_id"):
        config.pop(name)
    (foreign.drafter / "config.json").write_text(json.dumps(config))
    edit_weights(foreign.drafter, lambda t: {f"model.{name.replace('midlayer', 'layers.0')}": x for name, x in t.items() if name != "t2d"})
    ours = load_drafter(run.drafter, torch.float32, "cpu")
    theirs = load_any(foreign.drafter, run.target, torch.float32, "cpu")
    assert ours.config.boundaries == theirs.config.boundaries
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    embeds, hidden = torch.randn(5, 64), torch.randn(5, 3, 64)
    states = [one.decode(embeds, one.fuse(hidden), torch.arange(5), DraftCache()) for one in (ours, theirs)]
    assert torch.equal(*states)
    edit_config(foreign.drafter, norm_before_fc=True)
    with pytest.raises(StageError, match="cannot be walked here, as it uses norm_before_fc"):
        load_any(foreign.drafter, run.target, torch.float32, "cpu")


def test_the_command_walks_only_what_the_files_do_not_rule_out(run, short):
    case = Case(run.target, run.drafter, "EAGLE3", run.flags, device="cpu")
    assert [finding.name for finding in examine(case)] == ["accept_near_one"]
    edit_config(run.drafter, tie_word_embeddings=True)
    assert [finding.name for finding in examine(case)] == ["head_tied"]
