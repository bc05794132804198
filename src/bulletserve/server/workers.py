"""Threads for work that takes too long for an event loop, what takes long apart from what does not.

Knows nothing about the work. Whoever needs little time waits for others who need little, never for a text of megabytes
or a grammar of a thousand parts; among equals it is first come, first served.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Workers:
    """`threads` for work that costs up to `light`, in whatever that is measured, and one for the rest.

    `at_work`: calls in them.
    """

    def __init__(self, name: str, threads: int, light: int) -> None:
        self._light_cost = light
        self._light = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._heavy = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-heavy")
        self.at_work = 0

    def close(self) -> None:
        """End the threads."""
        for pool in (self._light, self._heavy):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], Result], cost: int) -> Result:
        """What `work`, which costs so much, returns."""
        pool = self._light if cost <= self._light_cost else self._heavy
        self.at_work += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self.at_work -= 1
