"""A stand-in for an SGLang server with the hook of aerie's in it: real HTTP, real hook, states of transformers, passes cut as SGLang cuts.

A pass takes `pass_tokens` tokens of the rows of one request, so that rows are cut and share passes, and is padded to a multiple of 8.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.lib.engines.transformers_engine import TransformersEngine
from scripts.lib.states.hook.aerie_states_hook import factory


@dataclass
class Batch:
    """What the hook reads of SGLang's ForwardBatch."""

    rids: list[str]
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens_cpu: list[int]


class Decoder(nn.Module):
    """The inner model: hands out prepared states [tokens, H] by layer as Llama's does, those before the layers that it is to capture."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        self.layers_to_capture: list[int] = []
        self.states: list[Tensor] = []
        self.packed = False

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Any:
        """Final states, with the captured ones if there are any."""
        aux = [self.states[layer] for layer in self.layers_to_capture]
        if not aux:
            return self.states[-1]
        return self.states[-1], torch.cat(aux, -1) if self.packed else aux


class LogitsProcessor(nn.Module):
    """Called with the head, as SGLang's is. The head gives more columns than there are tokens; a rank that gathers has half of them."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocab_size, self.do_tensor_parallel_all_gather = vocabulary, False
        self.logit_scale = self.final_logit_softcapping = None
        self.whole = 0  # times that the hook asked for logits as the server has them

    def forward(self, input_ids: Tensor, hidden: Tensor, head: nn.Module, batch: Batch) -> Tensor:
        """Logits of the last token of the pass."""
        assert isinstance(hidden, Tensor), "the list of states must be taken away before the rest of the server sees it"
        return head(hidden[-1:])

    def _get_logits(self, hidden: Tensor, head: nn.Module, batch: Batch) -> Tensor:
        self.whole += 1
        return head(hidden)

    def _compute_lm_head(self, hidden: Tensor, head: nn.Module) -> Tensor:
        logits: Tensor = head(hidden)
        if self.do_tensor_parallel_all_gather:
            return logits[:, : self.vocab_size // 2]
        return torch.cat([logits, logits.amax(1, keepdim=True) + 1], 1)


@dataclass
class Faults:
    """What goes wrong: each request before number `crash_until` breaks off after its first pass; `prefix` tokens of the first rows are
    left out once, as a hit in the cache leaves them out; states come `layers` layers or `tokens` tokens late."""

    crash_until: int = 0
    prefix: int = 0
    layers: int = 0
    tokens: int = 0
    poison: int = -1


@dataclass
class States:
    """A server of `engine`'s target whose hook writes to `folder`."""

    engine: TransformersEngine
    folder: Path
    boundaries: Sequence[int]
    pass_tokens: int = 24
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        layers = self.engine.model.config.num_hidden_layers
        self.decoder, self.processor = Decoder(layers), LogitsProcessor(self.engine.model.config.vocab_size)
        hook = factory({"folder": str(self.folder), "boundaries": list(self.boundaries)})
        for module in (self.decoder, self.processor):
            module.register_forward_hook(hook)
        self.lock, self.requests, self.checks = threading.Lock(), 0, 0
        self.names: set[str] = set()
        self.asked_for: list[tuple[int, ...]] = []
        self.url = ""
        self.run(["HEALTH_CHECK"], [[5, 6, 7]], [0])

    @property
    def urls(self) -> tuple[str, ...]:
        """Where it answers."""
        return (self.url,)

    @property
    def version(self) -> str:
        """Of no SGLang."""
        return "0.5.23"

    def check(self) -> None:
        """The server may come back."""
        self.checks += 1

    def answer(self, body: dict[str, Any]) -> int:
        """Go through the rows of one request; its status, 0 when the server dies in it."""
        with self.lock:
            if self.names & set(body["rid"]):
                return 400  # SGLang may still work on what broke off
            self.names |= set(body["rid"])
            self.asked_for += map(tuple, body["input_ids"])
            self.requests += 1
            first = [self.faults.prefix if self.requests == 1 else 0] * len(body["rid"])
            todo = list(zip(body["rid"], body["input_ids"], first, strict=True))
            while todo:
                batch, room = [], self.pass_tokens
                while todo and room:
                    rid, ids, start = todo.pop(0)
                    end = min(len(ids), start + room)
                    batch.append((rid, ids[:end], start))
                    room -= end - start
                    if end < len(ids):
                        todo.insert(0, (rid, ids, end))
                self.run(*map(list, zip(*batch, strict=True)))
                if self.requests <= self.faults.crash_until:
                    return 0
            return 200

    @torch.inference_mode()
    def run(self, rids: list[str], rows: list[list[int]], starts: list[int]) -> None:
        """One forward pass over rows from their `starts` on."""
        parts, ids = [], []
        for row, start in zip(rows, starts, strict=True):
            output = self.engine.model.model(torch.tensor([row]), output_hidden_states=True, use_cache=False)
            states = torch.stack([*output.hidden_states[:-1], output.last_hidden_state])[:, 0]
            states = states.roll(self.faults.layers, 0).roll(self.faults.tokens, 1)
            states[:, [place for place, token in enumerate(row) if token == self.faults.poison]] = torch.nan
            parts.append(states[:, start:])
            ids += row[start:]
        padding = -len(ids) % 8
        states = nn.functional.pad(torch.cat(parts, 1), (0, 0, 0, padding), value=1e9)
        counts = [len(row) - start for row, start in zip(rows, starts, strict=True)]
        tokens, batch = torch.tensor([*ids, *[0] * padding]), Batch(rids, counts, starts)
        self.decoder.states = list(states)
        self.processor(tokens, self.decoder(tokens, tokens, batch), self.engine.model.lm_head, batch)


@contextmanager
def served_states(states: States) -> Iterator[States]:
    """`states` behind a port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = states.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if status:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    states.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield states
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
