"""Where SGLang's models keep what the hook needs, by the architecture that a target's `config.json` names.

Read in SGLang 0.5.17 and 0.5.23. All of them capture before layer k what enters it, so that boundary ids are SGLang's own layer numbers
here; only the flags of its EAGLE-3 interface shift them, by one or not, by the look of the list (DeepSeek) or its largest id (gpt-oss).

| family | decoder | asked by | gives | sum of residual stream and layer output |
|---|---|---|---|---|
| Llama, Mistral, Qwen2, Qwen3 | `model` | `layers_to_capture` | list of [N, H] | before the layer's first norm |
| Qwen2-MoE, Qwen3-MoE | `model` | `_is_layer_to_capture` of each layer | list of [N, H] | by the first norm, which gives the sum back |
| DeepSeek-V2/V3, Kimi-K2 | `model` | `layers_to_capture` | list of [N, H], or one tensor [N, 3H] | as Qwen3-MoE, gathered over the ranks |
| Kimi-K2.5 | `language_model.model` | as DeepSeek-V3 | as DeepSeek-V3 | as DeepSeek-V3 |
| gpt-oss | `model` | `layers_to_capture` | list of [N, H] | after the layer before; wants its all-reduce done: `FLAGS` |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.ground.errors import StageError


@dataclass(frozen=True)
class Modules:
    """Names of the decoder and of the logits processor below SGLang's model."""

    decoder: str
    logits: str


PLAIN = Modules("model", "logits_processor")
NESTED = Modules("language_model.model", "language_model.logits_processor")
FAMILIES: Mapping[str, Modules] = {
    "LlamaForCausalLM": PLAIN,
    "MistralForCausalLM": PLAIN,
    "Qwen2ForCausalLM": PLAIN,
    "Qwen3ForCausalLM": PLAIN,
    "Qwen2MoeForCausalLM": PLAIN,
    "Qwen3MoeForCausalLM": PLAIN,
    "DeepseekV2ForCausalLM": PLAIN,
    "DeepseekV3ForCausalLM": PLAIN,
    "KimiK25ForConditionalGeneration": NESTED,
    "GptOssForCausalLM": PLAIN,
}
# Hooks fire on eager passes alone. A fused all-reduce would leave a layer's output unsummed over the ranks where a state is taken.
FLAGS = (
    *("--disable-radix-cache", "--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"),
    "--enforce-disable-flashinfer-allreduce-fusion",
)
# Ranks with tokens or layers of their own, passes that are not plain, and a drafter that wants other layers.
REFUSED = ("--enable-dp-attention", "--pp-size", "--pipeline-parallel-size", "--enable-two-batch-overlap", "--speculative-algorithm")


def modules_of(target: Path) -> Modules:
    """The modules of the target in HF layout in `target`. Raises StageError for an architecture that nobody looked into."""
    names = json.loads((target / "config.json").read_text()).get("architectures") or ["none"]
    if names[0] not in FAMILIES:
        raise StageError(
            f"{target / 'config.json'}: hidden.engine sglang does not know where {names[0]} keeps its states, only "
            f"{', '.join(FAMILIES)}; set hidden.engine: transformers"
        )
    return FAMILIES[names[0]]


def check_flags(flags: tuple[str, ...]) -> None:
    """Raise StageError for a flag of `runtime.server.flags` with which states would be spread or others would be kept."""
    found = [flag for flag in flags if flag.split("=")[0] in REFUSED]
    if found:
        remedy = "remove it or set hidden.engine: transformers"
        raise StageError(f"runtime.server.flags: hidden.engine sglang cannot work with {found[0]}; {remedy}")
