"""Where more explorers are asked for: an actor that imports nothing heavy."""

import asyncio


class JoinRegistry:
    """Takes what is asked for, and gives it to the run; an actor, found by the run's name."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, int]] = asyncio.Queue(maxsize=64)
        self._told: dict[int, asyncio.Future[int | str]] = {}
        self._number = 0

    async def ask(self, count: int) -> int | str:
        """Ask for more explorers; return how many there are then, or why there are none."""
        self._number += 1
        number = self._number
        self._told[number] = asyncio.get_running_loop().create_future()
        await self._waiting.put((number, count))
        try:
            return await self._told[number]
        finally:
            del self._told[number]

    async def next(self) -> tuple[int, int]:
        """Return what was asked for next: its number, and how many."""
        return await self._waiting.get()

    async def tell(self, number: int, told: int | str) -> None:
        """Answer who asked."""
        future = self._told.get(number)
        if future is not None and not future.done():
            future.set_result(told)
