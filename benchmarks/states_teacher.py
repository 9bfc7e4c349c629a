"""What fewer bits of final states cost the teacher: the target's distribution over the draft vocabulary, which the drafter learns.

`python benchmarks/states_teacher.py --run results/demo [--positions 8000]`, on a run with states in bfloat16. Each way of rounding is
compared with bfloat16 at positions that are drawn at random: the KL divergence from the teacher before to the one after, the acceptance
that a perfect drafter would lose (the total variation), and how often the first choice is another one. Bits are those of a number when
all states are packed row by row as stage hidden does, with zstd and plain planes. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.lib.eagle3.target import TargetWeights
from scripts.lib.states.encoded import compressed, decoded, planes, split_multiples
from scripts.lib.states.format import final_borders
from scripts.lib.states.reader import read_shard
from scripts.lib.states.rounding import FINENESS, dequantised, off_grid, on_grid, quantised
from scripts.lib.vocabulary.tables import read_vocabulary

FRACTION = 7  # bits of a bfloat16
TOGETHER = 1024  # positions
Way = Callable[[Tensor, Sequence[int]], tuple[Tensor, float]]  # states [F, H] and borders of rows: rounded states, and bytes of all of them


def main() -> None:
    """Measure, print a line for each way of rounding, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="results folder of a run")
    parser.add_argument("--positions", type=int, default=8000, help="at which teachers are compared")
    options = parser.parse_args()
    states, borders = all_final_states(options.run / "hidden")
    head = TargetWeights(options.run / "target").head()
    head = head[read_vocabulary(options.run / "vocab" / "manifest.json").target_ids].float()
    chosen = torch.randperm(len(states), generator=torch.Generator().manual_seed(0))[: options.positions]
    figures: dict[str, Mapping[str, float]] = {}
    for name, way in ways().items():
        rounded, size = way(states, borders)
        bits = round(8 * size / states.numel(), 2)
        figures[name] = {"bits": bits} | costs(states[chosen].float(), rounded[chosen].float(), head)
        print(name, figures[name])
    print(json.dumps({"states": len(states), "positions": len(chosen), "ways": figures}))


def ways() -> Mapping[str, Way]:
    """The ways of rounding by name; that of `hidden.stored: fp8` is the grid of fineness `FINENESS`."""
    fractions = {f"fraction of {bits} bits": fraction(bits) for bits in range(FRACTION, 2, -1)}
    grids = {f"grid, {fineness} steps to the root mean square": grid(fineness) for fineness in (18, 36, FINENESS, 144)}
    return {"e4m3, a scale per token": scaled} | fractions | grids


def scaled(states: Tensor, borders: Sequence[int]) -> tuple[Tensor, float]:
    """e4m3 with a float32 scale per token."""
    values, scales = quantised(states[:, None])
    return dequantised(values, scales)[:, 0], packed(values.view(torch.uint8), borders) + scales.nbytes


def fraction(bits: int) -> Way:
    """bfloat16 rounded to `bits` bits of fraction, signs and fractions packed without gaps."""

    def way(states: Tensor, borders: Sequence[int]) -> tuple[Tensor, float]:
        unit = 2 ** (FRACTION - bits)
        numbers = states.view(torch.int16)
        rounded = ((numbers.int() / unit).round() * unit).to(torch.int16).view(torch.bfloat16)
        return rounded, packed(planes(rounded)[0][:, None], borders) + states.numel() * (bits + 1) / 8

    return way


def grid(fineness: int) -> Way:
    """Multiples of a step of each state."""

    def way(states: Tensor, borders: Sequence[int]) -> tuple[Tensor, float]:
        multiples, steps = on_grid(states, fineness)
        upper, lowest = split_multiples(multiples)
        return off_grid(multiples, steps), packed(upper, borders) + lowest.nbytes + steps.nbytes

    return way


def packed(plane: Tensor, borders: Sequence[int]) -> int:
    """Bytes of `plane` u8 [F, L, H] once compressed."""
    return sum(part.nbytes for part in compressed(plane, borders).values())


def all_final_states(folder: Path) -> tuple[Tensor, list[int]]:
    """The final states bf16 [F, H] of all shards in `folder`, and the borders of their rows."""
    states, borders = [], [0]
    for path in sorted(folder.glob("*.safetensors")):
        shard = read_shard(path)
        borders += [borders[-1] + border for border in final_borders(shard.row_offsets, shard.final_index)[1:]]
        states.append(decoded(shard.final))
    return torch.cat(states), borders


def costs(before: Tensor, after: Tensor, head: Tensor) -> dict[str, float]:
    """What `after` f32 [N, H] instead of `before` costs the teacher with the draft rows `head` f32 [D, H]."""
    parts = []
    for start in range(0, len(before), TOGETHER):
        one, other = ((states[start : start + TOGETHER] @ head.T).log_softmax(-1) for states in (before, after))
        taught = one.exp()
        lost = 1 - torch.minimum(taught, other.exp()).sum(-1)
        parts.append(torch.stack([(taught * (one - other)).sum(-1), lost, (one.argmax(-1) != other.argmax(-1)).float()]))
    divergence, lost, changed = torch.cat(parts, 1).double()
    return {
        "kl": significant(divergence.mean()),
        "kl_p99": significant(divergence.quantile(0.99)),
        "lost": significant(lost.mean()),
        "lost_p99": significant(lost.quantile(0.99)),
        "top1_changed": significant(changed.mean()),
    }


def significant(value: Tensor) -> float:
    """`value` with three digits."""
    return float(f"{float(value):.3g}")


if __name__ == "__main__":
    main()
