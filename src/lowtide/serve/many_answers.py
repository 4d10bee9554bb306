"""Several answers of one request, told as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(
    sources: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """What each brings as it comes, with its place among them. All end when one fails."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, source)) for index, source in enumerate(sources)]
    try:
        num_left = len(tasks)
        while num_left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
