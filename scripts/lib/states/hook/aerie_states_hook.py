"""Runs inside SGLang's processes, as a factory for `--forward-hooks`: writes the states of the rows that aerie asks for.

It sees two modules. The decoder is told before each batch which boundaries to keep, which it only does for batches with rows of aerie's
(other requests cost nothing), and its list of states is taken away again. The logits processor then has the state after the last norm of
every token, the head, and the batch: rows, and where each part of a row starts. SGLang itself adds the residual stream to a layer's
output, in the forward's own dtype, and reduces both over the ranks: states are the same on all of them, and rank 0 writes.

Each forward pass becomes one safetensors file, whose metadata says which part of which row lies where. The GPU copies to page-locked
memory on a stream of its own, and threads write: the next pass starts meanwhile. When all buffers wait for the disk, the pass waits too.

Only torch and the standard library are imported: this is another environment than aerie's.
Shapes: N tokens of a pass, F of them with a teacher, L boundaries, H hidden size.
"""

import itertools
import json
import os
import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIX = "aerie-states:"  # of the request ids of rows whose states are wanted
BUFFERS = 4
WRITERS = 2  # threads: one alone writes little faster than a small target computes
LOGIT_ROWS = 1024  # rows of one product with the head: bounds the logits to 1024 × vocabulary
DTYPES = {torch.int32: "I32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Part:
    """`count` tokens of the row `name` from its token `first` on; they start at `place` of the pass.

    `finals`: half-open ranges of places with a teacher. Ranges, as the pass waits while Python goes through positions one by one.
    """

    name: str
    first: int
    place: int
    count: int
    finals: tuple[tuple[int, int], ...]

    @property
    def teachers(self) -> int:
        """How many places have a teacher."""
        return sum(end - start for start, end in self.finals)


def request_id(name: str, positions: list[tuple[int, int]]) -> str:
    """The id of a request for the states of row `name`, with final states in the half-open ranges `positions` of its tokens."""
    return f"{PREFIX}{name}:{','.join(f'{start}-{end}' for start, end in positions)}"


def asked(rid: object) -> tuple[str, list[tuple[int, int]]] | None:
    """Row and ranges of a request id; None for a request that is not aerie's."""
    if not isinstance(rid, str) or not rid.startswith(PREFIX):
        return None
    name, ranges = rid[len(PREFIX) :].rsplit(":", 1)
    pairs = [text.split("-") for text in ranges.split(",") if text]
    return name, [(int(start), int(end)) for start, end in pairs]


def parts_of(batch: Any) -> list[Part]:
    """The parts of rows in `batch`. Tokens lie end to end in the order of its requests; what pads a graph comes after them."""
    parts, place = [], 0
    counts, firsts = (list(map(int, values or ())) for values in (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu))
    for rid, count, first in zip(batch.rids or (), counts, firsts, strict=False):
        row = asked(rid)
        if row:
            inside = ((max(start - first, 0), min(end - first, count)) for start, end in row[1])
            finals = tuple((start + place, end + place) for start, end in inside if start < end)
            parts.append(Part(row[0], first, place, count, finals))
        place += count
    return parts


def stacked(aux: Any, boundaries: int) -> Tensor:
    """`aux` [N, L, H] of what a decoder gives: a list of states [N, H] by layer, or one tensor [N, L · H]."""
    if isinstance(aux, Tensor):
        return aux.view(aux.shape[0], boundaries, -1)
    if len(aux) != boundaries:
        raise RuntimeError(f"aerie: the decoder gave {len(aux)} states, {boundaries} were asked for")
    return torch.stack(tuple(aux), dim=1)


def taken(tensor: Tensor, parts: list[Part]) -> Tensor:
    """The tokens of `parts` of `tensor`, end to end."""
    start, end = parts[0].place, parts[-1].place + parts[-1].count
    if sum(part.count for part in parts) == end - start:
        return tensor[start:end]
    return torch.cat([tensor[part.place : part.place + part.count] for part in parts])


def teachers(parts: list[Part], device: torch.device) -> Tensor:
    """The places i64 [F] with a teacher. From pageable memory the copy would wait until the GPU has done all that is queued."""
    ranges = [torch.arange(start, end) for part in parts for start, end in part.finals]
    places = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
    return places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places.to(device)


def best_tokens(processor: Any, rows: Tensor, head: Any, batch: Any) -> Tensor:
    """The best token i64 [n] of each of `rows` [n, H] by the logits of the server.

    It copies logits into float32, which takes longer than the product that gave them. Where nothing else is done to them they are taken
    as they come from the head.
    """
    if processor.do_tensor_parallel_all_gather or processor.logit_scale is not None or processor.final_logit_softcapping:
        return processor._get_logits(rows, head, batch).argmax(-1)
    return processor._compute_lm_head(rows, head)[:, : processor.vocab_size].argmax(-1)


class Hook:
    """The hook on both modules; `boundaries` k is the residual stream that enters layer k."""

    def __init__(self, folder: str, boundaries: list[int]) -> None:
        self.boundaries = boundaries
        self.outbox = Outbox(folder)
        self.parts: list[Part] = []
        self.aux: Any = None
        self.watched = False

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        """Called after the forward pass of a module; what it returns replaces the output, None keeps it."""
        if hasattr(module, "layers_to_capture"):
            return self.decoded(module, output)
        if self.aux is not None:
            self.write(module, *inputs[:4])
        return None

    def decoded(self, decoder: Any, output: Any) -> Any:
        """Keep the states, and hand on what the rest of the server expects. The first pass, a server's warm-up, only opens the way."""
        if not self.watched:
            self.watched = True
            decoder.register_forward_pre_hook(self.before)
        if not self.parts:
            return None
        hidden, self.aux = output
        return hidden

    def before(self, decoder: Any, inputs: tuple[Any, ...]) -> None:
        """Tell the decoder what to keep of the pass that begins."""
        batch = next(value for value in inputs if hasattr(value, "rids"))
        self.parts, self.aux = parts_of(batch), None
        wanted = self.boundaries if self.parts else []
        if decoder.layers_to_capture != wanted:
            decoder.layers_to_capture = wanted
            for number, layer in enumerate(decoder.layers):
                layer._is_layer_to_capture = number in wanted  # some decoders look there

    def write(self, processor: Any, input_ids: Tensor, hidden: Tensor, head: Any, batch: Any) -> None:
        """Send aux states of all tokens, final states and argmax of those with a teacher."""
        aux, self.aux = stacked(self.aux, len(self.boundaries)), None
        tokens = self.parts[-1].place + self.parts[-1].count
        if min(len(aux), len(hidden)) < tokens:
            raise RuntimeError(f"aerie: {len(aux)} and {len(hidden)} states for {tokens} tokens: they are spread over ranks")
        places = teachers(self.parts, hidden.device)
        final = hidden[places]
        # Also on ranks that write nothing: the parts of the vocabulary are gathered from all.
        chosen = [best_tokens(processor, rows, head, batch) for rows in final.split(LOGIT_ROWS) if len(rows)]
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        tensors = {
            "input_ids": taken(input_ids, self.parts).to(torch.int32),
            "argmax": (torch.cat(chosen) if chosen else places).to(torch.int32),
            "aux": taken(aux, self.parts).to(torch.bfloat16),
            "final": final.to(torch.bfloat16),
        }
        self.outbox.send([(part.name, part.first, part.count, part.teachers) for part in self.parts], tensors)


class Outbox:
    """Files in `folder`, written by a few threads, so that they come in nearly the order in which they are sent."""

    def __init__(self, folder: str) -> None:
        self.folder, self.numbers = folder, itertools.count()
        self.free: queue.Queue[Buffer] = queue.Queue()
        self.full: queue.Queue[tuple[bytes, Buffer]] = queue.Queue()
        self.problem: Exception | None = None
        for _ in range(BUFFERS):
            self.free.put(Buffer())
        for _ in range(WRITERS):
            threading.Thread(target=self._write_all, name="aerie-states", daemon=True).start()

    def send(self, parts: list[tuple[str, int, int, int]], tensors: dict[str, Tensor]) -> None:
        """Copy `tensors` and return; waits while all buffers wait for the disk. Raises what the thread met when it wrote."""
        buffer = self.free.get()
        if self.problem:
            raise RuntimeError(f"aerie: states cannot be written: {self.problem}") from self.problem
        buffer.fill(tensors)
        self.full.put((header(parts, tensors), buffer))

    def _write_all(self) -> None:
        while True:
            head, buffer = self.full.get()
            try:
                name = os.path.join(self.folder, f"{os.getpid()}-{next(self.numbers):08d}.safetensors")
                with open(f"{name}.part", "wb") as file:
                    file.write(head)
                    file.write(buffer.content())
                os.replace(f"{name}.part", name)
            except Exception as error:  # the next pass raises it where the server sees it
                self.problem = error
            self.free.put(buffer)


def header(parts: list[tuple[str, int, int, int]], tensors: dict[str, Tensor]) -> bytes:
    """The head of a safetensors file whose data are `tensors` in this order. Written by hand, as the library would copy them all."""
    entries: dict[str, Any] = {"__metadata__": {"parts": json.dumps(parts)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Buffer:
    """Memory of the host for the tensors of one pass, page-locked where they come from a GPU."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.size = 0
        self.stream: Any = None
        self.copied: Any = None

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors` end to end: at once on a CPU, behind the work queued so far on a GPU, on a stream beside the forward pass's."""
        self.size = sum(tensor.nbytes for tensor in tensors.values())
        device = next(iter(tensors.values())).device
        if len(self.memory) < self.size:
            # A power of two, as torch would take that much anyway: locking pages stops the GPU, and so must be rare.
            self.memory = torch.empty(1 << (self.size - 1).bit_length(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        if device.type != "cuda":
            self._copy(tensors, False)
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            self._copy(tensors, True)
            self.copied = torch.cuda.Event(blocking=True)
            self.copied.record(self.stream)
        for tensor in tensors.values():
            tensor.record_stream(self.stream)  # its memory is not given away before the copy

    def content(self) -> Any:
        """The bytes, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.memory[: self.size].numpy()

    def _copy(self, tensors: dict[str, Tensor], beside: bool) -> None:
        place = 0
        for tensor in tensors.values():
            target = self.memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=beside)
            place += tensor.nbytes


def factory(config: dict[str, Any]) -> Hook:
    """What `--forward-hooks` calls, in every process of the server: `folder` for the files, `boundaries` as SGLang's own layer numbers."""
    os.makedirs(config["folder"], exist_ok=True)
    return Hook(config["folder"], list(config["boundaries"]))
