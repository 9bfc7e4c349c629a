"""Asks one or several servers, each request at the one with the fewest in flight, and knows which of them are up."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.generation.dialects import Answer, BadReplyError, Dialect, Native, OpenAI, Question
from scripts.lib.generation.http import Pool, Reply
from scripts.lib.generation.policy import Policy
from scripts.lib.ground.errors import StageError

log = logging.getLogger(__name__)
PROBE_SECONDS = 30.0
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
OVERLOAD = (429, 503)
AGAIN = (408, 500, 502, 504)
RETRACTED = re.compile(rb"^sglang:num_retracted_re\w*_total(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class FailureError(Exception):
    """A request that brought no answer; `reason` is one word, `pause` the seconds that the server asks to wait."""

    def __init__(self, reason: str, detail: str, pause: float | None = None) -> None:
        super().__init__(detail)
        self.reason, self.pause = reason, pause


@dataclass
class Server:
    """One server and what is known of it."""

    url: str
    pool: Pool
    dialect: Dialect
    in_flight: int = 0
    retracted: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)
    probe: asyncio.Task[None] | None = None


class Client:
    """Sends questions. `check` raises StageError when a server that this process runs is gone for good."""

    def __init__(self, servers: Sequence[Server], policy: Policy, check: Callable[[], None]) -> None:
        self.servers, self.check = servers, check
        self.timeout, self.patience = policy.timeout, policy.patience
        self.failing_since: float | None = None
        self.gone: StageError | None = None

    @classmethod
    async def connect(cls, urls: Sequence[str], template: ChatTemplate, policy: Policy, check: Callable[[], None]) -> "Client":
        """Find out what each of `urls` speaks. Raises StageError when one cannot be reached or speaks neither dialect."""
        return cls([await opened(url, template) for url in urls], policy, check)

    async def ask(self, question: Question) -> Answer:
        """The answer to `question`, from the server that has the least to do. Raises FailureError."""
        server = await self._free_server()
        server.in_flight += 1
        try:
            reply = await server.pool.request("POST", server.dialect.path, server.dialect.body(question), self.timeout)
            answer = server.dialect.answer(question, self._accepted(reply))
        except (FailureError, BadReplyError, OSError) as error:  # TimeoutError is an OSError
            raise self._failure(server, error) from error
        finally:
            server.in_flight -= 1
        self.failing_since = None
        return answer

    async def retractions(self) -> float:
        """Requests that the servers pushed out of their KV cache since the last call; 0 where they do not count them."""
        total = 0.0
        for server in self.servers:
            if server.up.is_set():
                found = await metric(server.pool, RETRACTED)
                total += max(0.0, found - server.retracted)
                server.retracted = found
        return total

    def close(self) -> None:
        """Close the connections and stop looking after servers that are down."""
        for server in self.servers:
            server.pool.close()
            if server.probe:
                server.probe.cancel()

    async def _free_server(self) -> Server:
        """The server with the fewest requests in flight, as soon as one is up."""
        while not (up := [server for server in self.servers if server.up.is_set()]):
            if self.gone:
                raise self.gone
            waits = [asyncio.ensure_future(server.up.wait()) for server in self.servers]
            _, late = await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in late:
                wait.cancel()
        return min(up, key=lambda server: server.in_flight)

    def _accepted(self, reply: Reply) -> Reply:
        """`reply` when its status is 200; else raises FailureError."""
        if reply.status == 200:
            return reply
        detail = f"status {reply.status}: {reply.body[:200].decode(errors='replace')}"
        if reply.status in OVERLOAD:
            raise FailureError("overload", detail, reply.retry_after)
        raise FailureError("server_error" if reply.status in AGAIN else "refused", detail)

    def _failure(self, server: Server, error: Exception) -> FailureError:
        """What `error` means for the request; a broken connection marks the server as down until it answers a probe."""
        if isinstance(error, FailureError):
            failure = error
        elif isinstance(error, BadReplyError):
            failure = FailureError(error.reason, str(error))
        elif isinstance(error, TimeoutError):
            failure = FailureError("timeout", f"no answer from {server.url} within {self.timeout:g} s")
        else:
            failure = FailureError("server_gone" if isinstance(error, ConnectionRefusedError) else "server_lost", f"{server.url}: {error}")
            self._down(server)
        self._still_patient(failure)
        return failure

    def _down(self, server: Server) -> None:
        """Send nothing to `server` until it answers again."""
        server.up.clear()
        if server.probe is None or server.probe.done():
            log.warning("%s does not answer; its requests wait until it does", server.url)
            server.probe = asyncio.create_task(self._until_up(server))

    async def _until_up(self, server: Server) -> None:
        """Ask `server` for its models, at growing intervals, until it answers or is gone for good."""
        wait = FIRST_WAIT
        while not await answers(server.pool, "/v1/models"):
            try:
                await asyncio.to_thread(self.check)
            except StageError as error:
                self.gone = error
                return
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        log.info("%s answers again", server.url)
        self.failing_since = None
        server.up.set()

    def _still_patient(self, failure: FailureError) -> None:
        """Raise StageError when nothing but failures came for too long."""
        now = asyncio.get_running_loop().time()
        self.failing_since = self.failing_since or now
        seconds = now - self.failing_since
        if seconds > self.patience:
            urls = ", ".join(server.url for server in self.servers)
            raise StageError(
                f"{urls}: no answer for {seconds:.0f} s, limit {self.patience:g} s (last: {failure.reason}, {failure}); "
                f"finished answers are kept: bring the server back or raise runtime.requests.patience, and start again"
            )


async def opened(url: str, template: ChatTemplate) -> Server:
    """The server at `url`, once it is clear which dialect it speaks. Raises StageError when it is none that aerie knows."""
    pool = Pool(url)
    server = Server(url, pool, Native(template))
    if not any([await answers(pool, path) for path in ("/server_info", "/get_server_info")]):
        reply = await probe(pool, "/v1/models")
        if reply is None or reply.status != 200:
            raise StageError(f"{url}: no server that answers /server_info or /v1/models; check runtime.server.urls")
        server.dialect = OpenAI(template, orjson.loads(reply.body)["data"][0]["id"])
        log.warning("%s speaks text only: its answers are tokenised again and marked as `retokenised`", url)
    server.up.set()
    return server


async def probe(pool: Pool, path: str) -> Reply | None:
    """The reply to a GET, None when there is none."""
    try:
        return await pool.request("GET", path, b"", PROBE_SECONDS)
    except OSError:
        return None


async def answers(pool: Pool, path: str) -> bool:
    """Whether a GET of `path` is answered with 200."""
    reply = await probe(pool, path)
    return reply is not None and reply.status == 200


async def metric(pool: Pool, pattern: re.Pattern[bytes]) -> float:
    """The sum of a counter of the server's Prometheus page; 0 when the server has none."""
    reply = await probe(pool, "/metrics")
    return sum(map(float, pattern.findall(reply.body))) if reply is not None and reply.status == 200 else 0.0
