"""The training loop."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.lib.eagle3.model import Drafter
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.progress import Progress
from scripts.lib.training.batches import Batch, TrainingRow, collate, pack
from scripts.lib.training.checkpoints import State, restore, save_state
from scripts.lib.training.curves import eval_columns
from scripts.lib.training.evaluation import evaluate
from scripts.lib.training.loss import Teacher, unrolled_loss
from scripts.lib.training.schedule import PlannedStep, plan
from scripts.lib.training.settings import TrainSettings
from scripts.lib.training.unroll import unroll

BETAS = (0.9, 0.95)


class Trainer:
    """Trains one drafter; every step is a function of settings, rows and the weights before it."""

    def __init__(self, drafter: Drafter, teacher: Teacher, rows: tuple[TrainingRow, ...], settings: TrainSettings, device: str) -> None:
        self.drafter, self.settings, self.device, self.rows = drafter.to(device), settings, device, rows
        self.teacher = teacher.to(device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)
        self.steps = plan(rows, settings)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Arithmetic of matrix products; weights and the residual stream stay in float32."""
        if self.settings.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def step(self, planned: PlannedStep) -> dict[str, float]:
        """One optimizer step; its losses and the norm of its gradient. StageError when a value is not finite."""
        batch = collate([self.rows[index] for index in planned.rows], torch.float32, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = planned.learning_rate
        with self.precision():
            probabilities = self.teacher.probabilities(batch.final)
            unrolled = unroll(self.drafter, self.teacher.embedding, batch, planned.draft_steps)
            loss, means = unrolled_loss(unrolled, self.drafter, probabilities, self.settings.ttt_decay)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip)
        value, length = loss.item(), norm.item()
        if not torch.tensor([value, length]).isfinite().all():
            raise StageError(
                f"loss {value} and gradient norm {length} at learning rate {planned.learning_rate:g} on rows {list(batch.ids)}: "
                "not finite; look at these rows' states, or lower learning_rate"
            )
        self.optimizer.step()
        return {"loss": value, **{f"loss_{number}": mean for number, mean in enumerate(means)}, "gradient_norm": length}

    def evaluate(self, rows: tuple[TrainingRow, ...]) -> dict[str, Any]:
        """Figures on `rows`, in file order."""
        steps, decay = self.settings.ttt_steps, self.settings.ttt_decay
        with self.precision():
            return evaluate(self.drafter, self.teacher, self.eval_batches(rows), steps, decay)

    def eval_batches(self, rows: tuple[TrainingRow, ...]) -> Iterator[Batch]:
        """`rows` in batches of the size of a training step."""
        for indices in pack([len(row.slots) for row in rows], range(len(rows)), self.settings.batch_tokens):
            yield collate([rows[index] for index in indices], torch.float32, self.device)

    def run(self, heldout: tuple[TrainingRow, ...], folder: Path) -> State:
        """Train to the end from the last checkpoint in `folder`/partial, if there is one."""
        state = State(self.drafter, self.optimizer, 0, [])
        restore(folder / "partial", state)
        tokens = [sum(len(self.rows[index].slots) for index in planned.rows) for planned in self.steps]
        progress = Progress(folder, sum(tokens), "trained tokens", sum(tokens[: state.step]))
        for planned in self.steps[state.step :]:
            row = {
                "step": state.step + 1,
                "epoch": planned.epoch + 1,
                "learning_rate": planned.learning_rate,
                "draft_steps": planned.draft_steps,
            }
            row |= {"trained_tokens": tokens[state.step], **self.step(planned)}
            state.step += 1
            last = state.step == len(self.steps)
            if last or state.step % self.settings.eval_every == 0:
                row |= eval_columns(self.evaluate(heldout))
            state.curve.append(row)
            if not last and state.step % self.settings.checkpoint_every == 0:
                save_state(folder / "partial", state)
            progress.add(tokens[state.step - 1], note=note(state))
        return state


def note(state: State) -> str:
    """The latest loss and the latest held-out accept length, for the log."""
    evaluated = [row for row in state.curve if row.get("eval_accept_length")]
    accept = f", held-out accept length {evaluated[-1]['eval_accept_length']:.3f}" if evaluated else ""
    return f"epoch {state.curve[-1]['epoch']}, loss {state.curve[-1]['loss']:.3f}{accept}"
