"""The sequencer alone: rounds over real rings, without sockets. Only rounds are timed; writing the input is not.

Four brokers, 64 sessions. In order, a session's batches come through one broker; reordered, they are spread over all
brokers and a fraction of them is late by up to 64 positions, so that some wait for the next round.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.config import FabricSizes
from embarcadero.env import Env, SystemClock
from embarcadero.errors import invariant
from embarcadero.fabric.layout import (
    PENDING,
    RESULT,
    RING_FRONTIER_OFFSET,
    BrokerLine,
    Entries,
    RegionKind,
    frontier_offset,
    pick,
)
from embarcadero.fabric.leader import create_epochs
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, attach_ring, create_ring
from embarcadero.fabric.log import create_log
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.shared import SharedFabric
from embarcadero.limits import KIB, SESSION_WINDOW
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.sequencer.leader.sequencer import Sequencer, lead
from embarcadero.sequencer.leader.server import keep_freed_memory
from embarcadero.types import NO_SESSION, EntryKind, Member, Outcome
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import Seat, alone
from embarcadero_proof.lab.trial import Announce, Trial

_BROKERS: Final = 4
_SESSIONS: Final = 64
_LATE_MAX: Final = 64
_WARM_UP_ROUNDS: Final = 8
_SIZES: Final = FabricSizes(log_bytes=64 * KIB, chunk_bytes=8 * KIB)


class _Feeder:
    """A broker reduced to its rings: it publishes entries and reads answers."""

    def __init__(self, fabric: Fabric, member: Member, epoch: int) -> None:
        prefix = member.region_prefix
        frontiers, _ = create_log(fabric, prefix, _SIZES, member.broker, member.incarnation)
        self._pending = create_ring(fabric, f"{prefix}/pending", RegionKind.PENDING, PENDING, _SIZES.pending_slots)
        self._read = FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_READ))
        FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH)).advance(epoch)
        self._fabric = fabric
        self._results_name = f"epoch-{epoch}/results-{member.broker}.{member.incarnation}"

    def publish(self, entries: Entries) -> None:
        self._pending.write(entries, self._pending.next + len(entries) - self._pending.slots)
        self._pending.publish()

    def attach(self) -> None:
        self._results = attach_ring(self._fabric, self._results_name, RESULT, "position")
        self._published = FrontierReader(self._results.region, RING_FRONTIER_OFFSET)

    def answers(self) -> Entries:
        """Return the answers since the last call."""
        end = self._published.load()
        found = self._results.read(self._read.value, end)
        self._read.advance(end)
        return found


def sequencer_alone(seconds: float, order: int, reorder_fraction: float = 0.0, striped: bool | None = None) -> float:
    """Return the batches ordered per second of round time, on one core."""
    keep_freed_memory()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        directory = Directory(MemoryStore())
        fabric = SharedFabric(Path(folder), directory.generation)
        create_epochs(fabric)
        lane = directory.topics.create("bench", order=order).lane
        members = [directory.members.register(number, "localhost", 1, 1) for number in range(_BROKERS)]
        sequencer = lead(Env(SystemClock()), fabric, directory, _SIZES)
        feeders = [_Feeder(fabric, member, sequencer.epoch) for member in members]
        sequencer.round()
        for feeder in feeders:
            feeder.attach()
        handles = _open_sessions(sequencer, feeders, lane)
        spread = reorder_fraction > 0 if striped is None else striped
        return _measure(sequencer, feeders, _Load(lane, handles, reorder_fraction, spread), seconds)


def _open_sessions(sequencer: Sequencer, feeders: list[_Feeder], lane: int) -> npt.NDArray[np.uint32]:
    asks = np.zeros(_SESSIONS, dtype=PENDING)
    asks["kind"], asks["session"], asks["lane"] = EntryKind.SESSION_OPEN, NO_SESSION, lane
    feeders[0].publish(asks)
    sequencer.round()
    opened = feeders[0].answers()
    invariant(bool((opened["outcome"] == Outcome.OPENED).all()), "all sessions are open")
    return opened["session"].astype(np.uint32)


class _Load:
    """Makes the entries of each round. A late batch is sent after up to 64 later batches of its session."""

    def __init__(self, lane: int, handles: npt.NDArray[np.uint32], fraction: float, spread: bool) -> None:
        self._lane, self._handles, self._fraction, self._spread = lane, handles, fraction, spread
        self._per_round = SESSION_WINDOW - (_LATE_MAX if fraction else 0)
        self._rng = np.random.default_rng(1)
        self._next = 0
        self._carried = np.empty((3, 0), dtype=np.int64)

    def round(self) -> list[Entries]:
        """Return the entries of one round, by broker."""
        start, stop = self._next, self._next + self._per_round
        self._next = stop
        seqs = np.repeat(np.arange(start, stop), _SESSIONS)
        sessions = np.tile(np.arange(_SESSIONS), self._per_round)
        late = self._rng.random(len(seqs)) < self._fraction
        when = seqs + late * self._rng.integers(1, _LATE_MAX + 1, len(seqs))
        rows = np.concatenate([self._carried, np.stack([when, seqs, sessions])], axis=1)
        now = rows[0] < stop
        self._carried = rows[:, ~now]
        _, seqs, sessions = rows[:, now][:, np.argsort(rows[0][now], kind="stable")]
        entries = np.zeros(len(seqs), dtype=PENDING)
        entries["kind"], entries["lane"], entries["count"] = EntryKind.BATCH, self._lane, 1
        entries["session"], entries["session_seq"] = self._handles[sessions], seqs
        entries["low"] = max(0, start - (_LATE_MAX if self._fraction else 0))
        brokers = (seqs + sessions if self._spread else sessions) % _BROKERS
        return [pick(entries, brokers == broker) for broker in range(_BROKERS)]


def _measure(sequencer: Sequencer, feeders: list[_Feeder], load: _Load, seconds: float) -> float:
    taken, spent, rounds = 0, 0.0, 0
    while spent < seconds or rounds <= _WARM_UP_ROUNDS:
        for feeder, entries in zip(feeders, load.round(), strict=True):
            feeder.publish(entries)
        began = time.perf_counter()
        count = sequencer.round()
        if rounds >= _WARM_UP_ROUNDS:
            spent += time.perf_counter() - began
            taken += count
        rounds += 1
        for feeder in feeders:
            invariant(bool((feeder.answers()["outcome"] == Outcome.ORDERED).all()), "every batch was ordered")
    return taken / spent


def _alone(seat: Seat, seconds: float, order: int, reorder_fraction: float) -> float:  # noqa: ARG001 - it does not wait for others
    return sequencer_alone(seconds, order, reorder_fraction)


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure order 5 in order and half reordered, and order 2; each in its own process."""
    for name, order, reordered in (("order5", 5, 0.0), ("order5_reordered", 5, 0.5), ("order2", 2, 0.0)):
        announce(f"sequencer alone, {name.replace('_', ', ')}")
        trial.values[f"sequencer_{name}"] = alone(_alone, settings.sequencer_s, order, reordered)
