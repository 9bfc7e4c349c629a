"""Loads a drafter as an SGLang worker does, without a server, and writes what then lies in the model's parameters.

Run by SGLang's own interpreter: TARGET and DRAFTER folders, OUTPUT for a safetensors file. Parameters hold NaN until the loader fills
them; `hot_token_id`, the target id of each draft id, stands beside them.
"""

import sys

import boot  # noqa: F401
import torch
from safetensors.torch import save_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_loader import get_model
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


def main(target: str, drafter: str, output: str, rendezvous: str) -> None:
    """Load DRAFTER as the draft model of TARGET."""
    arguments = ServerArgs(
        model_path=target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafter,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        device="cpu",
        attention_backend="torch_native",
        grammar_backend="none",
        dtype="bfloat16",
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}")
    initialize_model_parallel()
    initialize_dp_attention(arguments)
    config = ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True)
    own = LlamaForCausalLMEagle3.load_weights

    def load_weights(model: LlamaForCausalLMEagle3, weights: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        own(model, weights)

    LlamaForCausalLMEagle3.load_weights = load_weights
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    found = {name: parameter.detach().contiguous().clone() for name, parameter in model.named_parameters()}
    save_file(found | {"hot_token_id": model.hot_token_id.clone()}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
