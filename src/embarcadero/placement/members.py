"""Brokers and replicas in the directory: incarnations, draining, and which replicas may get a range.

A replica incarnation is live while the value under its lease exists. Its record stays longer, because open ranges name
it, and its folder is still needed. No process has to report that it is dead: readers see it once the lease has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from embarcadero.errors import BadValue, TooMany
from embarcadero.limits import BROKERS_MAX, REGION_HANDLES, REPLICAS_MAX
from embarcadero.placement.records import (
    Chain,
    Decider,
    DecisionPlan,
    Incarnation,
    Presence,
    ReplicaNote,
    chain_key,
    decode,
    member_key,
    note_key,
    presence_key,
    replica_key,
)
from embarcadero.types import Member, MemberState, Range, ReplicaMember, ReplicaRef, ReplicaState, TopicLane


class Members:
    """Incarnations of brokers."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def register(self, broker: int, host: str, port: int, pid: int) -> Member:
        """Begin a new incarnation of a broker. Its earlier one is dead from now on."""
        if not 0 <= broker < BROKERS_MAX:
            raise BadValue(f"broker {broker} is out of range", f"use 0 to {BROKERS_MAX - 1}")

        def plan_it(plan: DecisionPlan) -> Member:
            cluster = plan.cluster()
            newest = (plan.read(f"incarnations/{broker}", Incarnation) or Incarnation()).newest
            used, members = set(), list(plan.list("members/", Member))
            last = {old.broker: old.incarnation for _, old in members if old.broker != broker}
            for key, old in members:
                if old.state is MemberState.REMOVED:
                    if last.get(old.broker) != old.incarnation:
                        plan.delete(key)
                    continue
                used.add(old.handle)
                if old.broker == broker and old.state is MemberState.LIVE:
                    plan.put(key, msgspec.structs.replace(old, state=MemberState.DEAD))
            handle = _free_handle(cluster.next_handle, used)
            member = Member(broker=broker, incarnation=newest + 1, handle=handle, host=host, port=port, pid=pid)
            plan.put("cluster", msgspec.structs.replace(cluster, next_handle=(handle + 1) % REGION_HANDLES))
            plan.put(f"incarnations/{broker}", Incarnation(newest + 1, port))
            plan.put(member_key(broker, newest + 1), member)
            return member

        return self._decider.decide(plan_it)

    def mark_dead(self, broker: int, incarnation: int) -> None:
        """Mark an incarnation as dead. No effect if it is dead or unknown."""
        self._decider.decide(lambda plan: self._mark(plan, broker, incarnation, MemberState.LIVE, MemberState.DEAD))

    def mark_removed(self, broker: int, incarnation: int, epoch: int) -> bool:
        """Mark a dead incarnation as removed: no process needs its regions any more, so they may be unlinked.

        Only the sequencer of the newest epoch may decide that. False, without a change, once a later one is handed out.
        """

        def plan_it(plan: DecisionPlan) -> bool:
            if not plan.leads(epoch):
                return False
            if not self._mark(plan, broker, incarnation, MemberState.DEAD, MemberState.REMOVED):
                return False
            for key, lane in plan.list("lanes/", TopicLane):
                if (lane.broker, lane.incarnation) != (broker, incarnation):
                    continue
                if plan.read(chain_key(lane.lane), Chain) is None:  # otherwise it is on disk
                    plan.put(key, msgspec.structs.replace(lane, removed=True, end=lane.end or 0))
            return True

        return self._decider.decide(plan_it)

    def all(self) -> list[Member]:
        """All incarnations that are live, or whose regions still hold data, oldest first within a broker."""
        return [member for member in self._decider.all("members/", Member) if member.state is not MemberState.REMOVED]

    def newest(self) -> list[Member]:
        """The newest incarnation of each broker of this run, in any state."""
        return list({member.broker: member for member in self._decider.all("members/", Member)}.values())

    def last_port(self, broker: int) -> int:
        """The port on which a broker listened last, also in an earlier run; 0 if unknown."""
        return (self._decider.one(f"incarnations/{broker}", Incarnation) or Incarnation()).port

    @staticmethod
    def _mark(plan: DecisionPlan, broker: int, incarnation: int, before: MemberState, after: MemberState) -> bool:
        key = member_key(broker, incarnation)
        member = plan.read(key, Member)
        if member is None or member.state is not before:
            return False
        plan.put(key, msgspec.structs.replace(member, state=after))
        return True


def _free_handle(first: int, used: set[int]) -> int:
    for offset in range(REGION_HANDLES):
        handle = (first + offset) % REGION_HANDLES
        if handle not in used:
            return handle
    raise TooMany(f"all {REGION_HANDLES} region handles are in use", "restart the cluster")


# --- replicas ---------------------------------------------------------------------------------------------------------
class ReplicaMembers:
    """Incarnations of replicas, and the choice among them."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._leases: dict[tuple[int, int], int] = {}  # leases of incarnations that were registered here

    def register(
        self, replica: int, disk: str, folder: str, host: str, pid: int, lease_s: float = math.inf
    ) -> ReplicaMember:
        """Begin a new incarnation of a replica. Its earlier one is dead from now on.

        `pid` is the holder of its lease (0: none that the store can see). `lease_s` is the maximum time between calls
        of `keep_alive` before it counts as dead.
        """
        if not 0 <= replica < REPLICAS_MAX:
            raise BadValue(f"replica {replica} is out of range", f"use 0 to {REPLICAS_MAX - 1}")
        lease = self._decider.store.grant(lease_s, pid)

        def plan_it(plan: DecisionPlan) -> ReplicaMember:
            note = plan.read(note_key(replica), ReplicaNote) or ReplicaNote()
            member = ReplicaMember(
                replica=replica,
                incarnation=note.newest + 1,
                disk=disk,
                folder=folder,
                host=host,
                pid=pid,
                state=ReplicaState.DRAINING if note.draining else ReplicaState.LIVE,
            )
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

        member = self._decider.decide(plan_it)
        for earlier in [key for key in self._leases if key[0] == replica]:
            self._decider.store.revoke(self._leases.pop(earlier))
        self._leases[replica, member.incarnation] = lease
        return member

    def keep_alive(self, replica: int, incarnation: int) -> bool:
        """Keep an incarnation that this directory registered alive. False when it counts as dead, permanently."""
        lease = self._leases.get((replica, incarnation))
        return lease is not None and self._decider.store.keep_alive(lease) and self._present(replica, incarnation)

    def mark_dead(self, replica: int, incarnation: int) -> None:
        """Mark an incarnation as dead. No effect if it is dead or unknown."""

        def plan_it(plan: DecisionPlan) -> None:
            key = replica_key(replica, incarnation)
            member = plan.read(key, ReplicaMember)
            if member is not None and member.state is not ReplicaState.DEAD:
                plan.put(key, msgspec.structs.replace(member, state=ReplicaState.DEAD))
                plan.delete(presence_key(replica, incarnation))

        self._decider.decide(plan_it)

    def all(self) -> list[ReplicaMember]:
        """The newest incarnation of each replica, in any state, and older incarnations in open ranges."""
        members = self._decider.all("replicas/", ReplicaMember)
        newest = {member.replica: member.incarnation for member in members}  # sorted by key: the last one remains
        older = any(member.incarnation != newest[member.replica] for member in members)
        named = self._named_by_open_ranges() if older else set()
        return [
            self._as_present(member)
            for member in members
            if member.incarnation == newest[member.replica] or (member.replica, member.incarnation) in named
        ]

    def live_count(self) -> int:
        """The number of replicas that may get ranges now."""
        return sum(member.state is ReplicaState.LIVE for member in self.all())

    def drain(self, replica: int) -> None:
        """Drain a replica: it gets no new ranges, now and after restarts, and its ranges move away.

        Raises BadValue if it is unknown, or if some of its ranges cannot move, so that draining would never end.
        """
        if why := self.drain_blocked(replica):
            raise BadValue(f"replica {replica} can't be drained: {why}", "`embarcadero replica add` first")
        self._set_draining(replica, True)

    def drain_blocked(self, replica: int) -> str:
        """Explain which ranges of a replica have no other replica to move to now; empty when all have one.

        Whether a copy exists from which they can move is known only from the disks: see `node/unreadable_ranges.py`.
        """
        able = {m.replica for m in self.all() if m.state is ReplicaState.LIVE} - {replica}
        stuck = [r for r in self.ranges_on(replica) if not able - {ref.replica for ref in r.replicas}]
        if not stuck:
            return ""
        others = f"{len(able)} others are live, and have copies already" if able else "no other replica is live"
        return f"{len(stuck)} of its ranges have no replica to move to: {others}"

    def draining(self) -> set[int]:
        """Numbers of replicas that are being drained, live or dead."""
        notes = {item.key: decode(item.key, item.value, ReplicaNote) for item in self._decider.store.list("replica/")}
        return {int(key.rpartition("/")[2]) for key, note in notes.items() if note.draining}

    def undrain(self, replica: int) -> None:
        """Allow a replica to get ranges again."""
        self._set_draining(replica, False)

    def remove(self, replica: int, force: bool = False) -> None:
        """Forget a replica. Raises BadValue while it has ranges, unless `force`.

        With `force`, records of which it has the only copy are permanently lost.
        """

        def plan_it(plan: DecisionPlan) -> None:
            note = plan.read(note_key(replica), ReplicaNote)
            if note is None:
                raise _unknown(replica)
            if (on_it := self.ranges_on(replica)) and not force:
                raise BadValue(
                    f"replica {replica} has {len(on_it)} ranges, {sum(range_.open for range_ in on_it)} of them open",
                    "drain it first; when it has no more ranges, remove it",
                )
            for key, old in plan.list(f"replicas/{replica:05}/", ReplicaMember):
                plan.delete(key)
                plan.delete(presence_key(replica, old.incarnation))
            plan.put(note_key(replica), ReplicaNote(note.newest))  # incarnation numbers continue

        self._decider.decide(plan_it)

    def ranges_on(self, replica: int) -> list[Range]:
        """All ranges, open and sealed, that name this replica. While there are any, it is not drained."""
        return [r for r in self._decider.all("ranges/", Range) if any(ref.replica == replica for ref in r.replicas)]

    def choose(
        self, count: int, keep: Sequence[ReplicaRef] = (), avoid: AbstractSet[int] = frozenset()
    ) -> list[ReplicaRef]:
        """Choose at most `count` live replicas for a range, none draining: those of `keep` first, none of `avoid`.

        The others are chosen by spread over hosts, and then by the fewest open ranges. Returns fewer than `count` when
        there are not enough.
        """
        return choose_replicas(self.all(), open_ranges(self._decider.all("ranges/", Range)), count, keep, avoid)

    # --- inside -------------------------------------------------------------------------------------------------------
    def pick(self, plan: DecisionPlan, count: int) -> list[ReplicaRef]:
        """Choose replicas for a decision. The commit checks that they are still live."""
        chosen = self.choose(count)
        for ref in chosen:
            plan.read(replica_key(ref.replica, ref.incarnation), ReplicaMember)
            plan.read(presence_key(ref.replica, ref.incarnation), Presence)
        return chosen

    def _as_present(self, member: ReplicaMember) -> ReplicaMember:
        if member.state is ReplicaState.DEAD or self._present(member.replica, member.incarnation):
            return member
        return msgspec.structs.replace(member, state=ReplicaState.DEAD)

    def _present(self, replica: int, incarnation: int) -> bool:
        return self._decider.store.get(presence_key(replica, incarnation)) is not None

    def _named_by_open_ranges(self) -> set[tuple[int, int]]:
        ranges = self._decider.all("ranges/", Range)
        return {(ref.replica, ref.incarnation) for range_ in ranges if range_.open for ref in range_.replicas}

    def _set_draining(self, replica: int, draining: bool) -> None:
        def plan_it(plan: DecisionPlan) -> None:
            if (note := plan.read(note_key(replica), ReplicaNote)) is None:
                raise _unknown(replica)
            plan.put(note_key(replica), msgspec.structs.replace(note, draining=draining))
            key = replica_key(replica, note.newest)
            member = plan.read(key, ReplicaMember)
            if member is not None and member.state is not ReplicaState.DEAD:
                state = ReplicaState.DRAINING if draining else ReplicaState.LIVE
                plan.put(key, msgspec.structs.replace(member, state=state))

        self._decider.decide(plan_it)


def _unknown(replica: int) -> BadValue:
    return BadValue(f"there is no replica {replica}", "`embarcadero status` lists them")


def open_ranges(ranges: Iterable[Range]) -> Counter[int]:
    """Count the open ranges of each replica."""
    return Counter(ref.replica for range_ in ranges if range_.open for ref in range_.replicas)


def choose_replicas(
    members: Iterable[ReplicaMember],
    loads: Counter[int],
    count: int,
    keep: Sequence[ReplicaRef] = (),
    avoid: AbstractSet[int] = frozenset(),
) -> list[ReplicaRef]:
    """Choose at most `count` live replicas. The result is the same for the same store.

    A replica of `keep` is used in its newest incarnation: its disk has the earlier records, or it can copy them.
    """
    able = {m.replica: m for m in members if m.state is ReplicaState.LIVE and m.replica not in avoid}
    wanted = [able.pop(ref.replica) for ref in keep if ref.replica in able]
    chosen = wanted[:count]
    hosts = Counter(member.host for member in chosen)
    while able and len(chosen) < count:
        best = min(able.values(), key=lambda m: (hosts[m.host], loads[m.replica], m.replica))
        chosen.append(able.pop(best.replica))
        hosts[best.host] += 1
    return [member.ref for member in chosen]
