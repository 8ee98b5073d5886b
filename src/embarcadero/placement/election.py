"""Elections in the directory: which of several sequencer candidates goes first.

An election is one conditional transaction: it hands out the epoch after the one that the candidate saw, and names the
candidate. Whoever is second finds that epoch handed out already, and goes on watching. Nothing but speed depends on
there being one winner: any number of candidates may take epochs, and only the newest handed out can start.
"""

from __future__ import annotations

import math

from embarcadero.errors import BadValue
from embarcadero.limits import CANDIDATES_MAX
from embarcadero.placement.decisions import Plan
from embarcadero.placement.epochs import EpochNumbers
from embarcadero.placement.records import CandidateNote, Epochs, HandOver, Reign, Stopping, candidate_key


class Election(EpochNumbers):
    """The directory's part about who reigns."""

    _candidate_lease: int | None = None

    def register_candidate(self, candidate: int, mark: str, pid: int) -> None:
        """A process is there that may be the next sequencer. It stands for as long as `pid` lives (0: for ever)."""
        if not 0 <= candidate < CANDIDATES_MAX:
            raise BadValue(f"sequencer {candidate} is out of range", f"use 0 to {CANDIDATES_MAX - 1}")
        lease = self._candidate_lease = self._store.grant(math.inf, pid)
        self._decide(lambda plan: plan.put(candidate_key(candidate), CandidateNote(candidate, mark), lease))

    def withdraw_candidate(self) -> None:
        """The candidate that this directory registered leaves."""
        if self._candidate_lease is not None:
            self._store.revoke(self._candidate_lease)
            self._candidate_lease = None

    def candidates(self) -> list[CandidateNote]:
        """Those that are there, by number; the one that reigns is among them."""
        return self._all("candidates/", CandidateNote)

    def elect(self, candidate: int, mark: str, over: int, superseded: int | None = None) -> int | None:
        """Give this candidate the epoch after `over`. None: somebody else was quicker, or the cluster stops.

        `superseded`: as for `next_epoch`.
        """

        def plan_it(plan: Plan) -> int | None:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if epochs.handed_out != over or self._stops(plan.read("stopping", Stopping)):
                return None
            epoch = self._hand_out(plan, superseded)
            plan.put("reign", Reign(epoch, candidate, mark))
            plan.delete("hand-over")
            return epoch

        return self._decide(plan_it)

    def reign(self) -> Reign | None:
        """Who won the last election; None before the first."""
        return self._one("reign", Reign)

    def ask_hand_over(self, to: int, epoch: int) -> None:
        """Have a candidate take over from the sequencer of this epoch. It does so when it looks."""
        self._decide(lambda plan: plan.put("hand-over", HandOver(to, epoch)))

    def asked_hand_over(self) -> HandOver | None:
        """The move that was asked for, if it has not begun."""
        return self._one("hand-over", HandOver)

    def call_off_hand_over(self) -> None:
        """Whoever was asked need not do it any more."""
        self._decide(lambda plan: plan.delete("hand-over"))

    def end_elections(self) -> None:
        """The cluster stops in order: whoever reigns is the last one of this generation."""
        self._decide(lambda plan: plan.put("stopping", Stopping(self._cluster.generation)))

    @property
    def stopping(self) -> bool:
        """Whether the cluster stops in order."""
        return self._stops(self._one("stopping", Stopping))

    def _stops(self, found: Stopping | None) -> bool:
        return found is not None and found.generation == self._cluster.generation

    @staticmethod
    def _forget_reign(plan: Plan) -> None:
        plan.delete("reign")
        plan.delete("hand-over")
        for key, _ in plan.list("candidates/", CandidateNote):
            plan.delete(key)
