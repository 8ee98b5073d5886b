"""Drives a sequencer in an event loop: rounds while there is work, longer and longer sleeps while there is none.

Told to stop, it brings everything that is ordered onto disks, and seals.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import numpy as np

from embarcadero.limits import MIB
from embarcadero.sequencer.state import Sequencer

_WAIT_S_FIRST: Final = 0.002
_DRAIN_WAIT_S: Final = 0.005
_DEEP_BATCHES: Final = 4
_GATHER_S_PER_BATCH: Final = 0.000_5
_GATHER_S_LEAST: Final = 0.001
_KEPT_BYTES: Final = 24 * MIB


class Bell(Protocol):
    """A doorbell that can be waited for."""

    @property
    def rung(self) -> bool: ...
    async def wait(self, timeout_s: float) -> None: ...


def keep_freed_memory() -> None:
    """Let the C library keep the arrays of a round for the next one.

    It gives freed memory back to the system unless it has seen a larger block come and go; getting it again costs a
    page fault for every 64 entries, a fifth of a large round's time.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)


def _gathering_s(sequencer: Sequencer) -> float:
    """How long entries shall gather before the next round."""
    if sequencer.depth >= _DEEP_BATCHES:
        return _GATHER_S_PER_BATCH * sequencer.depth
    return _GATHER_S_LEAST if sequencer.behind() else 0.0


async def serve_sequencer(sequencer: Sequencer, bell: Bell, stop: asyncio.Event) -> None:
    """Run rounds until stopped or deposed.

    A round costs nearly the same for one entry or a hundred. While all publishers have many batches in flight, nobody
    waits for this very answer: entries gather for a fraction of the time that the publishers' windows last, and brokers
    need not ring. When entries come faster than rounds are done, they gather for a moment. Otherwise each ring is a
    round.
    """
    keep_freed_memory()
    idle_wait_s, gather_s = sequencer.settings.idle_wait_ms / 1_000, sequencer.settings.gather_ms / 1_000
    wait_s = _WAIT_S_FIRST
    while not stop.is_set() and not sequencer.deposed:
        while sequencer.problems:
            sequencer.journal.warn("broken ring", problem=sequencer.problems.pop(0))
        worked = sequencer.round()
        if sequencer.more:
            await asyncio.sleep(0)
            continue
        if worked and (wait := _gathering_s(sequencer)):
            sequencer.awake(True)
            await asyncio.sleep(min(wait, gather_s))
            continue
        if sequencer.awake(False):
            continue  # what came since the last round did not ring
        wait_s = _WAIT_S_FIRST if worked else min(2 * wait_s, idle_wait_s)
        await bell.wait(wait_s)
    while not sequencer.drain():
        await bell.wait(_DRAIN_WAIT_S)
    if sequencer.deposed:
        sequencer.journal.warn("deposed", reason="a later epoch is open")
    else:
        sequencer.journal.note("left", epoch=sequencer.epoch, waiting=sequencer.held.used)
