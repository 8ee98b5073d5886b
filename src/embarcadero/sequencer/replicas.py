"""Which replicas can be relied on, as the sequencer sees it: by the store's word, heartbeat, and health."""

from __future__ import annotations

from typing import Final

from embarcadero.fabric.durability import DurableLines
from embarcadero.limits import REPLICA_SILENT_S
from embarcadero.sequencer.pulses import Pulses
from embarcadero.types import ReplicaMember, ReplicaRef, ReplicaState

_SILENT_US: Final = int(REPLICA_SILENT_S * 1_000_000)
_UNHEALTHY: Final = 7
"""Bits of a health word that speak of the whole disk. A replica that repairs one copy serves the others."""


class Replicas:
    """All replica incarnations of the store. A heartbeat counts by our clock alone: theirs may be anything."""

    def __init__(self, lines: DurableLines, now_us: int) -> None:
        self._lines, self._now_us = lines, now_us
        self._pulses = Pulses[ReplicaRef]()
        self.members: list[ReplicaMember] = []
        self.good: set[ReplicaRef] = set()
        self.why: dict[ReplicaRef, str] = {}  # what is wrong with the others

    def update(self, members: list[ReplicaMember]) -> set[ReplicaRef]:
        """The store's word has changed. Returns incarnations that it lists no more; some came and went since."""
        listed = {member.ref for member in members}
        gone = {member.ref for member in self.members} - listed
        newest = {member.replica: member.incarnation for member in self.members}  # oldest first: the newest stays
        known = {(ref.replica, ref.incarnation) for ref in listed}
        for replica, last in {member.replica: member.incarnation for member in members}.items():
            unseen = range(newest.get(replica, last) + 1, last)
            gone |= {ReplicaRef(replica=replica, incarnation=n, disk="") for n in unseen if (replica, n) not in known}
        self.members = members
        self._pulses.keep(listed)
        return gone

    def look(self, now_us: int) -> None:
        """Look at everybody's heartbeat and health."""
        self._now_us = now_us
        found = {member.ref: self._problem(member) for member in self.members}
        self.good = {ref for ref, problem in found.items() if not problem}
        self.why = {ref: problem for ref, problem in found.items() if problem}

    def problem(self, ref: ReplicaRef) -> str:
        """What is wrong with one incarnation; empty when nothing is."""
        return "" if ref in self.good else self.why.get(ref, "gone")

    def avoided(self) -> set[int]:
        """Numbers of replicas whose newest incarnation the store takes for live, but that we see failing."""
        newest = {member.replica: member for member in self.members if member.state is not ReplicaState.DEAD}
        return {number for number, member in newest.items() if member.ref not in self.good}

    def live(self) -> list[ReplicaMember]:
        """Incarnations that the store takes for live, draining ones too."""
        return [member for member in self.members if member.state is not ReplicaState.DEAD]

    def _problem(self, member: ReplicaMember) -> str:
        if member.state is not ReplicaState.LIVE:
            return str(member.state.value)
        table = self._lines.of(member.ref)
        beat = table.heartbeat.load() if table is not None else 0
        if self._pulses.silent_us(member.ref, beat, self._now_us) > _SILENT_US:
            return "silent"
        if table is not None and (health := table.health.load() & _UNHEALTHY):
            return f"unhealthy ({health})"
        return ""
