"""Single questions to a server over HTTP, by the standard library alone: what starts and watches servers needs no more."""

import http.client
import json
import urllib.request
from collections.abc import Mapping
from typing import Any

ANSWER_SECONDS = 300.0  # /server_info waits for the step in progress, and a busy CPU is slow


def healthy(url: str, seconds: float) -> bool:
    """Whether the server at `url` answers within `seconds` that it can generate; SGLang takes one for a token of its own."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def get(url: str) -> bytes:
    """What `url` answers to a GET. Raises OSError when that is no answer of status 200."""
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
        body: bytes = answer.read()
        return body


def request(url: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON that `url` answers to a GET, or to a POST of `body`. Raises OSError or ValueError when there is none."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
        return json.loads(answer.read())
