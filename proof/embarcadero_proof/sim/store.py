"""The store as one process reaches it: immediately, after a wait for a lock, or not at all.

It fails like the embedded store. When it is locked, writers wait for a time and then get a typed error. When it is
down, it answers no request. A leader continues and asks again later. Another role that gets such an error in its own
work ends, and its supervisor starts it again.
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
    """The store of one process. Set `locked_until_us` or `down_until_us` to cause the fault."""

    def __init__(self, store: MemoryStore, process: Process) -> None:
        self._store, self._process = store, process
        self.locked_until_us = self.down_until_us = 0
        self.revision = store.revision  # the cheap check of every poll: each action on its answer makes a call below

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
        """Wait until the store can be reached, but not for long; all other processes continue meanwhile."""
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
