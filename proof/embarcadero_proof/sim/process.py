"""A simulated process: it gets work, crashes, pauses, and is interrupted between two memory primitives.

Theory of operation. Role code is ordinary Python that runs to its end. To let other processes run in the middle of it,
the simulation runs the event queue *inside* an interrupt, which a primitive of the simulated memory calls. Meanwhile
the interrupted process is busy: its input waits in its backlog, as in a socket's buffer. A crash in the middle is an
exception that no role code catches; a pause in the middle is a long interrupt.
"""

from __future__ import annotations

import random
import traceback
from collections import deque
from typing import TYPE_CHECKING

from embarcadero.errors import Backpressure
from embarcadero_proof.sim.events import Action, SimClock
from embarcadero_proof.sim.history import Died, RoleFailed

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

INTERRUPT_DEPTH_MAX = 3

STORE_SAYS = "the store does not answer"
"""The message of an unreachable store's error."""


class Crash(BaseException):
    """Ends the running process at this instruction."""


class Process:
    """One process on one host. Subclasses add a role."""

    role = "process"

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name, self.host = world, name, host
        self._queue = world.queue
        self.rng = random.Random(f"{world.seed}:{name}")
        self.clock = SimClock(world.queue, self.rng)
        self.alive = True
        self.paused_until_us = 0
        self._busy = False
        self.actions = 0  # how many it has run
        world.processes.append(self)
        self._backlog: deque[Action] = deque()

    # --- work given to it ---------------------------------------------------------------------------------------------
    def submit(self, action: Action) -> None:
        """Run an action in this process now, or as soon as it can."""
        if not self.alive:
            return
        self._backlog.append(action)
        if not self._busy and not self.paused:
            self._work()

    @property
    def paused(self) -> bool:
        """Whether it is stopped now (SIGSTOP)."""
        return self._queue.now_us < self.paused_until_us

    def _work(self) -> None:
        self._busy = True
        backlog, running = self._backlog, self.world.running
        running.append(self)
        try:
            while backlog and self.alive and not self.paused:
                self.actions += 1
                backlog.popleft()()
                self.after_action()
        except Crash:
            if not self.world.over():
                self.die()
        except Exception as error:
            if isinstance(error, Backpressure) and error.message == STORE_SAYS:
                self.world.note(self.name, f"ends: {error}")  # as a real role does; the supervisor starts it again
                self.die()
                return
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            self.world.seen(RoleFailed(at=self.world.queue.now_us, process=self.name, error=what))
            self.world.failures.append(traceback.format_exc())
            self.die()
        finally:
            running.pop()
            self._busy = False

    def after_action(self) -> None:
        """Hook: called after each action."""

    # --- faults -------------------------------------------------------------------------------------------------------
    def interrupt(self, for_us: int) -> None:
        """Run the event queue for a while in the middle of this process's work."""
        queue = self.world.queue
        until_us = queue.now_us + for_us
        queue.run(until_us, self.world.over)
        while self.alive and self.paused and not self.world.over():
            queue.run(self.paused_until_us, lambda: self.world.over() or not self.paused)
        if not self.alive or self.world.over():
            raise Crash

    def pause(self, for_us: int) -> None:
        """Stop the process for a while."""
        self.paused_until_us = max(self.paused_until_us, self.world.queue.now_us + for_us)
        self.world.queue.at(self.paused_until_us, self._resume)

    def unpause(self) -> None:
        """Let the process continue now."""
        self.paused_until_us = 0
        self._resume()

    def _resume(self) -> None:
        if self.alive and not self.paused and not self._busy:
            self._work()

    def die(self, silently: bool = False) -> None:
        """End permanently. A process in the middle of an action ends when control returns to it.

        `silently`: the host is gone too, so its connections are not reset.
        """
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        self.world.seen(Died(at=self.world.queue.now_us, process=self.name))
        self.world.trace.note(self.world.queue.now_us, self.name, "dies")
        self.on_death(silently)

    def on_death(self, silently: bool) -> None:
        """Hook: the effects that others notice."""
