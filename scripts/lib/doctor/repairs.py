"""Every misconfiguration that the doctor knows, by name, with what repairs it; `docs/doctor.md` shows the same table.

A name stays what it is: people search for it.
"""

from collections.abc import Mapping

from scripts.lib.doctor.findings import Finding

EXPORT = "export the drafter again, or fetch a sound copy"
RETRAIN = "serve the target that it was trained for, or train a drafter for this one"

REPAIRS: Mapping[str, str] = {
    # the drafter's folder
    "other_architecture": "give the folder of a LlamaForCausalLMEagle3 drafter, or the algorithm that this one is for",
    "config_incomplete": EXPORT,
    "weights_missing": EXPORT,
    "weights_renamed": "name the tensors as LlamaForCausalLMEagle3 does (midlayer.*, fc, norm, lm_head)",
    "weights_shape": EXPORT,
    "weights_not_finite": "train the drafter again from a sound checkpoint",
    "weights_unread": "set the switch, or the number of layers, in config.json if it was trained with it, else drop the tensor",
    "fc_width": "train with as many layers as config.json names, on this target's hidden size",
    "head_tied": "set tie_word_embeddings to false in the drafter's config.json",
    "head_replaced": "write draft_vocab_size into the drafter's config.json",
    "d2t_missing": "export d2t with the weights",
    "d2t_absolute": "store d2t as target id minus draft id",
    "d2t_malformed": "build the draft vocabulary again and export d2t as int64 offsets",
    "d2t_t2d_disagree": "build the draft vocabulary again, and take d2t and t2d of one run",
    "dtype_differs": "serve with --dtype bfloat16 or set torch_dtype to bfloat16 in the drafter's config.json",
    # the drafter and its target
    "rope_differs": "copy rope_theta and the rotary scaling of the target into the drafter's config.json, as it was trained",
    "positions_short": "set max_position_embeddings to the target's, or serve with a --context-length that the drafter reaches",
    "layers_unread": "write the ids of the layers' outputs, ascending, under eagle_config.eagle_aux_hidden_state_layer_ids",
    "layers_outside": "write the ids of the layers that it was trained on",
    "layers_shifted": "write the ids that give the states of the training: SGLang takes outputs (boundary - 1), vLLM boundaries",
    "other_target": RETRAIN,
    "embedding_differs": "look with --walk whether it was trained for this target at all",
    "tokenizer_differs": "serve the tokenizer that the drafter's rows were written with, or train on rows of this one",
    "template_differs": "serve the chat template that the drafter's rows were rendered with, or train on rows of this one",
    "training_unknown": "nothing, if it is another team's; keep manifest.json of the training beside a drafter of your own",
    "accept_near_one": "run `python -m scripts.doctor --walk`: near one there too, the drafter is another target's or hardly trained",
    # the command line
    "eagle_for_eagle3": "serve it with --speculative-algorithm EAGLE3",
    "other_algorithm": "give the algorithm and the drafter that belong together",
    "no_speculation": "add --speculative-algorithm, or drop the flags of a drafter",
    "drafter_missing": "add --speculative-draft-model-path",
    "drafter_differs": "give the flags and the check the same drafter",
    "drafter_unused": "drop the drafter, or choose an algorithm that reads one",
    "steps_rewritten": "give the numbers that the server will use",
    "steps_unset": "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens",
    "tree_too_small": "take at most topk + (steps - 1) * topk * topk + 1 draft tokens",
    "drafter_quantized": "add --speculative-draft-model-quantization unquant",
    "states_rounded": "compare accept lengths of the same --dtype and --kv-cache-dtype only",
    "window_cut": "drop --speculative-draft-window-size, or train with that window",
    "thresholds_lowered": "leave both --speculative-accept-threshold flags at 1.0",
    "flag_unread": "drop the flag",
    "accept_length_simulated": "unset SGLANG_SIMULATE_ACC_LEN",
    # the running server
    "server_differs": "start the server with the flags that are meant",
    "extension_eager": "serve with --attention-backend triton or flashinfer, or a newer SGLang (0.5.23 has that graph)",
    "accept_impossible": "do not trust this server's counters: look for SGLANG_SIMULATE_ACC_LEN and for another number of steps",
    "server_silent": "use a newer SGLang (0.5.23 does tokenise)",
}


def finding(name: str, evidence: str, fatal: bool = True) -> Finding:
    """What is known of `name`, with the `evidence` for it."""
    return Finding(name, evidence, REPAIRS[name], fatal)
