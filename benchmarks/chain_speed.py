"""Speed of plain and of chain decoding of a target at batch 1. The last line is JSON.

    python -m benchmarks.chain_speed TARGET [--drafter FOLDER] [--dtype float32] [--threads 2] [--draft-steps 4] [--tokens 48]

Without a drafter an untrained one with 8,192 draft tokens takes its place: it accepts nothing, so that its speed shows the whole cost of
drafting and verifying, and break-even accept length = plain speed / its speed.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from scripts.lib.chat.messages import Message
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.eagle3.export import load_drafter
from scripts.lib.eagle3.layers import default_boundaries
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.engines.transformers_engine import load_target
from scripts.lib.speculation.decoding import decode_chain, decode_plain
from scripts.lib.speculation.figures import accept_length, tokens_per_second
from scripts.lib.speculation.limits import Limits

QUESTIONS = (
    "Write a Python function that reverses a string.",
    "Explain in simple words why the sky is blue.",
    "Tom has 12 apples and gives away a third of them. How many are left?",
    "Write the beginning of a story about a lighthouse.",
)
DRAFT_TOKENS = 8192


def untrained_drafter(model: PreTrainedModel) -> Drafter:
    """Random weights; the first DRAFT_TOKENS ids are its vocabulary."""
    torch.manual_seed(0)
    size = min(DRAFT_TOKENS, model.config.vocab_size)
    config = DrafterConfig.from_target(model.config, size, tuple(default_boundaries(model.config.num_hidden_layers)))
    drafter = Drafter(config, torch.zeros(size, dtype=torch.int64), torch.arange(model.config.vocab_size) < size)
    return drafter.to(model.dtype).eval().requires_grad_(False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_target(arguments.target, getattr(torch, arguments.dtype), "cpu")
    template = ChatTemplate.load(arguments.target)
    drafter = load_drafter(arguments.drafter, model.dtype, "cpu") if arguments.drafter else untrained_drafter(model)
    limits = Limits(frozenset(), arguments.tokens)
    prompts = [template.prompt_ids([Message("user", question)]) for question in QUESTIONS]
    decode_plain(model, prompts[0], limits)
    decode_chain(model, drafter, arguments.draft_steps, prompts[0], limits)
    pairs = [(decode_plain(model, ids, limits), decode_chain(model, drafter, arguments.draft_steps, ids, limits)) for ids in prompts]
    tokens, requests = len(pairs) * arguments.tokens, len(pairs)
    plain = tokens_per_second(tokens, requests, sum(plain.decode_seconds for plain, _ in pairs)) or 0.0
    chain = tokens_per_second(tokens, requests, sum(chain.decode_seconds for _, chain in pairs)) or 0.0
    steps = [drafts for _, run in pairs for drafts in run.accepted]
    tau = accept_length(steps) or 0.0
    figures = {
        "plain_tok_s": plain,
        "chain_tok_s": chain,
        "speedup": chain / plain,
        "accept_length": tau,
        "break_even_accept_length": tau * plain / chain,
        "plain_step_ms": 1000 / plain,
        "cycle_ms": 1000 * sum(run.decode_seconds for _, run in pairs) / len(steps),
        "identical": sum(plain.output_ids == run.output_ids for plain, run in pairs),
        "prompts": requests,
    }
    print(json.dumps({"dtype": arguments.dtype, "threads": arguments.threads, "draft_steps": arguments.draft_steps, **figures}))


if __name__ == "__main__":
    main()
