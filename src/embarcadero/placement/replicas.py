"""Replicas in the directory: incarnations with leases, draining, and who may get a range.

A replica incarnation is there while the value under its lease is. Its record stays longer: open ranges name it, and
its folder is still to be read. Nobody has to say that it is dead; whoever asks is told so as soon as the lease ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from embarcadero.errors import BadValue
from embarcadero.limits import REPLICAS_MAX
from embarcadero.placement.choice import choose, load
from embarcadero.placement.decisions import Decisions, Plan, decode
from embarcadero.placement.records import Presence, ReplicaNote, note_key, presence_key, replica_key
from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState


class Replicas(Decisions):
    """The directory's part about replicas."""

    _leases: dict[tuple[int, int], int]

    def register_replica(
        self, replica: int, disk: str, folder: str, host: str, pid: int, lease_s: float = math.inf
    ) -> ReplicaMember:
        """A replica begins a new incarnation; its earlier one is dead from here on.

        `pid` is the holder of its lease (0: nobody that the store can see); `lease_s` is how long it may be silent
        (`keep_replica`) before it counts as dead.
        """
        if not 0 <= replica < REPLICAS_MAX:
            raise BadValue(f"replica {replica} is out of range", f"use 0 to {REPLICAS_MAX - 1}")
        lease = self._store.grant(lease_s, pid)

        def plan_it(plan: Plan) -> ReplicaMember:
            note = plan.read(note_key(replica), ReplicaNote) or ReplicaNote()
            member = ReplicaMember(
                replica=replica, incarnation=note.newest + 1, disk=disk, folder=folder, host=host, pid=pid,
                state=ReplicaState.DRAINING if note.draining else ReplicaState.LIVE,
            )  # fmt: skip
            named = self._named_by_open_ranges()
            for key, old in plan.list(f"replicas/{replica:05}/", ReplicaMember):
                plan.delete(presence_key(replica, old.incarnation))
                if (replica, old.incarnation) in named:
                    plan.put(key, msgspec.structs.replace(old, state=ReplicaState.DEAD))
                else:
                    plan.delete(key)
            plan.put(note_key(replica), msgspec.structs.replace(note, newest=member.incarnation))
            plan.put(replica_key(replica, member.incarnation), member)
            plan.put(presence_key(replica, member.incarnation), Presence(pid), lease)
            return member

        member = self._decide(plan_it)
        for earlier in [key for key in self._leases if key[0] == replica]:
            self._store.revoke(self._leases.pop(earlier))
        self._leases[replica, member.incarnation] = lease
        return member

    def keep_replica(self, replica: int, incarnation: int) -> bool:
        """An incarnation that this directory registered is there. False when it counts as dead; that is for good."""
        lease = self._leases.get((replica, incarnation))
        return lease is not None and self._store.keep_alive(lease) and self._present(replica, incarnation)

    def mark_replica_dead(self, replica: int, incarnation: int) -> None:
        """This incarnation is gone. Doing it again, or for one long gone, is fine."""

        def plan_it(plan: Plan) -> None:
            key = replica_key(replica, incarnation)
            member = plan.read(key, ReplicaMember)
            if member is not None and member.state is not ReplicaState.DEAD:
                plan.put(key, msgspec.structs.replace(member, state=ReplicaState.DEAD))
                plan.delete(presence_key(replica, incarnation))

        self._decide(plan_it)

    def replicas(self) -> list[ReplicaMember]:
        """The newest incarnation of each replica, in any state, and older ones that open ranges still name."""
        members = self._all("replicas/", ReplicaMember)
        newest = {member.replica: member.incarnation for member in members}  # sorted by key: the last one wins
        older = any(member.incarnation != newest[member.replica] for member in members)
        named = self._named_by_open_ranges() if older else set()
        return [
            self._as_present(member)
            for member in members
            if member.incarnation == newest[member.replica] or (member.replica, member.incarnation) in named
        ]

    def live_replicas(self) -> int:
        """How many replicas may get ranges now."""
        return sum(member.state is ReplicaState.LIVE for member in self.replicas())

    def drain_replica(self, replica: int) -> None:
        """Give this replica no new ranges, now and after restarts; its ranges move away.

        BadValue if it is unknown, or if some of its ranges could not move: then draining would never end.
        """
        if why := self.drain_blocked(replica):
            raise BadValue(f"replica {replica} can't be drained: {why}", "`embarcadero replica add` first")
        self._set_draining(replica, True)

    def drain_blocked(self, replica: int) -> str:
        """Why ranges of a replica have no other replica to move to now; empty when they have.

        Whether there is a copy to move them from only the disks can tell: `node/unreadable_ranges.py`.
        """
        able = {m.replica for m in self.replicas() if m.state is ReplicaState.LIVE} - {replica}
        stuck = [r for r in self.ranges_on(replica) if not able - {ref.replica for ref in r.replicas}]
        if not stuck:
            return ""
        others = f"{len(able)} others are live, and those have copies already" if able else "no other replica is live"
        return f"{len(stuck)} of its ranges could go nowhere: {others}"

    def draining_replicas(self) -> set[int]:
        """Numbers of replicas that are to be drained, live or dead."""
        notes = {item.key: decode(item.key, item.value, ReplicaNote) for item in self._store.list("replica/")}
        return {int(key.rpartition("/")[2]) for key, note in notes.items() if note.draining}

    def undrain_replica(self, replica: int) -> None:
        """Let a replica have ranges again."""
        self._set_draining(replica, False)

    def remove_replica(self, replica: int, force: bool = False) -> None:
        """Forget a replica. BadValue while ranges are on it, unless `force`: then what only it has is gone for good."""

        def plan_it(plan: Plan) -> None:
            note = plan.read(note_key(replica), ReplicaNote)
            if note is None:
                raise _unknown(replica)
            if (on_it := self.ranges_on(replica)) and not force:
                raise BadValue(
                    f"replica {replica} has {len(on_it)} ranges, {sum(range_.open for range_ in on_it)} of them open",
                    "drain it first; when no range is left on it, remove it",
                )
            for key, old in plan.list(f"replicas/{replica:05}/", ReplicaMember):
                plan.delete(key)
                plan.delete(presence_key(replica, old.incarnation))
            plan.put(note_key(replica), ReplicaNote(note.newest))  # numbers of incarnations go on

        self._decide(plan_it)

    def ranges_on(self, replica: int) -> list[Range]:
        """All ranges, open and sealed, that name this replica: while there are any, it is not drained."""
        return [r for r in self._all("ranges/", Range) if any(ref.replica == replica for ref in r.replicas)]

    def choose_replicas(
        self, count: int, keep: Sequence[ReplicaRef] = (), avoid: AbstractSet[int] = frozenset()
    ) -> list[ReplicaRef]:
        """At most `count` replicas for a range: live, not draining; those of `keep` first, none of `avoid`.

        Then spread over hosts, then those with the fewest open ranges. Fewer come back when there are not enough.
        """
        return choose(self.replicas(), load(self._all("ranges/", Range)), count, keep, avoid)

    # --- inside -------------------------------------------------------------------------------------------------------
    def _pick(self, plan: Plan, count: int) -> list[ReplicaRef]:
        """Choose for a decision: it holds only while the chosen ones are there."""
        chosen = self.choose_replicas(count)
        for ref in chosen:
            plan.read(replica_key(ref.replica, ref.incarnation), ReplicaMember)
            plan.read(presence_key(ref.replica, ref.incarnation), Presence)
        return chosen

    def _as_present(self, member: ReplicaMember) -> ReplicaMember:
        if member.state is ReplicaState.DEAD or self._present(member.replica, member.incarnation):
            return member
        return msgspec.structs.replace(member, state=ReplicaState.DEAD)

    def _present(self, replica: int, incarnation: int) -> bool:
        return self._store.get(presence_key(replica, incarnation)) is not None

    def _named_by_open_ranges(self) -> set[tuple[int, int]]:
        ranges = self._all("ranges/", Range)
        return {(ref.replica, ref.incarnation) for range_ in ranges if range_.open for ref in range_.replicas}

    def _set_draining(self, replica: int, draining: bool) -> None:
        def plan_it(plan: Plan) -> None:
            if (note := plan.read(note_key(replica), ReplicaNote)) is None:
                raise _unknown(replica)
            plan.put(note_key(replica), msgspec.structs.replace(note, draining=draining))
            key = replica_key(replica, note.newest)
            member = plan.read(key, ReplicaMember)
            if member is not None and member.state is not ReplicaState.DEAD:
                state = ReplicaState.DRAINING if draining else ReplicaState.LIVE
                plan.put(key, msgspec.structs.replace(member, state=state))

        self._decide(plan_it)


def _unknown(replica: int) -> BadValue:
    return BadValue(f"there is no replica {replica}", "`embarcadero status` lists them")
