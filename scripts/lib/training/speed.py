"""How fast training goes, for the log: trained tokens a second, and on a GPU the share of what it can compute."""

import time

import torch

from scripts.lib.ground.progress import Progress
from scripts.lib.training.flops import Work, model_flops
from scripts.lib.training.ranks import count, first
from scripts.lib.training.stepping import Stepper

# Dense bf16 matrix products a second that were reached on the GPU, by a part of its name.
PEAKS = {"H200": 790e12, "H100": 790e12}


class Speed:
    """Adds steps to a progress and says what they cost."""

    def __init__(self, progress: Progress, stepper: Stepper) -> None:
        self.progress, self.config = progress, stepper.weights.masters.config
        device = torch.device(stepper.recipe.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.gpu, self.peak = bool(name), next((peak for part, peak in PEAKS.items() if part in name), None)
        self.seconds, self.flops = time.monotonic(), 0.0
        self.steps: list[tuple[float, int]] = []  # when each was sent off, and its trained tokens

    def add(self, work: Work, note: str) -> None:
        """Count a step of `work`."""
        self.flops += model_flops(self.config, work)
        self.steps.append((time.monotonic(), work.counts[0]))
        if not first():
            return
        self.progress.add(work.counts[0], note=f"{note}{self.arithmetic()}")

    def late_rate(self) -> float | None:
        """Trained tokens a second over the last two fifths of the steps but the very last, when all is compiled; None for too few steps."""
        late = self.steps[len(self.steps) * 3 // 5 : -1]
        return sum(tokens for _, tokens in late[1:]) / (late[-1][0] - late[0][0]) if len(late) > 1 else None

    def arithmetic(self) -> str:
        """TFLOP/s since the start and, where known, their share of the peak; nothing on a CPU."""
        if not self.gpu:
            return ""
        rate = self.flops / (time.monotonic() - self.seconds)
        share = f", {rate / self.peak / count():.0%} of the peak" if self.peak else ""
        return f", {rate / 1e12:,.0f} TFLOP/s{share}"
