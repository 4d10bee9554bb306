"""`Together`: small work of many requests, done by one thread in turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from lowtide.serve.together import MOST, Together


def test_each_gets_its_own_outcome() -> None:
    threads: list[int] = []

    def work(number: int) -> int:
        threads.append(threading.get_ident())
        if number % 5 == 3:
            raise ZeroDivisionError(number)
        return number * number

    async def ask() -> None:
        together = Together(work)
        asked = [together(number) for number in range(3 * MOST)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            if number % 5 == 3:
                assert isinstance(outcome, ZeroDivisionError) and outcome.args == (number,)
            else:
                assert outcome == number * number

    asyncio.run(ask())
    assert threading.get_ident() not in threads and len(threads) == 3 * MOST


def test_the_first_are_told_before_the_last_are_done() -> None:
    may_end = threading.Event()

    def work(number: int) -> int:
        if number == MOST:
            assert may_end.wait(60)
        return number

    async def ask() -> None:
        together = Together(work)
        tasks = [asyncio.ensure_future(together(number)) for number in range(2 * MOST)]
        await asyncio.gather(*tasks[:MOST])
        assert not any(task.done() for task in tasks[MOST:])
        may_end.set()
        assert await asyncio.gather(*tasks) == list(range(2 * MOST))

    asyncio.run(ask())


def test_what_nobody_waits_for_is_not_begun_and_delays_nobody() -> None:
    done: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.01)
        done.append(number)
        return number

    async def ask() -> None:
        together = Together(work)
        tasks = [asyncio.ensure_future(together(number)) for number in range(3 * MOST)]
        await tasks[0]
        for task in tasks[2 * MOST :]:
            task.cancel()
        assert await asyncio.gather(*tasks[: 2 * MOST]) == list(range(2 * MOST))
        assert await together(7) == 7

    asyncio.run(ask())
    assert done == [*range(2 * MOST), 7]


@pytest.mark.parametrize("end", [asyncio.CancelledError, KeyboardInterrupt])
def test_an_event_loop_that_ended_in_between_leaves_it_whole(end: type[BaseException]) -> None:

    def slow(number: int) -> int:
        time.sleep(0.05)
        return number

    together = Together(slow)

    def run(work: Callable[[], object]) -> None:
        async def ask() -> None:
            asked = asyncio.ensure_future(together(1))
            await asyncio.sleep(0.01)
            work()
            assert await asked == 1

        asyncio.run(ask())

    def stop() -> None:
        raise end

    with pytest.raises(end):
        run(stop)
    run(lambda: None)
