"""Elections in the directory: epochs, and which of several sequencers leads in the next one.

An epoch is a number for one sequencer, and only the newest handed out may start or decide. Epochs end with the memory
that they speak of: after a loss of power the next generation begins without them. So a takeover waits for no disk. A
later decision of a sequencer that must outlast its machine is synced, and with it all that came before.

An election is one conditional transaction: it hands out the epoch after the one that the candidate saw, and names the
candidate. A second candidate finds that epoch handed out already, and stays a standby. Nothing but speed depends on
there being one winner: any number of candidates may take epochs, and only the newest handed out can start.
"""

from __future__ import annotations

import math

import msgspec

from embarcadero.errors import BadValue, TooMany
from embarcadero.limits import CANDIDATES_MAX, EPOCHS_AHEAD_MAX, EPOCHS_MAX
from embarcadero.placement.decisions import Decider, DecisionPlan
from embarcadero.placement.records import (
    CandidateNote,
    Epochs,
    EpochStart,
    HandOver,
    LeadershipRecord,
    Stopping,
    candidate_key,
)

STARTS_KEPT = 16
"""Ends of this many started epochs are kept for roles that learn of them late."""


class Elections:
    """Epochs, standbys, and which sequencer leads."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._lease: int | None = None  # of the candidate that was registered here

    def next_epoch(self, superseded: int | None = None) -> int:
        """Hand out the next epoch. Few run ahead of the last started one, since everybody checks that many lines.

        `superseded` is an epoch for which the caller saw the line of a later one open, among those that everybody
        checks. If that is the last started one, nobody acts on its word any more, and more may run ahead.
        """

        return self._decider.decide(lambda plan: _hand_out(plan, superseded))

    def start_epoch(self, epoch: int, ends: dict[int, int]) -> bool:
        """Start an epoch at these ends (lane -> index). Unless it is the newest handed out: False, nothing changes."""

        def plan_it(plan: DecisionPlan) -> bool:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if not plan.leads(epoch) or epoch <= epochs.started:
                return False
            plan.put("epochs", msgspec.structs.replace(epochs, started=epoch), volatile=True)
            plan.put(f"starts/{epoch:010}", EpochStart(ends), volatile=True)
            for key, _ in list(plan.list("starts/", EpochStart))[: -STARTS_KEPT + 1]:
                plan.delete(key, volatile=True)
            return True

        return self._decider.decide(plan_it)

    def started_epoch(self) -> int:
        """The newest started epoch; 0 when none has started."""
        return (self._decider.one("epochs", Epochs) or Epochs()).started

    def newest_epochs(self) -> Epochs:
        """The newest epoch that was handed out, and the newest started one."""
        return self._decider.one("epochs", Epochs) or Epochs()

    def generation_holds(self) -> bool:
        """Whether the fabric of this directory's generation is still the cluster's."""
        return self.newest_epochs().generation == self._decider.generation

    def epoch_ends(self, epoch: int) -> dict[int, int] | None:
        """Where each lane ended when this epoch started; None if it never started, or long ago."""
        start = self._decider.one(f"starts/{epoch:010}", EpochStart)
        return None if start is None else start.ends

    # --- candidates ---------------------------------------------------------------------------------------------------
    def register(self, candidate: int, mark: str, pid: int) -> None:
        """A process is there that may be the next sequencer. It stands for as long as `pid` lives (0: for ever)."""
        if not 0 <= candidate < CANDIDATES_MAX:
            raise BadValue(f"sequencer {candidate} is out of range", f"use 0 to {CANDIDATES_MAX - 1}")
        lease = self._lease = self._decider.store.grant(math.inf, pid)
        note = CandidateNote(candidate, mark)
        self._decider.decide(lambda plan: plan.put(candidate_key(candidate), note, lease, volatile=True))

    def withdraw(self) -> None:
        """The candidate that this directory registered leaves."""
        if self._lease is not None:
            self._decider.store.revoke(self._lease)
            self._lease = None

    def candidates(self) -> list[CandidateNote]:
        """Those that are there, by number; the one that reigns is among them."""
        return self._decider.all("candidates/", CandidateNote)

    def elect(self, candidate: int, mark: str, over: int, superseded: int | None = None) -> int | None:
        """Give this candidate the epoch after `over`. None: somebody else was quicker, or the cluster stops.

        `superseded`: as for `next_epoch`.
        """

        def plan_it(plan: DecisionPlan) -> int | None:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if epochs.handed_out != over or self._stops(plan.read("stopping", Stopping)):
                return None
            epoch = _hand_out(plan, superseded)
            plan.put("reign", LeadershipRecord(epoch, candidate, mark), volatile=True)
            plan.delete("hand-over", volatile=True)
            return epoch

        return self._decider.decide(plan_it)

    def leadership(self) -> LeadershipRecord | None:
        """Who won the last election; None before the first."""
        return self._decider.one("reign", LeadershipRecord)

    def ask_hand_over(self, to: int, epoch: int) -> None:
        """Have a candidate take over from the sequencer of this epoch. It does so when it looks."""
        self._decider.decide(lambda plan: plan.put("hand-over", HandOver(to, epoch), volatile=True))

    def asked_hand_over(self) -> HandOver | None:
        """The move that was asked for, if it has not begun."""
        return self._decider.one("hand-over", HandOver)

    def call_off_hand_over(self) -> None:
        """Whoever was asked need not do it any more."""
        self._decider.decide(lambda plan: plan.delete("hand-over", volatile=True))

    def end(self) -> None:
        """The cluster stops in order: whoever reigns is the last one of this generation."""
        self._decider.decide(lambda plan: plan.put("stopping", Stopping(self._decider.generation)))

    @property
    def stopping(self) -> bool:
        """Whether the cluster stops in order."""
        return self._stops(self._decider.one("stopping", Stopping))

    def _stops(self, found: Stopping | None) -> bool:
        return found is not None and found.generation == self._decider.generation


def _hand_out(plan: DecisionPlan, superseded: int | None) -> int:
    epochs = plan.read("epochs", Epochs) or Epochs()
    epoch = epochs.handed_out + 1
    if epoch > epochs.started + EPOCHS_AHEAD_MAX and superseded != epochs.started:
        raise TooMany(
            f"{EPOCHS_AHEAD_MAX} sequencers took an epoch after {epochs.started} and none of them started it",
            "see the sequencers' logs, then restart the cluster",
        )
    if epoch >= EPOCHS_MAX - 1:  # the table's last line stays empty: whoever acts looks at the one after its own
        raise TooMany(f"all epochs of this fabric, {EPOCHS_MAX - 2}, are used", "restart the cluster")
    plan.put("epochs", msgspec.structs.replace(epochs, handed_out=epoch), volatile=True)
    return epoch


def forget_elections(plan: DecisionPlan) -> None:
    """Forget the leader, its candidates, and the move that was asked for."""
    plan.delete("reign")
    plan.delete("hand-over")
    for key, _ in plan.list("candidates/", CandidateNote):
        plan.delete(key)
