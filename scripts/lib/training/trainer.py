"""The training loop, the same on every device: a `Stepper` computes, the loop plans, records, evaluates and saves."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scripts.lib.eagle3.export import save_drafter
from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.progress import Progress
from scripts.lib.training import ranks
from scripts.lib.training.batches import TrainingRow
from scripts.lib.training.checkpoints import State, restore, save_state
from scripts.lib.training.curves import eval_columns
from scripts.lib.training.evaluation import evaluate, spans_in_loops
from scripts.lib.training.events import Events
from scripts.lib.training.feed import Feed, own_batches
from scripts.lib.training.flops import Work, work_of
from scripts.lib.training.fp8_products import check_fp8
from scripts.lib.training.loss import Teacher
from scripts.lib.training.memory import Load, Sizes, check_room, estimate
from scripts.lib.training.optimizers import MUON
from scripts.lib.training.packed import Capacity
from scripts.lib.training.packing import size_of, spread
from scripts.lib.training.row_step import RowStep
from scripts.lib.training.schedule import PlannedStep, plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.speed import Speed
from scripts.lib.training.stepping import Recipe, StepFigures, Stepper

log = logging.getLogger(__name__)
GOAL = "eval_accept_length_all"


def new_stepper(drafter: Drafter, teacher: Teacher, recipe: Recipe, capacity: Capacity) -> Stepper:
    """What computes steps on the recipe's device, in batches of up to `capacity`. StageError where it has no products in 8 bits."""
    if recipe.fp8:
        check_fp8(drafter.config, recipe.device)
    if torch.device(recipe.device).type != "cuda" and not (recipe.shard or recipe.recompute):
        return RowStep(drafter, teacher, recipe)
    from scripts.lib.training.packed_step import PackedStep  # takes seconds to import, which a CPU need not wait for

    return PackedStep(drafter, teacher, recipe, capacity)


@dataclass(frozen=True)
class Sent:
    """A step whose figures have not been looked at yet, its slots of each draft step, its row of the curve, the ids of its rows."""

    figures: StepFigures
    counts: tuple[int, ...]
    row: dict[str, Any]
    ids: list[str]


class Trainer:
    """Trains one drafter; every step is a function of settings, rows and the weights before it."""

    def __init__(
        self,
        drafter: Drafter,
        teacher: Teacher,
        rows: tuple[Feed, tuple[TrainingRow, ...]],
        settings: TrainSettings,
        recipe: Recipe,
    ) -> None:
        """`rows` to train on, and held-out ones."""
        self.settings, (self.feed, self.heldout) = settings, rows
        self.steps = plan(self.feed.found, settings, ranks.count())
        limit = min(settings.micro_tokens, settings.batch_tokens)
        held = spread([size_of(row) for row in self.heldout], range(len(self.heldout)), limit)
        self.held = ranks.mine(held)
        self.loops = [spans_in_loops(row) for row in self.heldout]
        planned = [self.rows_of(batch) for step in self.steps for batch in step.batches if batch]
        self.capacity = Capacity.of(*planned, *([self.heldout[index] for index in indices] for indices in held))
        several = any(len(step.batches) > ranks.count() for step in self.steps)
        load = load_of(self.capacity, settings.ttt_steps, recipe, several)
        check_memory(drafter, load, recipe.device, settings.micro_tokens, max(len(row.slots) for row in self.feed.found.rows))
        self.stepper = new_stepper(drafter, teacher, recipe, self.capacity)

    def rows_of(self, indices: Sequence[int]) -> list[TrainingRow]:
        """The train rows `indices`, maybe without their states."""
        return [self.feed.found.rows[index] for index in indices]

    def step(self, planned: PlannedStep, batches: Iterator[Any], work: Work) -> StepFigures:
        """One optimizer step on the next of `batches`."""
        return self.stepper.train(islice(batches, len(own_batches(planned))), work.counts, planned.learning_rate)

    def evaluate(self) -> dict[str, Any]:
        """Figures on the held-out rows."""
        batches = self.stepper.load([[self.heldout[index] for index in indices] for indices in self.held])
        loops = [torch.cat([self.loops[index] for index in indices]) for indices in self.held]
        with self.stepper.weights.whole():
            return evaluate(self.stepper, zip(batches, loops, strict=True), self.settings.ttt_steps)

    def run(self, folder: Path) -> State:
        """Train to the end from the last checkpoint in `folder`/partial, if there is one.

        The figures of a step are looked at when the next one is under way, so that a GPU never waits for this loop.
        """
        state = self.resumed(folder)
        coming = self.steps[state.step :]
        batches = self.feed.load(self.stepper, coming)
        tokens = [sum(len(row.slots) for batch in step.batches for row in self.rows_of(batch)) for step in self.steps]
        events = Events(folder) if ranks.first() else None
        self.speed = Speed(Progress(folder, sum(tokens), "trained tokens", sum(tokens[: state.step])), self.stepper)
        sent: Sent | None = None
        for planned in coming:
            rows = self.feed.usable(planned)
            work = work_of(rows, planned.draft_steps)
            row = {"step": state.step + 1, "epoch": planned.epoch + 1, "learning_rate": planned.learning_rate}
            row |= {"draft_steps": planned.draft_steps, "trained_tokens": work.counts[0]}
            before, sent = sent, Sent(self.step(planned, batches, work), work.counts, row, [row.id for row in rows])
            settle(before)
            state.curve.append(row)
            state.step += 1
            stop = self.after_step(state, sent, folder)
            self.speed.add(work, note(state.curve))
            if events:
                events.write(state.curve)
            if stop:
                break
        return state

    def resumed(self, folder: Path) -> State:
        """Where the checkpoint stands, or the start."""
        state = State(self.stepper.weights, 0, [])
        restore(folder / "partial", state)
        return state

    def after_step(self, state: State, sent: Sent, folder: Path) -> bool:
        """Evaluate, keep the best, save a checkpoint where one is due; whether to stop here."""
        last = state.step == len(self.steps)
        evaluated = last or state.step % self.settings.eval_every == 0
        due = state.step % self.settings.checkpoint_every == 0
        if not (evaluated or due):
            return False
        settle(sent)
        if evaluated:
            sent.row.update(eval_columns(self.evaluate()))
            if self.settings.keep_best and state.curve[best_of(state.curve)] is sent.row:
                self.save(folder / "best")
        stop = last or (evaluated and self.plateau(state.curve))
        if due and not stop:
            save_state(folder / "partial", state)
        return stop

    def save(self, folder: Path) -> None:
        """Let the first rank write the drafter as it is to `folder`."""
        drafter = self.stepper.weights.exported()
        if ranks.first():
            folder.mkdir(exist_ok=True)
            save_drafter(drafter, folder)

    def plateau(self, curve: Sequence[dict[str, Any]]) -> bool:
        """Whether none of the last `patience` evaluations was better than the best one before them; 0 never stops."""
        evaluated = [row[GOAL] for row in curve if GOAL in row]
        patience = self.settings.patience
        stop = 0 < patience < len(evaluated) and max(evaluated[-patience:]) <= max(evaluated[:-patience])
        if stop:
            log.info("step %d: no better accept length in %d evaluations, stop", len(curve), patience)
        return stop


def load_of(capacity: Capacity, steps: int, recipe: Recipe, several: bool) -> Load:
    """What a batch of `capacity` asks of a GPU; `several`: a rank has more than one in some step."""
    shards = ranks.count() if recipe.shard else 1
    ways = (recipe.recompute, shards, recipe.optimizer == MUON, recipe.fp8, several)
    return Load(capacity.slots, capacity.positions, steps, recipe.dtype.itemsize, *ways)


def check_memory(drafter: Drafter, load: Load, device: str, micro_tokens: int, longest: int) -> None:
    """Log what training will take; StageError when the GPU has less. `longest`: the most slots of a row."""
    config = drafter.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    vocabularies = (config.vocab_size, config.draft_vocab_size)
    sizes = Sizes(config.hidden_size, config.intermediate_size, *heads, *vocabularies, config.num_hidden_layers)
    log.info("memory, estimated: %s", estimate(sizes, load))
    if torch.device(device).type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        check_room(sizes, load, room, micro_tokens, longest)


def settle(sent: Sent | None) -> None:
    """Write the figures of a step into its row of the curve, once. StageError when one is not finite."""
    if sent is None or "loss" in sent.row:
        return
    loss, *means, norm = torch.cat([sent.figures.loss[None], sent.figures.means, sent.figures.norm[None]]).tolist()
    if not torch.tensor([loss, norm]).isfinite().all():
        raise StageError(
            f"loss {loss} and gradient norm {norm} at learning rate {sent.row['learning_rate']:g} on rows {sent.ids}: "
            "not finite; look at these rows' states, or lower learning_rate"
        )
    trained = [(number, mean) for number, (mean, count) in enumerate(zip(means, sent.counts, strict=True)) if count]
    sent.row.update({"loss": loss, **{f"loss_{number}": mean for number, mean in trained}, "gradient_norm": norm})


def best_of(curve: Sequence[dict[str, Any]]) -> int:
    """The place in `curve` of the best evaluation, the first of equals."""
    return max((place for place, row in enumerate(curve) if GOAL in row), key=lambda place: (curve[place][GOAL], -place))


def note(curve: Sequence[dict[str, Any]]) -> str:
    """The latest loss that was looked at and the latest held-out accept length, for the log."""
    seen = next((row for row in reversed(curve[-2:]) if "loss" in row), None)
    evaluated = next((row for row in reversed(curve) if row.get("eval_accept_length")), None)
    accept = f", held-out accept length {evaluated['eval_accept_length']:.3f}" if evaluated else ""
    return f"epoch {seen['epoch']}, loss {seen['loss']:.3f}{accept}" if seen else ""
