"""Batched decoding: one shared prefix, prefill in groups of like length, a preallocated cache, finished rows dropped.

Columns of the cache: P of the prefix that all prompts share; S of the rests of the prompts, each followed by unused columns that
no later token sees; then one for each generated token. Shapes: B rows, b rows of a group, C columns, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from scripts.lib.engines.decoder import final_states
from scripts.lib.engines.key_values import PreallocatedLayer
from scripts.lib.engines.protocol import Completion, Request
from scripts.lib.engines.sampling import Sampler

PREFILL_TOKENS = 2048  # padded prompt tokens of one prefill group: enough for full speed, little memory
DEAD_SHARE = 1 / 8  # finished rows that make moving the cache cheaper than computing them


@torch.inference_mode()
def answer(model: PreTrainedModel, requests: Sequence[Request], eos_ids: frozenset[int], sampler: Sampler) -> list[Completion]:
    """Answer `requests` as one batch; the result depends on nothing but the batch."""
    outputs: list[list[int]] = [[] for _ in requests]

    def ended(index: int) -> bool:
        return outputs[index][-1] in eos_ids or len(outputs[index]) == requests[index].max_tokens

    batch = Batch(model, [request.prompt_ids for request in requests], max(request.max_tokens for request in requests))
    logits = batch.prefill()
    rows = list(range(len(requests)))  # the request of each row of the batch
    while True:
        tokens = sampler.pick(logits, [requests[index].key for index in rows]).tolist()
        for index, token in zip(rows, tokens, strict=True):
            if not outputs[index] or not ended(index):
                outputs[index].append(token)
        alive = [row for row, index in enumerate(rows) if not ended(index)]
        if not alive:
            break
        if len(rows) - len(alive) >= DEAD_SHARE * len(rows):
            batch.keep(alive)
            rows, tokens = [rows[row] for row in alive], [tokens[row] for row in alive]
        logits = batch.step(tokens)
    return [
        Completion(request.key, tuple(output), "stop" if output[-1] in eos_ids else "length")
        for request, output in zip(requests, outputs, strict=True)
    ]


class Batch:
    """The rows being decoded and their cache."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self.model = model
        self.prefix = list(prompts[0][: shared(prompts)])
        self.rests = [list(prompt[len(self.prefix) :]) for prompt in prompts]
        self.filled = len(self.prefix) + max(map(len, self.rests))
        layers = range(model.config.num_hidden_layers)
        self.layers = [PreallocatedLayer(len(prompts), self.filled + new_tokens) for _ in layers]
        self.cache = Cache(layers=list(self.layers))
        self.visible = torch.ones(len(prompts), self.filled + new_tokens, dtype=torch.bool, device=model.device)
        for row, rest in enumerate(self.rests):
            self.visible[row, len(self.prefix) + len(rest) : self.filled] = False
        self.positions = torch.tensor([len(prompt) for prompt in prompts], device=model.device)

    def prefill(self) -> torch.Tensor:
        """Logits [B, V] of the first generated token."""
        prefix = self._prefix_cache()
        logits = [self._prefill_group(group, prefix) for group in groups([len(rest) for rest in self.rests])]
        for layer in self.layers:
            layer.fill(self.filled)
        return torch.cat(logits)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens`, one a row, and give the logits [B, V] of the next."""
        self.filled += 1
        final = final_states(
            self.model,
            torch.tensor(tokens, device=self.model.device)[:, None],
            self.cache,
            attention_mask=self.visible[:, None, None, : self.filled],
            position_ids=self.positions[:, None],
        )
        self.positions += 1
        return self.model.lm_head(final[:, 0])

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with `rows` (ascending) alone."""
        index = torch.tensor(rows, device=self.model.device)
        self.visible, self.positions = self.visible[index], self.positions[index]
        for layer in self.layers:
            layer.keep(index)

    def _prefix_cache(self) -> DynamicCache:
        cache = DynamicCache()
        if self.prefix:
            final_states(self.model, torch.tensor([self.prefix], device=self.model.device), cache)
        return cache

    def _prefill_group(self, rows: slice, prefix: DynamicCache) -> torch.Tensor:
        """Run the rests of the prompts at `rows` after the shared prefix, padded on the right: logits [b, V] at their ends."""
        rests = self.rests[rows]
        lengths = torch.tensor([len(rest) for rest in rests])
        ids = torch.zeros(len(rests), int(lengths.max()), dtype=torch.long)
        for row, rest in enumerate(rests):
            ids[row, : len(rest)] = torch.tensor(rest)
        cache = DynamicCache()
        for number, (keys, values) in enumerate(filled(prefix)):
            cache.update(keys.expand(len(rests), -1, -1, -1), values.expand(len(rests), -1, -1, -1), number)
        final = final_states(self.model, ids.to(self.model.device), cache)
        for layer, (keys, values) in zip(self.layers, filled(cache), strict=True):
            layer.write(rows, 0, keys, values)
        return self.model.lm_head(final[torch.arange(len(rests)), lengths - 1])


def filled(cache: Cache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values, [B, K, T, D] each, of every layer of `cache`."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        yield layer.keys, layer.values


def shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all `prompts` begin with, at least one short of each prompt's end; none for a single prompt."""
    if len(prompts) == 1:
        return 0
    ordered = sorted(map(tuple, prompts))
    first, last = ordered[0], ordered[-1]  # what these two share, all between them share
    limit = min(map(len, prompts)) - 1
    return next((place for place in range(limit) if first[place] != last[place]), limit)


def groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Cut rows of `lengths` into consecutive groups of at most PREFILL_TOKENS padded tokens, or one row."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or max(lengths[start : end + 1]) * (end + 1 - start) > PREFILL_TOKENS:
            yield slice(start, end)
            start = end
