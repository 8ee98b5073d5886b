"""Worker threads of a simulated process: jobs take time, and run while the process is in the middle of its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from embarcadero_proof.sim.process import Crash

if TYPE_CHECKING:
    from embarcadero_proof.sim.roles import Poller

T = TypeVar("T")

_LOOK_AGAIN_US: Final = 250_000


class SimWorkers:
    """Runs jobs beside one process, each after a delay. `delay_us` returns the delay of the next job."""

    def __init__(self, process: Poller, delay_us: Callable[[], int]) -> None:
        self._process, self._delay_us = process, delay_us

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        self._process.world.queue.after(self._delay_us(), lambda: self._work(job, done))

    def _work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        process, world = self._process, self._process.world
        if not process.alive:
            return
        if process.paused:  # its threads are stopped too; it may continue earlier than planned
            again_us = min(process.paused_until_us, world.queue.now_us + _LOOK_AGAIN_US)
            world.queue.at(again_us, lambda: self._work(job, done))
            return
        world.running.append(process)
        try:
            result: T | Exception = job()
        except Crash:
            if not world.over():
                process.die()
            return
        except Exception as error:
            result = error
        finally:
            world.running.pop()
        process.submit(lambda: self._deliver(result, done))

    def _deliver(self, result: T | Exception, done: Callable[[T | Exception], None]) -> None:
        done(result)
        self._process.wake(0)
