"""The store as one process reaches it: at once, after a wait for a lock, or not at all.

As with the embedded store: a locked one makes writers wait for so long, and then they get a typed error; one that is
down answers no request. A leader goes on and asks again later; another role that gets such an error in its
own work ends, and is started again by its supervisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embarcadero.errors import Backpressure
from embarcadero.limits import STORE_BUSY_S
from embarcadero.placement.store import Check, Item, Items, MemoryStore, Outline, Write
from embarcadero_proof.sim.process import INTERRUPT_DEPTH_MAX, STORE_SAYS

if TYPE_CHECKING:
    from embarcadero_proof.sim.process import Process

_BUSY_US = int(STORE_BUSY_S * 1e6)


class SimStore:
    """What one process has of the store. `locked_until_us` and `down_until_us`: set them, and it is so."""

    def __init__(self, store: MemoryStore, process: Process) -> None:
        self._store, self._process = store, process
        self.locked_until_us = self.down_until_us = 0
        self.revision = store.revision  # the cheap question in every poll: its answer is acted on by a call below

    def get(self, key: str) -> Item | None:
        self._reach(self.down_until_us)
        return self._store.get(key)

    def list(self, prefix: str) -> Items:
        self._reach(self.down_until_us)
        return self._store.list(prefix)

    def outline(self, but: Sequence[str]) -> Outline:
        self._reach(self.down_until_us)
        return self._store.outline(but)

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        self._reach(max(self.down_until_us, self.locked_until_us if writes else 0))
        return self._store.transact(checks, writes)

    def grant(self, ttl_s: float, pid: int = 0) -> int:
        self._reach(max(self.down_until_us, self.locked_until_us))
        return self._store.grant(ttl_s, pid)

    def keep_alive(self, lease: int) -> bool:
        self._reach(max(self.down_until_us, self.locked_until_us))
        return self._store.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        self._reach(max(self.down_until_us, self.locked_until_us))
        self._store.revoke(lease)

    def expire(self) -> bool:
        self._reach(max(self.down_until_us, self.locked_until_us))
        return self._store.expire()

    def close(self) -> None:
        pass

    def _reach(self, until_us: int) -> None:
        """Wait until it can be reached, but not for long; everybody else goes on meanwhile."""
        world = self._process.world
        if world.queue.now_us >= until_us or world.healed or self._process not in world.running:
            return
        down = until_us == self.down_until_us
        if not down and world.running[-1] is self._process and len(world.running) <= INTERRUPT_DEPTH_MAX:
            world.note(self._process.name, "waits for the store")
            self._process.interrupt(min(_BUSY_US, until_us - world.queue.now_us))
        if world.queue.now_us < until_us and not world.healed:
            world.note(self._process.name, "can't reach the store")
            raise Backpressure(STORE_SAYS, "try again")
