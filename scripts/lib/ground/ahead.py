"""Work that threads do before it is asked for."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Wanted = TypeVar("Wanted")
Made = TypeVar("Made")


def ahead(pool: ThreadPoolExecutor, make: Callable[[Wanted], Made], wanted: Sequence[Wanted], count: int) -> Iterator[Made]:
    """`make` of each of `wanted`, in order; up to `count` are in the making."""
    waiting = [pool.submit(make, one) for one in wanted[:count]]
    for place in range(len(wanted)):
        made = waiting.pop(0).result()
        if place + count < len(wanted):
            waiting.append(pool.submit(make, wanted[place + count]))
        yield made
