"""Drives a replica in an event loop: passes while there is work; else it sleeps until somebody rings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from embarcadero.replica.replica import Replica


class ReplicaBell(Protocol):
    """A doorbell that can be waited for."""

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None: ...


async def serve_replica(replica: Replica, bell: ReplicaBell, stop: asyncio.Event) -> None:
    """Run until stopped or deposed. What was appended is synced before it ends."""
    idle_wait_s = replica.settings.idle_wait_ms / 1_000

    def rung() -> bool:
        return replica.poll() or replica.deposed

    try:
        while not stop.is_set() and not replica.deposed:
            moved = replica.poll()
            await bell.wait(0 if moved else idle_wait_s, rung)
        if replica.deposed:
            replica.journal.warn("deposed", reason="it was taken for dead, or replaced")
        else:
            replica.journal.note("left", commits=replica.counters.commits, entries=replica.counters.entries)
    finally:
        replica.close()
