"""A sequencer candidate's place in its process: what it has ready while it stands by, what it opens when it reigns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from embarcadero.config import FabricSizes
from embarcadero.config.table import Sequencer as Settings
from embarcadero.env import SystemClock, Workers
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.shared import SharedFabric
from embarcadero.limits import STANDBY_SPARE_BYTES_MAX
from embarcadero.node.bell import PipeBell
from embarcadero.node.pidfd import ProcessWatch
from embarcadero.node.roles import candidate_role
from embarcadero.placement.directory import Directory
from embarcadero.placement.liveness import process_mark
from embarcadero.sequencer.candidate import Candidate
from embarcadero.sequencer.state import Sequencer
from embarcadero.storage.real import RealDisk
from embarcadero.types import ReplicaMember
from embarcadero.watch.candidate import WatchedCandidate
from embarcadero.watch.logs import LogJournal

_BELL = "sequencer"


def candidate_bell(candidate: int) -> str:
    """The bell that wakes a candidate that stands by."""
    return f"candidate-{candidate}"


class Seat:
    """Between `open` and `close` of its process; see sequencer/server.py for who calls what."""

    def __init__(
        self,
        number: int,
        fabric: SharedFabric,
        directory: Directory,
        sizes: FabricSizes,
        settings: Settings,
        disks: Callable[[ReplicaMember], RealDisk],
        bell: PipeBell,
        threads: Callable[[Callable[[], None]], Workers],
    ) -> None:
        self._fabric, self._directory, self._sizes, self._settings = fabric, directory, sizes, settings
        self._disks, self._bell, self._threads = disks, bell, threads
        self._clock = SystemClock()
        self._name = candidate_role(number)
        self._journal = LogJournal(self._name)
        mark = process_mark(os.getpid())
        directory.register_candidate(number, mark, os.getpid())
        self.candidate = Candidate(
            fabric, directory, self._clock, number, mark, int(settings.takeover_after_ms * 1_000), self._journal
        )
        self._watch = ProcessWatch(self._ended)
        self._heard: PipeBell | None = None  # the sequencer's bell, while we reign
        self._workers: Workers | None = None
        self.watched = WatchedCandidate(number, self._clock)

    def follow(self, mark: str) -> None:
        """Have the candidate told, and woken, when this process ends."""
        self._watch.follow(mark)

    def _ended(self, mark: str) -> None:
        self.candidate.process_ended(mark)
        self._bell.wake()

    def _wake(self) -> None:
        """A job beside the sequencer is done."""
        if self._heard is not None:
            self._heard.wake()

    def prepare(self, epoch: int) -> bool:
        """Have the memory of one more region ready."""
        return bool(epoch) and self._fabric.keep_spares(f"epoch-{epoch}", STANDBY_SPARE_BYTES_MAX)

    def take(self, epoch: int) -> tuple[Sequencer, PipeBell]:
        """Take over."""
        self._heard = bell = PipeBell(self._fabric.folder, _BELL)
        self._workers = self._workers or self._threads(self._wake)
        sequencer = Sequencer(
            self._fabric, self._directory, self._clock, bell, self._sizes, self._journal, self._settings, self._disks,
            self._workers, epoch,
        )  # fmt: skip
        self._fabric.give_up_spares()
        self.watched.sequencer = sequencer
        self._journal.role = self.watched.name
        return sequencer, bell

    def give_up(self) -> None:
        """Listen to the sequencer's bell no more; whoever reigns now may have missed what we heard."""
        if self._heard is not None:
            self._heard.close()
            self._heard = None
            self._bell.ring(_BELL)
        self.watched.sequencer = None
        self._journal.role = self._name

    def successor(self) -> bool:
        """Ask another candidate to take over, unless all of the cluster stops."""
        ours = self.candidate.number
        with contextlib.suppress(EmbarcaderoError):
            others = [] if self._directory.stopping else self._directory.candidates()
            for other in others:
                if other.candidate != ours:
                    self._directory.ask_hand_over(other.candidate, self._directory.started_epoch())
                    self._bell.ring(candidate_bell(other.candidate))
                    return True
        return False

    def close(self) -> None:
        """Leave."""
        self._watch.close()
        if self._heard is not None:
            self._heard.close()
        self._fabric.give_up_spares()
        with contextlib.suppress(EmbarcaderoError):
            self._directory.withdraw_candidate()
