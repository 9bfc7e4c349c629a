"""Does speculation change the answer? It may only where the target itself cannot tell two tokens apart.

Shapes: H hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import nn

from scripts.lib.speculation.decoding import PlainRun
from scripts.lib.speculation.verdict import Verdict, first_difference, judged, noise


@torch.inference_mode()
def compare(plain: PlainRun, other_ids: Sequence[int], head: nn.Module) -> Verdict:
    """Judge `other_ids` by the plain run; `head` maps its states [H] to logits [V], in the shape that chose its tokens."""
    index = first_difference(plain.output_ids, other_ids)
    if index is None:
        return Verdict("identical")
    if index >= min(len(plain.output_ids), len(other_ids)):
        return Verdict("different", index)
    logits = head(plain.states[index][None])[0]
    best = logits[plain.output_ids[index]].item()
    return judged(index, best - logits[other_ids[index]].item(), noise(str(logits.dtype).removeprefix("torch."), best))
