"""Worker threads beside an event loop."""

from __future__ import annotations

import asyncio
import threading

from embarcadero.node.env import ThreadWorkers


def test_jobs_run_elsewhere_and_their_results_come_back_here() -> None:
    """A job never runs on the loop's thread, `done` always does, and errors arrive as values."""

    async def run() -> list[object]:
        told: list[object] = []
        finished = asyncio.Event()
        workers = ThreadWorkers(2, "test", finished.set)
        here = threading.get_ident()
        workers.run(threading.get_ident, lambda where: told.append(where != here and threading.get_ident() == here))
        workers.run(lambda: 1 // 0, lambda result: told.append(type(result)))
        while len(told) < 2:
            await asyncio.wait_for(finished.wait(), 60)
            finished.clear()
        workers.close()
        return told

    assert set(asyncio.run(run())) == {True, ZeroDivisionError}


def test_nothing_is_reported_after_the_end() -> None:
    """Closing waits for the running job, and drops its result: the role is gone."""

    async def run() -> list[object]:
        told: list[object] = []
        began, go_on = threading.Event(), threading.Event()
        workers = ThreadWorkers(1, "test")
        workers.run(lambda: began.set() or go_on.wait(60), told.append)
        workers.run(lambda: 1, told.append)
        await asyncio.to_thread(began.wait, 60)
        go_on.set()
        workers.close()
        workers.run(lambda: 2, told.append)
        await asyncio.sleep(0)
        return told

    assert asyncio.run(run()) == []
