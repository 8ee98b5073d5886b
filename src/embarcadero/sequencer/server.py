"""Drives a sequencer in an event loop: rounds while there is work, longer and longer sleeps while there is none.

Told to stop, it brings everything that is ordered onto disks, and seals. A candidate that does not reign sleeps, looks
after the one that does, and takes over when that one is gone; a deposed sequencer is such a candidate again.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final, Protocol

import numpy as np

from embarcadero.limits import HAND_OVER_S_MAX, MIB
from embarcadero.sequencer.candidate import Candidate
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


class Throne(Protocol):
    """What the driver of a candidate needs from its process."""

    def follow(self, mark: str) -> None:
        """Have the candidate told, and woken, when this process ends."""
        ...

    def prepare(self, epoch: int) -> bool:
        """Have one thing more ready for a takeover from this epoch; True if there may be more to do."""
        ...

    def take(self, epoch: int) -> tuple[Sequencer, Bell]:
        """Take over, and listen to the sequencer's bell."""
        ...

    def give_up(self) -> None:
        """The reign is over: listen to that bell no more."""
        ...

    def successor(self) -> bool:
        """Ask another candidate to take over, since we leave; False if there is none, or if all of it stops."""
        ...


async def serve_candidate(candidate: Candidate, throne: Throne, bell: Bell, stop: asyncio.Event) -> None:
    """Stand by and reign in turn, until told to stop."""
    while not stop.is_set():
        epoch = candidate.look()
        throne.follow(candidate.watched)
        if epoch is None:
            busy = throne.prepare(candidate.reigning)
            await bell.wait(0 if busy else candidate.wait_us() / 1_000_000)
            continue
        sequencer, its_bell = throne.take(epoch)
        throne.follow("")
        await _reign(sequencer, its_bell, throne, stop)
        throne.give_up()
        del sequencer
        gc.collect()  # its regions are memory that nobody else may have any more


async def _reign(sequencer: Sequencer, bell: Bell, throne: Throne, stop: asyncio.Event) -> None:
    """Until it is deposed, or told to stop: then somebody else reigns before it leaves, if there is somebody."""
    end = asyncio.Event()
    reign = asyncio.create_task(serve_sequencer(sequencer, bell, end))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({reign, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not reign.done() and throne.successor():
            await asyncio.wait({reign}, timeout=HAND_OVER_S_MAX)
        end.set()
        await reign
    finally:
        reign.cancel()
        stopping.cancel()
