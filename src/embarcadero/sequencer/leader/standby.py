"""A sequencer that stands by: it watches the one that reigns, and stands for election when that one is gone.

Theory of operation. Whoever won the last election is named in the store, with what names its process for ever, and
beats its heart in the frontiers of its epoch. A candidate takes over
- at once, when the driver has seen that process end (it can, on the same host);
- when the heartbeat stands still for too long by the candidate's own clock: clocks of hosts are never compared;
- when somebody asked for a planned move to this candidate.
A winner that has not started its epoch yet gets longer, twice as long for each epoch that is not started, up to a few:
two candidates that both take the other for dead do not depose each other for ever. Being wrong costs a moment's pause
and nothing else: a takeover is safe against a predecessor that lives.
"""

from __future__ import annotations

from typing import Final

from embarcadero.env import Clock, Journal, SilentJournal
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.region import Fabric
from embarcadero.limits import EPOCHS_AHEAD_MAX, STANDBY_LOOKS
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.placement.records import Epochs, HandOver, LeadershipRecord

_NOBODY: Final = ""
_ASKED: Final = "asked to"


class Candidate:
    """One of the processes that may be the next sequencer. `look` now and then; it returns an epoch that was won."""

    def __init__(
        self,
        fabric: Fabric,
        directory: Directory,
        clock: Clock,
        number: int,
        mark: str,
        after_us: int,
        journal: Journal | None = None,
    ) -> None:
        self.number, self.mark = number, mark
        self._directory, self._clock, self._after_us = directory, clock, after_us
        self._journal = journal or SilentJournal()
        self.hurries = True  # nobody may reign: the epoch that was won last has to start at once
        self._leader = LeaderView(fabric)
        self._watch = StoreWatch(directory)
        self._epochs = Epochs()
        self._reign: LeadershipRecord | None = None
        self._asked: HandOver | None = None
        self._stopping = False
        self._ended = _NOBODY  # mark of the process that was seen to end
        self._sign = (-1, -1)  # the last sign of life: (epoch handed out, beats)
        self._sign_us = clock.now_us()

    # --- what the driver asks -----------------------------------------------------------------------------------------
    @property
    def watched(self) -> str:
        """What names the process whose end means that we take over; empty when there is none."""
        reign = self._reign
        if reign is None or reign.epoch != self._epochs.handed_out or reign.mark == self.mark:
            return _NOBODY
        return reign.mark

    @property
    def reigning(self) -> int:
        """The newest started epoch, as last seen."""
        return self._epochs.started

    def process_ended(self, mark: str) -> None:
        """The driver saw that a process is gone."""
        self._ended = mark

    @property
    def patience_us(self) -> int:
        """How long the heart of whoever was elected last may stand still."""
        return self._after_us << min(EPOCHS_AHEAD_MAX, max(0, self._epochs.handed_out - self._epochs.started))

    def wait_us(self) -> int:
        """How long to sleep at most until the next look."""
        return max(1, self.patience_us // STANDBY_LOOKS)

    # --- looking ------------------------------------------------------------------------------------------------------
    def look(self) -> int | None:
        """See how the one that reigns is. An epoch: it is ours, take over now."""
        now_us = self._clock.now_us()
        if self._watch.look() is not StoreChange.NOTHING:
            self._learn()
            self._watch.done()
        sign = (self._epochs.handed_out, self._leader.beats(self._epochs.handed_out))
        if sign != self._sign:
            self._sign, self._sign_us = sign, now_us
        reason = self._reason(now_us)
        if not reason or self._stopping:
            return None
        last = self._epochs.started
        superseded = last if self._leader.table.superseded(last) else None
        epoch = self._directory.elections.elect(self.number, self.mark, self._epochs.handed_out, superseded)
        self._watch.reread()  # whoever won, the store has changed
        self._ended = _NOBODY  # acted upon
        self._sign_us = now_us
        if epoch is not None:
            self.hurries = reason != _ASKED
            self._journal.note("elected", epoch=epoch, candidate=self.number, reason=reason)
        return epoch

    def _learn(self) -> None:
        self._epochs, self._reign = self._directory.elections.newest_epochs(), self._directory.elections.leadership()
        self._asked, self._stopping = self._directory.elections.asked_hand_over(), self._directory.elections.stopping
        if self._ended != self.watched:
            self._ended = _NOBODY  # of no use any more; if it was a mistake, that process may reign again one day

    def _reason(self, now_us: int) -> str:
        """Why we should take over; empty when we should not."""
        handed_out, asked = self._epochs.handed_out, self._asked
        if handed_out == 0 and self.number == 0:
            return "the first"
        if self.watched and self._ended == self.watched:
            return "its process ended"
        if asked is not None and asked.to == self.number and asked.epoch == handed_out == self._epochs.started:
            return _ASKED
        if now_us - self._sign_us >= self.patience_us:
            return "its heart stands still"
        return ""
