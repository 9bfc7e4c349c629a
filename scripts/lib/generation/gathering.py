"""Lets places that became free be filled together."""

import asyncio


class Gathering:
    """Holds a free place back until enough are free, or the first of them has waited for `seconds`.

    A server stops decoding all its requests for each batch of new prompts, however few they are: a small target on a GPU takes half a
    decode step for one prompt or for thirty. Places refilled one by one interrupt nearly every step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.free: list[asyncio.Future[None]] = []
        self.alarm: asyncio.TimerHandle | None = None

    async def wait(self, size: int) -> None:
        """Return when the caller's place may be filled: at once, or as one of `size` or fewer."""
        if size < 2 or not self.seconds:
            return
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self.free.append(place)
        if len(self.free) >= size:
            self.release()
        elif self.alarm is None:
            self.alarm = loop.call_later(self.seconds, self.release)
        await place

    def release(self) -> None:
        """Let all places be filled that are free now."""
        if self.alarm:
            self.alarm.cancel()
            self.alarm = None
        places, self.free = self.free, []
        for place in places:
            if not place.done():  # its task was cancelled
                place.set_result(None)
