"""The target in process, through transformers: the reference for every other engine.

Shapes: B rows, N new tokens, T tokens of a row, F positions with a teacher, H hidden size, V vocabulary.
"""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from scripts.lib.engines.decoder import final_states, tapped
from scripts.lib.engines.decoding import answer, shared
from scripts.lib.engines.moving import fetched, sent
from scripts.lib.engines.protocol import Completion, Request, RowStates, StateRequest
from scripts.lib.engines.sampling import Sampler
from scripts.lib.ground.errors import StageError

LOGIT_ROWS = {"cpu": 512, "cuda": 2048}  # of one lm_head product: bounds the logits to so many × V; a GPU wants larger ones
LANES = 2  # batches that a GPU works on at a time
SHARED_TOKENS = 8  # a shorter common beginning is not worth a forward pass of its own


def load_target(folder: Path, dtype: torch.dtype, device: str, device_map: str | None = None) -> PreTrainedModel:
    """The causal language model in HF layout in `folder`, for inference only: on `device`, or its layers spread by a `device_map`.

    Raises StageError when it cannot be read, lacks weights, or is not built like Llama: `model.layers`, `model.norm`, `lm_head`.
    """
    disable_progress_bar()  # its carriage returns make one endless line of a log
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True, device_map=device_map
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise StageError(f"{folder}: transformers cannot load the target ({error}); rebuild stage target") from error
    model, loaded = result
    lost = sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]]))
    if lost:
        raise StageError(f"{folder}: {len(lost)} weights are missing or misshapen, first {lost[0]}; rebuild stage target")
    parts = ("layers", "norm")
    if not hasattr(model, "lm_head") or not all(hasattr(getattr(model, "model", None), part) for part in parts):
        kind = type(model).__name__
        raise StageError(f"{folder}: {kind} has no model.layers, model.norm and lm_head; choose a decoder of the Llama kind")
    placed = model if device_map else model.to(device)
    return placed.eval().requires_grad_(False)


class TransformersEngine:
    """Answers and states of a loaded target, for several threads.

    Greedy at temperature 0; above it, every request draws from a generator seeded by (seed, key), never by its place.
    """

    def __init__(self, model: PreTrainedModel, eos_ids: frozenset[int], temperature: float = 0.0, seed: int = 0) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.temperature, self.seed = temperature, seed
        alone = changes(model)
        self._passing = threading.Lock() if alone else contextlib.nullcontext()
        apart = self.device.type == "cuda" and not alone
        self._aside = new_stream(self.device, priority=-1) if apart else None
        self._lanes = itertools.cycle([new_stream(self.device) for _ in range(LANES)] if apart else [None])

    @property
    def device(self) -> torch.device:
        """Where tokens go in: that of the embeddings, where layers are spread or their weights lie elsewhere until they are used."""
        hook = getattr(self.model.get_input_embeddings(), "_hf_hook", None)
        return torch.device(hook.execution_device) if hook else self.model.device

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer `requests`, best sorted by prompt length: neighbours share a prefill."""
        return answer(self.model, requests, self.eos_ids, Sampler(self.temperature, self.seed))

    @property
    def logit_rows(self) -> int:
        """Rows of one product with the head."""
        return LOGIT_ROWS.get(self.device.type, LOGIT_ROWS["cpu"])

    def lane(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU batches take turns on streams: while one waits for memory or ends a layer the other computes. Results are the same.

        What is asked for `beside` batches stays there.
        """
        aside = self._aside is not None and torch.cuda.current_stream(self.device) == self._aside
        return contextlib.nullcontext() if aside else torch.cuda.stream(next(self._lanes))

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a GPU computes what is asked for before the batches that are queued, unless passes must not meet."""
        return torch.cuda.stream(self._aside)

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """Logits [F, V] of final states [F, H], wherever and in whatever dtype they are."""
        with self._passing:
            return self.model.lm_head(sent(final, self.device).to(self.model.dtype))

    @torch.inference_mode()
    def reference(self, input_ids: Sequence[int], boundaries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`aux` [T, 3, H] and `final` [T, H] of one row from transformers' own list of hidden states: no taps, batch or cache.

        Both are in the host's memory.
        """
        with self._passing:
            ids = sent(torch.tensor([list(input_ids)]), self.device)
            output = self.model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        final = output.last_hidden_state[0]
        aux, final = fetched(torch.stack([output.hidden_states[boundary][0].to(final.device) for boundary in boundaries], dim=1), final)
        return aux, final

    @torch.inference_mode()
    def states(self, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        """One forward pass over `rows`, padded on the right, where causal attention keeps padding out of every real token.

        On a CPU what all rows begin with is computed once. On a GPU that would cost more than it saves: with keys before the first query
        attention needs a mask, and the flash kernels take none. The states of all rows lie end to end, rows are views of them.
        """
        with self._passing:
            return self._states(rows, boundaries)

    def _states(self, rows: Sequence[StateRequest], boundaries: Sequence[int]) -> list[RowStates]:
        final, *aux = self._padded([row.input_ids for row in rows], self._prefix(rows), boundaries)
        width = final.shape[1]
        places = sent(flat([np.arange(len(row.input_ids)) for row in rows], width), final.device)
        wanted = final.flatten(0, 1)[sent(flat([np.array(row.final_index, np.int64) for row in rows], width), final.device)]
        argmax = torch.cat([choices(self.model.lm_head(part)) for part in wanted.split(self.logit_rows)]).to(final.device)
        packed = torch.stack([stream.flatten(0, 1)[places] for stream in aux], dim=1)
        sizes = [len(row.final_index) for row in rows]
        parts = (packed.split([len(row.input_ids) for row in rows]), wanted.split(sizes), argmax.split(sizes))
        return [RowStates(*row) for row in zip(*parts, strict=True)]

    def _prefix(self, rows: Sequence[StateRequest]) -> int:
        """How many first tokens of all `rows` are computed once."""
        if self.device.type != "cpu":
            return 0
        prefix = shared([row.input_ids for row in rows])
        return prefix if prefix >= SHARED_TOKENS else 0

    def _padded(self, rows: Sequence[Sequence[int]], prefix: int, boundaries: Sequence[int]) -> list[torch.Tensor]:
        """`final` and the aux states at each of `boundaries`, [B, T, H] each, of `rows`, whose first `prefix` tokens are the same."""
        ids, cache = sent(padded(rows), self.device), DynamicCache() if prefix else None
        parts = []
        if cache is not None:
            with tapped(self.model, boundaries) as taps:
                head = final_states(self.model, ids[:1, :prefix], cache)
            cache.batch_repeat_interleave(len(rows))
            parts.append([states.expand(len(rows), -1, -1) for states in (head, *(taps[boundary] for boundary in boundaries))])
        with tapped(self.model, boundaries) as taps:
            rest = final_states(self.model, ids[:, prefix:], cache)
        parts.append([rest, *(taps[boundary] for boundary in boundaries)])
        return [(torch.cat(streams, dim=1) if prefix else streams[0]).to(rest.device) for streams in zip(*parts, strict=True)]


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of `device` behind all that was queued there so far, such as the weights' way to it."""
    made = torch.cuda.Stream(device, priority=priority)
    made.wait_stream(torch.cuda.current_stream(device))
    return made


def changes(model: PreTrainedModel) -> bool:
    """Whether a forward pass changes `model`, so that another thread's would run into it.

    Rotary frequencies that depend on the longest row so far are replaced when one comes; accelerate moves weights to where they are used.
    """
    rotary = str(getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None))
    return "dynamic" in rotary or "longrope" in rotary or any(hasattr(module, "_hf_hook") for module in model.modules())


def choices(logits: torch.Tensor) -> torch.Tensor:
    """The first best token [F] of each row of `logits` [F, V]."""
    if not logits.is_cuda:
        return logits.argmax(-1)
    from scripts.lib.engines.triton_choice import first_choices  # Triton is there with CUDA only

    return first_choices(logits)


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """`rows` of tokens as ids i64 [B, T], padded on the right."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(np.array(row, np.int64))
    return ids


def flat(places: Sequence[np.ndarray], width: int) -> torch.Tensor:
    """`places` i64 in each of several rows of `width` as places [n] in the rows end to end."""
    return torch.from_numpy(np.concatenate([own + number * width for number, own in enumerate(places)]))


@torch.inference_mode()
def forward_states(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache | None, boundaries: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed N new tokens of one row, `input_ids` [1, N], after those in `cache`, and append them to it.

    Returns `final` [N, H] after the last norm (logits are `model.lm_head(final)`) and `aux` [N, 3, H] at `boundaries`.
    """
    with tapped(model, boundaries) as taps:
        final = final_states(model, input_ids, cache)
    return final[0], torch.stack([taps[boundary][0] for boundary in boundaries], dim=1)
