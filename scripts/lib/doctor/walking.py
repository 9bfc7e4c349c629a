"""Whether a drafter follows its target at all, and at which layers: chains walked in this process, before a server starts.

A shift of every layer by one raises no error anywhere and costs from a tenth of a token to everything. It shows where the drafter
guesses better at shifted layers than at those that it names.
Shapes: T tokens of a prompt and its answer, N of the answer behind its first, B boundaries, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import copysign, inf, nan, sqrt
from pathlib import Path
from statistics import mean

import polars as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.findings import IDLE_ACCEPT_LENGTH, Finding
from scripts.lib.doctor.loading import load_any
from scripts.lib.doctor.repairs import finding
from scripts.lib.doctor.served import CANARY_TOKENS
from scripts.lib.eagle3.cache import DraftCache
from scripts.lib.eagle3.model import Drafter
from scripts.lib.engines.protocol import Request
from scripts.lib.engines.transformers_engine import TransformersEngine, load_target
from scripts.lib.ground.errors import StageError
from scripts.lib.speculation.decoding import matches
from scripts.lib.speculation.drafts import DraftChain
from scripts.lib.speculation.target import CachedTarget

STEPS = 3
ROWS, ROW_TOKENS = 16, 64
SURE = 3.0  # standard errors
QUESTIONS = (
    "Why is the sky blue in the daytime and red in the evening?",
    "Write a Python function that returns the words of a text in reverse order.",
    "A shop sells 3 pens for 2 dollars. What do 12 pens cost? Show every step.",
    "Name three rivers of Europe, and for each a city that lies on it.",
    "Tell a short story about a lighthouse keeper who is afraid of the sea.",
    "What is the difference between a virus and a bacterium?",
)

Row = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and of the target's answer to it


@dataclass(frozen=True)
class Text:
    """A prompt of `start` tokens and the target's answer, together `tokens`, with the target's states `aux` [T, 3, H]."""

    tokens: tuple[int, ...]
    start: int
    aux: Tensor


@dataclass(frozen=True)
class Walk:
    """A drafter over the target's own answers, with the states before the layers `boundaries`."""

    boundaries: tuple[int, ...]
    drafter: Drafter
    embedding: nn.Module
    texts: Sequence[Text]

    @cached_property
    def chances(self) -> Tensor:
        """`first_chances` of all texts end to end."""
        return torch.cat([first_chances(self.drafter, self.embedding, text) for text in self.texts])

    @cached_property
    def accept_length(self) -> float:
        """Tokens a verify step, with chains of three."""
        return 1 + mean(count for text in self.texts for count in chain_accepted(self.drafter, self.embedding, text))

    def told(self) -> str:
        """Its figures in words."""
        chance = self.chances.nanmean().item()
        return (
            f"with the states before layers {list(self.boundaries)} accept length {self.accept_length:.2f}, {chance:.2f} nats a first draft"
        )


def questions(template: ChatTemplate) -> list[list[int]]:
    """Prompts for a canary, as ids: nobody needs a data set to see whether a drafter works."""
    return [template.prompt_ids([Message("user", question)]) for question in QUESTIONS]


def rows_of(path: Path) -> list[Row]:
    """Prompts and first answers of the first token rows in the Parquet file at `path`. StageError when it holds none."""
    try:
        table = pl.read_parquet(path, columns=["input_ids", "loss_spans"], n_rows=ROWS)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StageError(f"{path}: not readable as token rows ({error}); give a Parquet file of stage encode or merge") from error
    spans = [(row["input_ids"], row["loss_spans"][0]) for row in table.iter_rows(named=True) if row["loss_spans"]]
    return [(ids[: span["start"]], ids[span["start"] : min(span["end"], span["start"] + ROW_TOKENS)]) for ids, span in spans]


def walk_findings(target: Path, drafter: Path, prompts: Sequence[Sequence[int]] | Path, device: str) -> list[Finding]:
    """Walk the target's answers in this process with the drafter's layers and with slips by one.

    The target answers `prompts`; with the path of token rows, their own answers are walked. Rows like those of the training tell the
    most: a drafter that knows a kind of text little guesses it little worse at other layers. In bfloat16 on a GPU, as it serves, and in
    float32 on a CPU. Only for a drafter without other fatal findings: StageError when it or the target cannot be loaded.
    """
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    network, model = load_any(drafter, target, dtype, device), load_target(target, dtype, device)
    rows = rows_of(prompts) if isinstance(prompts, Path) else answered(model, target, prompts)
    named, *shifted = walks(model, network, rows)
    return judged(named, shifted)


def answered(model: PreTrainedModel, target: Path, prompts: Sequence[Sequence[int]]) -> list[Row]:
    """`prompts` with the answers of `model`, greedy and short."""
    engine = TransformersEngine(model, ChatTemplate.load(target).eos_ids)
    answers = engine.generate([Request(str(place), tuple(prompt), CANARY_TOKENS) for place, prompt in enumerate(prompts)])
    said = {answer.key: answer.output_ids for answer in answers}
    return [(prompt, said[str(place)]) for place, prompt in enumerate(prompts)]


@torch.inference_mode()
def walks(model: PreTrainedModel, drafter: Drafter, rows: Sequence[Row]) -> list[Walk]:
    """Walks over `rows` at the boundaries that the drafter names, then at each slip by one that the target has layers for."""
    layers, embedding = model.config.get_text_config().num_hidden_layers, model.get_input_embeddings()
    candidates = [named := drafter.config.boundaries, *(shifted for shifted in slips(named) if 0 < shifted[0] <= shifted[-1] < layers)]
    captured = sorted({boundary for boundaries in candidates for boundary in boundaries})
    whole = [((*prompt, *answer), len(prompt)) for prompt, answer in rows if len(answer) > 1]
    states = [CachedTarget(model, len(tokens)).final_and_aux(tokens, captured)[1] for tokens, _ in whole]
    found = []
    for boundaries in candidates:
        places = [captured.index(boundary) for boundary in boundaries]
        texts = [Text(tokens, start, aux[:, places]) for (tokens, start), aux in zip(whole, states, strict=True)]
        found.append(Walk(boundaries, drafter, embedding, texts))
    return found


def slips(boundaries: Sequence[int]) -> list[tuple[int, ...]]:
    """`boundaries` with all of them, or one alone, a layer above or below, where they still ascend."""
    count = len(boundaries)
    moved = [range(count), *((place,) for place in range(count))]
    found = [tuple(b + step * (place in places) for place, b in enumerate(boundaries)) for step in (1, -1) for places in moved]
    return [shifted for shifted in found if sorted(set(shifted)) == list(shifted)]


@torch.inference_mode()
def judged(named: Walk, shifted: Sequence[Walk]) -> list[Finding]:
    """What the walk at the layers that the drafter names says, beside those at `shifted` ones."""
    if not named.texts:
        return []
    surplus, best = max(
        ((deviations(walk.chances, named.chances), walk) for walk in shifted), key=lambda pair: pair[0], default=(0.0, named)
    )
    # A drafter that knows nothing has its preferences among layers too: what works better must work.
    if surplus > SURE and best.accept_length > max(named.accept_length, IDLE_ACCEPT_LENGTH):
        return [finding("layers_shifted", f"{best.told()}; {named.told()}, which it names: {surplus:.1f} standard errors")]
    if named.accept_length < IDLE_ACCEPT_LENGTH:
        return [finding("accept_near_one", f"without any server {named.told()}")]
    return []


def deviations(one: Tensor, other: Tensor) -> float:
    """By how many standard errors the mean of `one` lies above that of `other`, f32[N] over the same tokens; NaN entries do not count."""
    gains = (one - other).double()
    gains = gains[~gains.isnan()]
    if len(gains) < 2 or not gains.any():
        return 0.0
    error = gains.std().item() / sqrt(len(gains))
    return gains.mean().item() / error if error else copysign(inf, gains.mean().item())


def chain_accepted(drafter: Drafter, embedding: nn.Module, text: Text) -> list[int]:
    """Accepted drafts of each cycle when the answer of `text` is written in chains of three, from its second token on."""
    place, chain = text.start, DraftChain(drafter, embedding, STEPS)
    chain.extend(text.aux[:place], text.tokens[1 : place + 1])
    accepted = []
    while place < len(text.tokens) - 1:
        written = min(matches(chain.propose(), text.tokens[place + 1 :]) + 1, len(text.tokens) - 1 - place)
        accepted.append(written - 1)
        chain.extend(text.aux[place : place + written], text.tokens[place + 1 : place + 1 + written])
        place += written
    return accepted


def first_chances(drafter: Drafter, embedding: nn.Module, text: Text) -> Tensor:
    """Log-probability, f32[N], that the drafter's first draft is each token of the answer, from the second on; NaN where it lacks it.

    It tells layers apart where the accepted drafts of so few tokens would not.
    """
    tokens = torch.tensor(text.tokens, device=text.aux.device)
    places = torch.arange(len(tokens) - 2, device=tokens.device)
    states = drafter.decode(embedding(tokens[1:-1]), drafter.fuse(text.aux[:-2]), places, DraftCache())
    scores = drafter.logits(states[text.start - 1 :]).float().log_softmax(-1)
    draft_ids = tokens.new_full((drafter.config.vocab_size,), -1)
    draft_ids[drafter.target_ids] = torch.arange(len(drafter.target_ids), device=tokens.device)
    goals = draft_ids[tokens[text.start + 1 :]]
    return scores.gather(1, goals.clamp(min=0)[:, None])[:, 0].masked_fill(goals < 0, nan).cpu()
