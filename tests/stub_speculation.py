"""An SGLang server that writes made-up answers at a made-up speed, in a standard library: what a benchmark cell asks of one.

With `--speculative-algorithm` a step writes as many tokens as STEPS says in turn, without it one. Environment: STUB_FOLDER, where it notes
its starts and its requests; STUB_SECONDS of a step; STUB_TOKENS, the ids of any text; STUB_FAULT: `idle` accepts nothing, `uncounted` tells
no steps, `differs` writes another third token, which the target likes by STUB_GAP less, `dies` at the request of number STUB_REQUESTS,
`aborts` that one instead, `slower` reports another dtype, `crowded` finds no memory.
"""

# ruff: noqa: T201

import json
import os
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EOS = 2
STEPS = (3, 1, 2, 1)
FOLDER = Path(os.environ.get("STUB_FOLDER", "."))
FAULT = os.environ.get("STUB_FAULT")
LOCK = threading.Lock()


def flag(name, default=None):
    """The last value of a command line flag."""
    return ([sys.argv[place + 1] for place, word in enumerate(sys.argv) if word == name] or [default])[-1]


SPECULATIVE = flag("--speculative-algorithm")


def answer(ids):
    """6 to 29 tokens that the prompt decides, and an end of turn."""
    digest = zlib.crc32(json.dumps(ids).encode())
    tokens = [*(3 + (digest >> place) % 250 for place in range(6 + digest % 24)), EOS]
    if FAULT == "differs" and SPECULATIVE:
        tokens[2] += 1
    return tokens


def steps(tokens):
    """Sizes of the pieces after the first token."""
    sizes = []
    while sum(sizes) < tokens - 1:
        size = STEPS[len(sizes) % len(STEPS)] if SPECULATIVE and FAULT != "idle" else 1
        sizes.append(min(size, tokens - 1 - sum(sizes)))
    return sizes


def noted(body):
    """Write the request down; its number."""
    with LOCK, (FOLDER / ("variant" if SPECULATIVE else "baseline")).open("a+") as file:
        file.write(json.dumps(body) + "\n")
        file.seek(0)
        return len(file.readlines())


class Handler(BaseHTTPRequestHandler):
    """The paths that a cell asks for."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        server = {
            "version": "0.5.17",
            "model_path": flag("--model-path"),
            "dtype": "half" if FAULT == "slower" and SPECULATIVE else flag("--dtype"),
            "speculative_algorithm": SPECULATIVE,
            "speculative_draft_model_path": flag("--speculative-draft-model-path"),
        }
        answers = {"/health": {}, "/flush_cache": {}, "/server_info": server, "/model_info": {"model_path": flag("--model-path")}}
        path = self.path.partition("?")[0]
        self.reply(200 if path in answers else 404, answers.get(path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/tokenize":
            known = "prompt" in body
            self.reply(200 if known else 400, {"tokens": [int(token) for token in os.environ["STUB_TOKENS"].split(",")]} if known else {})
        elif "token_ids_logprob" in body:
            gaps = dict.fromkeys(body["token_ids_logprob"], -float(os.environ.get("STUB_GAP", "0.1"))) | {body["token_ids_logprob"][0]: 0.0}
            meta = {"output_token_ids_logprobs": [[[gap, token, None] for token, gap in gaps.items()]]}
            self.reply(200, {"meta_info": meta | {"output_top_logprobs": [[[0.0, body["token_ids_logprob"][0], None], [-1.0, 5, None]]]}})
        else:
            self.generate(body)

    def generate(self, body):
        """Write an answer, step by step."""
        last = noted(body) == int(os.environ.get("STUB_REQUESTS", "0")) and bool(SPECULATIVE)
        if last and FAULT == "dies":
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(3)
        ids = answer(body["input_ids"])[: body["sampling_params"]["max_new_tokens"]]
        sizes = steps(len(ids))
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        done = 0
        for number, size in enumerate([1, *sizes]):
            time.sleep(float(os.environ.get("STUB_SECONDS", "0.0005")))
            done += size
            finish = None if done < len(ids) else {"type": "abort" if last and FAULT == "aborts" else "stop"}
            meta = {"completion_tokens": done, "finish_reason": finish} | self.counted(number, sizes)
            if body.get("stream"):
                self.event({"text": "", "output_ids": ids[done - size : done], "meta_info": meta})
        if body.get("stream"):
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            self.reply(200, {"output_ids": ids, "meta_info": meta})

    def counted(self, number, sizes):
        """What the server tells of its first `number` steps."""
        if not SPECULATIVE or FAULT == "uncounted" or not number:
            return {}
        drafts = [size - 1 for size in sizes[:number]]
        counts = [drafts.count(accepted) for accepted in range(max(drafts) + 1)]
        return {"spec_verify_ct": number, "spec_num_correct_drafts": sum(drafts), "spec_correct_drafts_histogram": counts}

    def event(self, value):
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    """Serve until killed."""
    if "-c" in sys.argv:
        print(json.dumps({"sglang": "0.5.17", "torch": "2.11.0"}))
        return
    if FAULT == "crowded":
        sys.exit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    with (FOLDER / "starts").open("a") as file:
        file.write("v" if SPECULATIVE else "b")
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
