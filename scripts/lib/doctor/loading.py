"""Any drafter that SGLang would take, as it would take it: also one whose config or names are not as we write them."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from scripts.lib.doctor.preflight import read_config
from scripts.lib.eagle3.foreign import engine_tensors
from scripts.lib.eagle3.judging import boundaries_of
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.eagle3.shapes import HEAD
from scripts.lib.ground.errors import StageError

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
)
UNKNOWN = ("target_hidden_size", "norm_before_fc", "bias")


def load_any(drafter: Path, target: Path, dtype: torch.dtype, device: str) -> Drafter:
    """The drafter in the folder `drafter` for the one in `target`, in `dtype` on `device`, in eval mode without gradients.

    Only for a drafter that `preflight` finds nothing fatal in. StageError for one of a kind that we cannot compute ourselves.
    """
    config, text = read_config(drafter), AutoConfig.from_pretrained(target).get_text_config()
    strange = [name for name in UNKNOWN if config.get(name) or (config.get("eagle_config") or {}).get(name)]
    if strange:
        raise StageError(f"{drafter}: cannot be walked here, as it uses {', '.join(strange)}; serve it and give --url for a canary")
    tensors = engine_tensors(drafter)
    size = len(tensors[HEAD])
    d2t = tensors.get("d2t", torch.zeros(size, dtype=torch.int64)).long()
    kept = torch.zeros(text.vocab_size, dtype=torch.bool).index_fill(0, torch.arange(size) + d2t, True)
    norms = bool(config.get("fc_norm") or config.get("use_aux_norm"))
    like = replace(
        DrafterConfig.from_target(text, size, tuple(boundaries_of(config, text))),
        fc_norm=norms,
        norm_output=bool(config.get("norm_output")),
    )
    sizes = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    sizes |= {name: config[name] for name in SIZES if config.get(name) is not None}
    with torch.device("meta"):
        network = Drafter(replace(like, **sizes), d2t, kept)
    names = network.state_dict().keys()
    network.load_state_dict({name: tensors[name] for name in names - {"d2t", "t2d"}} | {"d2t": d2t, "t2d": kept}, assign=True)
    return network.to(device=device, dtype=dtype).eval().requires_grad_(False)
