"""Asks a server for the states of rows, ahead of those who take them, and again where a crash or a gap lost some."""

import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from scripts.lib.engines.protocol import RowStates, StateRequest
from scripts.lib.ground.errors import StageError
from scripts.lib.serving.running import Running
from scripts.lib.states.hook.aerie_states_hook import request_id
from scripts.lib.states.served_pieces import Inbox

GROUP_TOKENS = 16_384  # of one request, which holds many rows
AHEAD_TOKENS = 131_072  # asked for and not yet taken: keeps the server busy while a shard is checked and written
IN_FLIGHT = 8  # requests
ANSWER_SECONDS = 3600.0
PIECE_SECONDS = 30.0  # without a new file, after the answer: the pieces were lost
POLL_SECONDS = 0.005
PAUSE_SECONDS = 1.0  # while a server starts again
ATTEMPTS = 3  # of a row whose pieces are lost
REFUSALS = 10  # of one request by errors of the server, which may be those of a crash
DONE, AWAY, STARTING = 200, 0, 503  # status of an answer


@dataclass(eq=False)
class Group:
    """Rows of one request of `tokens` in all; `left` of them were not yet taken."""

    answer: "Future[list[RowStates]]"
    tokens: int
    left: int


class Asking:
    """States of rows from one server. Of rows that are announced up to `AHEAD_TOKENS` are asked for before somebody takes them."""

    def __init__(self, running: Running, inbox: Inbox) -> None:
        self.running, self.inbox = running, inbox
        self._coming: Iterator[tuple[StateRequest, ...]] = iter(())
        self._session, self._numbers = uuid.uuid4().hex[:8], itertools.count()  # a server refuses a name that it still works on
        self._open: set[Group] = set()  # with rows that were not yet taken
        self._asked: dict[StateRequest, deque[tuple[Group, int]]] = {}
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="states")

    def announce(self, rows: Iterable[StateRequest]) -> None:
        """After those announced before, `rows` will be taken, in this order."""
        self._coming = itertools.chain(self._coming, grouped(rows))

    def close(self) -> None:
        """Ask for nothing more, also where a server is waited for."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, row: StateRequest) -> RowStates:
        """The states of `row`. Raises StageError when the server is gone for good, or does not give them."""
        self._ask_ahead()
        if row not in self._asked:
            self._submit((row,))
        group, number = self._asked[row].popleft()
        if not self._asked[row]:
            del self._asked[row]
        states = group.answer.result()[number]
        group.left -= 1
        if not group.left:
            self._open.remove(group)
        return states

    def _ask_ahead(self) -> None:
        while sum(group.tokens for group in self._open) < AHEAD_TOKENS and (rows := next(self._coming, None)):
            self._submit(rows)

    def _submit(self, rows: tuple[StateRequest, ...]) -> None:
        group = Group(self._pool.submit(self._states, rows), sum(len(row.input_ids) for row in rows), len(rows))
        self._open.add(group)
        for number, row in enumerate(rows):
            self._asked.setdefault(row, deque()).append((group, number))

    def _states(self, rows: Sequence[StateRequest]) -> list[RowStates]:
        """Ask for `rows` until the states of all are there, each time under new names; in a thread of the pool."""
        made: dict[int, RowStates] = {}
        attempts = refusals = 0
        while len(made) < len(rows):
            names = {f"{self._session}-{next(self._numbers)}": number for number in range(len(rows)) if number not in made}
            self.inbox.expect(list(names))
            status = self._answer({name: rows[number] for name, number in names.items()})
            if status == DONE:
                made |= {names[name]: states for name, states in self._collected({name: rows[number] for name, number in names.items()})}
                attempts += 1
            elif status not in (AWAY, STARTING):
                refusals += 1
            pieces = {number: self.inbox.found(name) for name, number in names.items() if number not in made}
            self.inbox.forget(list(names))
            if pieces and (attempts == ATTEMPTS or refusals == REFUSALS):
                raise self._problem(status, rows, pieces)
            if status != DONE:
                self.running.check()
                if self._closed.wait(PAUSE_SECONDS):
                    raise StageError(f"{self.running.urls[0]}: the server was ended while rows were asked for")
        return [made[number] for number in range(len(rows))]

    def _problem(self, status: int, rows: Sequence[StateRequest], pieces: Mapping[int, list[tuple[int, int]]]) -> StageError:
        """What is said when the states of some `rows` cannot be had; `pieces` of them came."""
        url, remedy = self.running.urls[0], "look at the server's log for errors of aerie-states, and at runtime.server.flags"
        if status != DONE:
            return StageError(f"{url}: answers with status {status}, {REFUSALS} times; {remedy}")
        first, found = next(iter(pieces.items()))
        return StageError(
            f"{url}: the states of {len(pieces)} rows stay incomplete, first one of {len(rows[first].input_ids)} tokens, of which tokens "
            f"{found} came; {remedy}"
        )

    def _collected(self, rows: Mapping[str, StateRequest]) -> Iterator[tuple[str, RowStates]]:
        """Name and states of those of `rows` whose pieces came; waits while files come."""
        missing, files, since = dict(rows), -1, time.monotonic()
        while missing and time.monotonic() - since < PIECE_SECONDS:
            if (now := self.inbox.poll()) == files:
                time.sleep(POLL_SECONDS)
                continue
            files, since = now, time.monotonic()
            for name, row in list(missing.items()):
                states = self.inbox.row(name, row)
                if states:
                    del missing[name]
                    yield name, states

    def _answer(self, rows: Mapping[str, StateRequest]) -> int:
        """The status of the server's answer, DONE when it has seen all of `rows`, AWAY when there is none.

        Raises StageError when it refuses them.
        """
        body = {
            "input_ids": [row.input_ids for row in rows.values()],
            "rid": [request_id(name, ranges(row.final_index)) for name, row in rows.items()],
            "extra_key": list(rows),  # no row finds its beginning in the cache of another
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        }
        url = f"{self.running.urls[0]}/generate"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                answer.read()
                return DONE
        except urllib.error.HTTPError as error:
            if error.code < 500:
                words, longest = error.read().decode(errors="replace")[:400], max(len(row.input_ids) for row in rows.values())
                raise StageError(f"{url}: status {error.code} for rows of up to {longest} tokens: {words}") from error
            return error.code
        except (OSError, http.client.HTTPException):
            return AWAY


def grouped(rows: Iterable[StateRequest]) -> Iterator[tuple[StateRequest, ...]]:
    """Consecutive `rows` of at most `GROUP_TOKENS` tokens, or one longer row."""
    group: list[StateRequest] = []
    tokens = 0
    for row in rows:
        if group and tokens + len(row.input_ids) > GROUP_TOKENS:
            yield tuple(group)
            group, tokens = [], 0
        group.append(row)
        tokens += len(row.input_ids)
    if group:
        yield tuple(group)


def ranges(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending `positions` as half-open ranges."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
