"""The time by which silence is measured. Tests have a clock of their own, which goes when they say so."""

import asyncio
import time
from contextlib import suppress


class Clock:
    """Seconds that only go forward, and waiting by them."""

    def now_s(self) -> float:
        return time.monotonic()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when the event is set, or when so much time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
