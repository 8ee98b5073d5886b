"""A sequencer in its process: regions prepared while it stands by, resources opened when it leads.

Also the planned hand-over: a standby becomes the leader while the earlier leader still works.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from embarcadero.config import FabricSizes
from embarcadero.config.table import SequencerKeys as Settings
from embarcadero.env import Env, Steps, SystemClock, Workers
from embarcadero.errors import LATER, BadValue, ClusterError, EmbarcaderoError
from embarcadero.fabric.region import Fabric, epoch_folder
from embarcadero.fabric.shared import SharedFabric
from embarcadero.limits import HAND_OVER_S_MAX, STANDBY_SPARE_BYTES_MAX
from embarcadero.liveness import process_mark
from embarcadero.node.env import PipeBell, ProcessWatch, ring_once
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import candidate_role
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import open_store
from embarcadero.sequencer.leader.leadership import ClusterParts
from embarcadero.sequencer.leader.sequencer import Sequencer, StandbySequencer, give_up_epoch
from embarcadero.sequencer.leader.takeover import rehearse
from embarcadero.sequencer.ranges.recovery_sources import Mirrors
from embarcadero.storage.disk import RealDisk
from embarcadero.types import ReplicaMember
from embarcadero.watch.logs import LogJournal
from embarcadero.watch.metrics import WatchedCandidate

_BELL = "sequencer"
_REST_US = 500_000


def candidate_bell(candidate: int) -> str:
    """The bell that wakes a standby."""
    return f"candidate-{candidate}"


class SharedState(NamedTuple):
    """State shared by the leader and all standbys of a cluster: the fabric, in its parts, and the store."""

    fabric: Fabric
    parts: Sequence[SharedFabric]
    directory: Directory
    sizes: FabricSizes
    mirrors: Mirrors


class ProcessServices(NamedTuple):
    """Services of a process for its sequencer."""

    bell: PipeBell
    threads: Callable[[Callable[[], None]], Workers]
    """(callback when a job is done) -> worker threads beside the sequencer"""
    steps: Steps
    disks: Callable[[ReplicaMember], RealDisk]
    rank: Callable[[bool], None]
    """Raise the scheduling priority of this process (True), or restore it (False)"""


class Standby:
    """A sequencer candidate from the start of its process until `close`; sequencer/leader/server.py calls it."""

    def __init__(self, number: int, settings: Settings, shared: SharedState, process: ProcessServices) -> None:
        self._settings, self._shared, self._process = settings, shared, process
        self._directory, self._bell, self._rank = shared.directory, process.bell, process.rank
        self._clock = SystemClock()
        self._name = candidate_role(number)
        self._journal = LogJournal(self._name)
        mark = process_mark(os.getpid())
        shared.directory.elections.register(number, mark, os.getpid())
        self._cluster = ClusterParts(shared.fabric, shared.directory, shared.sizes, shared.mirrors)
        env, after_us = Env(self._clock, process.bell, self._journal), int(settings.takeover_after_ms * 1_000)
        self.candidate = StandbySequencer(env, self._cluster, number, mark, after_us)
        self._watch = ProcessWatch(self._ended)
        self._rest_us = 0  # prepare nothing before this time
        self._rehearsed = 0  # the epoch whose takeover was rehearsed last
        self._heard: PipeBell | None = None  # the sequencer's bell, while this process leads
        self._workers: Workers | None = None
        self.watched = WatchedCandidate(number, self._clock)

    def follow(self, mark: str) -> None:
        """Wake the standby when the process with this mark ends."""
        self._watch.follow(mark)

    def _ended(self, mark: str) -> None:
        self.candidate.process_ended(mark)
        self._bell.wake()

    def _wake(self) -> None:
        """Wake the leader after a job of its workers."""
        if self._heard is not None:
            self._heard.wake()

    def prepare(self, epoch: int) -> bool:
        """Prepare one more spare region once a takeover has settled. When all are ready, rehearse the takeover."""
        if self._clock.now_us() < self._rest_us or not epoch:
            return False
        if any(part.keep_spares(epoch_folder(epoch), STANDBY_SPARE_BYTES_MAX) for part in self._shared.parts):
            return True
        if self._rehearsed != epoch:
            self._rehearsed = epoch
            self._rehearse()
        return False

    def _rehearse(self) -> None:
        with contextlib.suppress(EmbarcaderoError):  # it warms caches; the result does not matter
            members, topics = self._directory.members.all(), self._directory.topics.all()
            rehearse(
                self._shared.fabric, self.candidate.leading, members, topics, self._shared.sizes, self._clock.now_us()
            )

    def take(self, epoch: int) -> tuple[Sequencer, PipeBell]:
        """Prepare to take over. If no sequencer leads, raise the scheduling priority first."""
        if self.candidate.hurries:
            self._rank(True)
        self._heard = bell = PipeBell(self._shared.parts[0].folder, _BELL)
        self._workers = self._workers or self._process.threads(self._wake)
        sequencer = Sequencer(
            Env(self._clock, bell, self._journal, self._workers, self._process.steps, self._process.disks),
            self._cluster,
            self._settings,
            epoch,
        )
        return sequencer, bell

    def begin(self, sequencer: Sequencer) -> None:
        """Take over."""
        self._rank(True)
        sequencer.begin()
        self.watched.lead(sequencer)
        self._journal.rename(self.watched.name)
        asyncio.get_running_loop().call_later(_REST_US / 1_000_000, self._give_up_spares)

    def _give_up_spares(self) -> None:
        if self._heard is not None:
            for part in self._shared.parts:
                part.give_up_spares()

    def fail(self, epoch: int, why: str) -> None:
        """Release the memory of a failed takeover, including spares."""
        self._journal.warn("takeover failed", epoch=epoch, reason=why, then="trying again later")
        self.give_up()
        for part in self._shared.parts:
            part.give_up_spares()
        with contextlib.suppress(*LATER):  # on failure the next leader removes the epoch
            give_up_epoch(self._shared.fabric, self._directory, epoch)

    def give_up(self) -> None:
        """Stop listening to the sequencer's bell. Rings for the leader may have arrived here: ring once for it."""
        self._rank(False)
        if self._heard is not None:
            self._heard.close()
            self._heard = None
            self._bell.ring(_BELL)
        self._rest_us = self._clock.now_us() + _REST_US
        self.watched.stand_by()
        self._journal.rename(self._name)

    def successor(self) -> bool:
        """Ask a standby to take over, unless the whole cluster is stopping."""
        ours = self.candidate.number
        with contextlib.suppress(EmbarcaderoError):
            others = [] if self._directory.elections.stopping else self._directory.elections.candidates()
            for other in others:
                if other.candidate != ours:
                    self._directory.elections.ask_hand_over(other.candidate, self._directory.elections.started_epoch())
                    self._bell.ring(candidate_bell(other.candidate))
                    return True
        return False

    def close(self) -> None:
        """Withdraw from elections and release everything."""
        self._rank(False)  # the kernel may have ranked the whole session, with other processes
        self._watch.close()
        if self._heard is not None:
            self._heard.close()
        for part in self._shared.parts:
            part.give_up_spares()
        with contextlib.suppress(EmbarcaderoError):
            self._directory.elections.withdraw()


# --- hand over --------------------------------------------------------------------------------------------------------
# A planned move: a standby becomes the leader while the earlier leader still works.
_POLL_S = 0.01


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """The earlier leader, the new leader, and the time from the request to the start of the new epoch."""

    before: int
    now: int
    epoch: int
    seconds: float


def hand_over(folder: ClusterFolder, to: int | None = None) -> HandedOver:
    """Make sequencer `to` (None: any standby) take over, and wait until it leads."""
    info = folder.require_running()
    with closing(open_store(folder.store_path)) as store:
        directory = Directory(store)
        epoch, before = directory.elections.started_epoch(), _leader(directory)
        chosen = _choose(directory, before, to)
        began = time.monotonic()
        directory.elections.ask_hand_over(chosen, epoch)
        ring_once(Path(info.fabric), candidate_bell(chosen))
        while (now := directory.elections.started_epoch()) == epoch:
            if time.monotonic() - began > HAND_OVER_S_MAX:
                directory.elections.call_off_hand_over()
                raise ClusterError(
                    f"sequencer {chosen} did not take over within {HAND_OVER_S_MAX:.0f} s", f"see {folder.logs}"
                )
            time.sleep(_POLL_S)
        seconds = time.monotonic() - began
        return HandedOver(before=before, now=_leader(directory), epoch=now, seconds=round(seconds, 4))


def _leader(directory: Directory) -> int:
    leadership = directory.elections.leadership()
    if leadership is None or leadership.epoch != directory.elections.newest_epochs().handed_out:
        raise ClusterError("no sequencer has started yet", "wait a moment, and see `embarcadero status`")
    return leadership.candidate


def _choose(directory: Directory, leader: int, to: int | None) -> int:
    standing = [found.candidate for found in directory.elections.candidates() if found.candidate != leader]
    if to is not None and to == leader:
        raise BadValue(f"sequencer {to} is already the leader", f"choose a standby: {_listed(standing)}")
    if not standing:
        raise ClusterError(
            "the cluster has no standby sequencer",
            "start the cluster with --standbys 1 or more; a crashed standby restarts within seconds",
        )
    if to is not None and to not in standing:
        raise BadValue(f"sequencer {to} is not a standby", f"the standbys are: {_listed(standing)}")
    return standing[0] if to is None else to


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none at the moment"
