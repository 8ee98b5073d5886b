"""Drives a sequencer in an event loop: rounds while there is work, increasing sleeps while there is none.

When asked to stop, it waits until everything ordered is on disks, and seals the ranges. A standby sleeps, watches the
leader, and takes over when the leader is gone. A deposed sequencer becomes a standby again.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from embarcadero.errors import LATER, FabricFull
from embarcadero.limits import HAND_OVER_S_MAX, MIB
from embarcadero.sequencer.leader.sequencer import Sequencer, StandbySequencer

_WAIT_S_FIRST: Final = 0.002
_DRAIN_WAIT_S: Final = 0.005
_DEEP_BATCHES: Final = 4
_GATHER_S_PER_BATCH: Final = 0.000_5
_GATHER_S_LEAST: Final = 0.001
_KEPT_BYTES: Final = 24 * MIB
_TIDY_S: Final = 0.3
_BREATH_S: Final = 0.03
"""Pause before a planned move. Preparation took processor time from brokers; they catch up before the takeover."""


class Bell(Protocol):
    """A doorbell on which the driver can wait."""

    @property
    def rung(self) -> bool: ...
    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None: ...


def keep_freed_memory() -> None:
    """Make the C library keep the memory of a round's arrays for the next round.

    The library returns freed memory to the system unless a larger block was allocated and freed before. Getting the
    memory again costs a page fault for every 64 entries, a fifth of a large round's time.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)
    np.ones(_KEPT_BYTES * 3 // 4, dtype=np.uint8)  # touched once, then kept ready for the tables of a takeover


def _gathering_s(sequencer: Sequencer) -> float:
    """Compute how long entries gather before the next round."""
    if sequencer.depth >= _DEEP_BATCHES:
        return _GATHER_S_PER_BATCH * sequencer.depth
    return _GATHER_S_LEAST if sequencer.behind() else 0.0


class _Rounds:
    """Rounds of one sequencer. The driver starts them, or a ring does while the driver sleeps."""

    def __init__(self, sequencer: Sequencer) -> None:
        self._sequencer = sequencer
        self._unseen: int | None = None  # work of a ring's round, if the driver must continue after it

    def next(self) -> int:
        """Return the work of the round that a ring has just run, or run another round."""
        unseen, self._unseen = self._unseen, None
        return self._sequencer.round() if unseen is None else unseen

    def rung(self) -> bool:
        """Run a round during a sleep. True if the driver must wake up: for more work, or to let entries gather."""
        sequencer, worked = self._sequencer, self._sequencer.round()
        more = bool(sequencer.more or sequencer.deposed or sequencer.problems or (worked and _gathering_s(sequencer)))
        self._unseen = worked if more else None
        return more


async def serve_sequencer(sequencer: Sequencer, bell: Bell, stop: asyncio.Event) -> None:
    """Run rounds until stopped or deposed.

    A round costs nearly the same for one entry or a hundred. While all publishers have many batches in flight, none of
    them waits for the next answer. Then entries gather for a fraction of the time that the publishers' windows last,
    and brokers do not ring. When entries arrive faster than rounds finish, they gather for a moment. Otherwise each
    ring starts a round.
    """
    idle_wait_s, gather_s = sequencer.settings.idle_wait_ms / 1_000, sequencer.settings.gather_ms / 1_000
    wait_s, rounds = _WAIT_S_FIRST, _Rounds(sequencer)
    while not stop.is_set() and not sequencer.deposed:
        while sequencer.problems:
            sequencer.journal.warn("broken ring", problem=sequencer.problems.pop(0))
        worked = rounds.next()
        if sequencer.more:
            await asyncio.sleep(0)
            continue
        if worked and (wait := _gathering_s(sequencer)):
            sequencer.awake(True)
            await asyncio.sleep(min(wait, gather_s))
            continue
        if sequencer.awake(False):
            continue  # entries that arrived since the last round did not ring
        wait_s = _WAIT_S_FIRST if worked else min(2 * wait_s, idle_wait_s)
        await bell.wait(wait_s, rounds.rung)
    while not sequencer.drain():
        await bell.wait(_DRAIN_WAIT_S)
    if sequencer.deposed:
        sequencer.journal.warn("deposed", reason="a later epoch is open")
    else:
        sequencer.journal.note("left", epoch=sequencer.epoch, waiting=sequencer.buffer.used)


class LeaderHost(Protocol):
    """Interface of a standby's process for its driver."""

    def follow(self, mark: str) -> None:
        """Report to the standby, and wake it, when this process ends."""
        ...

    def prepare(self, epoch: int) -> bool:
        """Prepare one more thing for a takeover from this epoch. True if there may be more to prepare."""
        ...

    def take(self, epoch: int) -> tuple[Sequencer, Bell]:
        """Prepare the takeover, while another sequencer may lead, and listen to the sequencer's bell."""
        ...

    def begin(self, sequencer: Sequencer) -> None:
        """Take over."""
        ...

    def fail(self, epoch: int, why: str) -> None:
        """Clean up after a takeover that failed, so that this standby or another one can try again."""
        ...

    def give_up(self) -> None:
        """Stop listening to the sequencer's bell: the leadership is over."""
        ...

    def successor(self) -> bool:
        """Ask another standby to take over, since this process leaves. False if there is none, or the cluster stops."""
        ...


async def serve_standby(standby: StandbySequencer, host: LeaderHost, bell: Bell, stop: asyncio.Event) -> None:
    """Stand by and lead in turn, until asked to stop."""
    keep_freed_memory()
    while not stop.is_set():
        epoch = _look(standby)
        host.follow(standby.watched)
        if epoch is None:
            busy = host.prepare(standby.leading)
            await bell.wait(0 if busy else standby.wait_us() / 1_000_000)
            continue
        try:
            sequencer, its_bell = host.take(epoch)
            host.follow("")
            if not standby.hurries:
                await asyncio.sleep(_BREATH_S)
            host.begin(sequencer)
        except (*LATER, FabricFull) as error:
            if not standby.leading:
                raise  # the command that starts the cluster prints the error
            host.fail(epoch, error.message)
            continue
        await _lead(sequencer, its_bell, host, stop)
        host.give_up()
        del sequencer
        # The memory of its regions can be freed, but later: now the successor needs the processor.
        asyncio.get_running_loop().call_later(_TIDY_S, gc.collect)


def _look(standby: StandbySequencer) -> int | None:
    """Return an epoch that was won. While the store fails there is no election: the next look tries again."""
    try:
        return standby.look()
    except LATER:
        return None


async def _lead(sequencer: Sequencer, bell: Bell, host: LeaderHost, stop: asyncio.Event) -> None:
    """Lead until deposed or asked to stop. Before stopping, hand over to a standby, if there is one."""
    end = asyncio.Event()
    leading = asyncio.create_task(serve_sequencer(sequencer, bell, end))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not leading.done() and host.successor():
            await asyncio.wait({leading}, timeout=HAND_OVER_S_MAX)
        end.set()
        await leading
    finally:
        leading.cancel()
        stopping.cancel()
