"""Drives a sequencer in an event loop: rounds while there is work, longer and longer sleeps while there is none."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

import numpy as np

from embarcadero.limits import MIB
from embarcadero.sequencer.state import Sequencer

_WAIT_S_FIRST: Final = 0.002
_GATHER_SHARE: Final = 2
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


async def serve_sequencer(sequencer: Sequencer, bell: Bell, stop: asyncio.Event) -> None:
    """Run rounds until stopped or deposed."""
    keep_freed_memory()
    idle_wait_s, gather_s = sequencer.settings.idle_wait_ms / 1_000, sequencer.settings.gather_ms / 1_000
    wait_s = _WAIT_S_FIRST
    while not stop.is_set() and not sequencer.deposed:
        while sequencer.problems:
            sequencer.journal.warn("broken ring", problem=sequencer.problems.pop(0))
        began = time.monotonic()
        wait_s = _WAIT_S_FIRST if sequencer.round() else min(2 * wait_s, idle_wait_s)
        spent = time.monotonic() - began
        await asyncio.sleep(0)
        if sequencer.more:
            continue
        if bell.rung:  # more came during the round: let some of it gather, a round costs the same for one or a hundred
            await asyncio.sleep(min(_GATHER_SHARE * spent, gather_s))
        await bell.wait(wait_s)
    if sequencer.deposed:
        sequencer.journal.warn("deposed", reason="a later epoch is open")
    else:
        sequencer.journal.note("left", epoch=sequencer.epoch, waiting=sequencer.held.used)
