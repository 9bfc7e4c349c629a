"""A target with random weights and the sizes of a known one, for measurements of speed: no gated model is needed for them.

`python -m benchmarks.random_target --shape llama-8b --like results/demo/target --output /tmp/llama-8b [--device cuda]`. The tokenizer and
its template are those of `--like`, whose ids the larger vocabulary contains.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.train_rows import SHAPES


def main() -> None:
    """Build it and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--like", type=Path, required=True, help="folder in HF layout with the tokenizer")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="where the weights are drawn")
    options = parser.parse_args()
    config = SHAPES[options.shape].target()
    like = json.loads((options.like / "config.json").read_text())
    config.update({name: like[name] for name in ("bos_token_id", "eos_token_id")})
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.output)
    AutoTokenizer.from_pretrained(options.like).save_pretrained(options.output)
    print(json.dumps({"shape": options.shape, "parameters": model.num_parameters()}))


if __name__ == "__main__":
    main()
