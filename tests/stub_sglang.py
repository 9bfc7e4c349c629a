"""What `server` needs of an SGLang server, in a standard library: a program that a test writes as `runtime.server.python`.

Environment: STUB_STARTS, a file that counts the starts; STUB_FAIL, comma-separated starts that die with STUB_ERROR before they are
healthy; STUB_HANG, that it never is; STUB_PIDS, a file for the ids of the server and of a child that left its session; STUB_GPUS, uuids
that its torch sees; STUB_MODEL, STUB_TYPE, STUB_VERSION and STUB_TOKENS (`none`: it fails), what it says it serves; STUB_OPENAI, that it
is not SGLang.
`/crash` ends the server as SGLang ends.
"""

# ruff: noqa: T201

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def flag(name):
    """The last value of a command line flag."""
    return [sys.argv[place + 1] for place, word in enumerate(sys.argv) if word == name][-1]


class Handler(BaseHTTPRequestHandler):
    """The paths that aerie asks for."""

    def do_GET(self):
        path = os.environ.get("STUB_MODEL") or flag("--model-path")
        answers = {
            "/health": {},
            "/model_info": {"model_path": path, "model_type": os.environ.get("STUB_TYPE", "llama")},
            "/server_info": {"version": os.environ.get("STUB_VERSION", "0.5.17"), "arguments": sys.argv, "environment": dict(os.environ)},
            "/v1/models": {"data": [{"id": path}]},
        }
        if self.path == "/crash":
            print("Traceback (most recent call last):\nRuntimeError: CUDA out of memory\nkilled children", flush=True)
            os._exit(3)
        known = self.path in answers and not (os.environ.get("STUB_OPENAI") and self.path in ("/model_info", "/server_info"))
        self.reply(200 if known else 404, answers.get(self.path))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        tokens = os.environ.get("STUB_TOKENS", "")
        if tokens == "none":
            self.reply(500, {"message": "Integer exceeds 64-bit range"})
        else:
            self.reply(200, {"tokens": [int(token) for token in tokens.split(",") if token]})

    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


def main():
    """Die, or serve until killed."""
    if "-c" in sys.argv:
        print(json.dumps([uuid for uuid in os.environ.get("STUB_GPUS", "").split(",") if uuid]))
        return
    starts = Path(os.environ["STUB_STARTS"])
    with starts.open("a") as file:
        file.write("x")
    if str(len(starts.read_text())) in os.environ.get("STUB_FAIL", "").split(","):
        sys.exit(os.environ.get("STUB_ERROR", "ValueError: bad flag"))
    if "STUB_HANG" in os.environ:
        print("loading weights", flush=True)
        time.sleep(3600)
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    pids = Path(os.environ["STUB_PIDS"])
    pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    pids.with_suffix(".new").rename(pids)
    ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
