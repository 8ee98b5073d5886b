"""Broker incarnations in the directory."""

from __future__ import annotations

import msgspec

from embarcadero.errors import BadValue, TooMany
from embarcadero.limits import BROKERS_MAX, REGION_HANDLES
from embarcadero.placement.decisions import Decisions, Plan
from embarcadero.placement.records import Chain, Incarnation, chain_key, member_key
from embarcadero.types import Member, MemberState, TopicLane


class Members(Decisions):
    """The directory's part about brokers."""

    def register_broker(self, broker: int, host: str, port: int, pid: int) -> Member:
        """A broker begins a new incarnation; its earlier one is dead from here on."""
        if not 0 <= broker < BROKERS_MAX:
            raise BadValue(f"broker {broker} is out of range", f"use 0 to {BROKERS_MAX - 1}")

        def plan_it(plan: Plan) -> Member:
            cluster = self._counters(plan)
            newest = (plan.read(f"incarnations/{broker}", Incarnation) or Incarnation()).newest
            used, everyone = set(), list(plan.list("members/", Member))
            last = {old.broker: old.incarnation for _, old in everyone if old.broker != broker}
            for key, old in everyone:
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

        return self._decide(plan_it)

    def mark_dead(self, broker: int, incarnation: int) -> None:
        """This incarnation is gone. Doing it again, or for one long gone, is fine."""
        self._decide(lambda plan: self._mark(plan, broker, incarnation, MemberState.LIVE, MemberState.DEAD))

    def mark_removed(self, broker: int, incarnation: int, epoch: int) -> bool:
        """Nothing needs the regions of this dead incarnation any more: anyone may unlink them.

        Only the sequencer of the newest epoch knows. Once a later one is handed out: False, and nothing changes.
        """

        def plan_it(plan: Plan) -> bool:
            if not self._reigns(plan, epoch):
                return False
            if not self._mark(plan, broker, incarnation, MemberState.DEAD, MemberState.REMOVED):
                return False
            for key, lane in plan.list("lanes/", TopicLane):
                if (lane.broker, lane.incarnation) != (broker, incarnation):
                    continue
                if plan.read(chain_key(lane.lane), Chain) is None:  # else replicas have it on disk
                    plan.put(key, msgspec.structs.replace(lane, removed=True, end=lane.end or 0))
            return True

        return self._decide(plan_it)

    def members(self) -> list[Member]:
        """All incarnations that are live or whose regions still hold data, oldest first within a broker."""
        return [member for member in self._all("members/", Member) if member.state is not MemberState.REMOVED]

    def newest_members(self) -> list[Member]:
        """The newest incarnation of each broker of this run, whatever became of it."""
        return list({member.broker: member for member in self._all("members/", Member)}.values())

    def last_port(self, broker: int) -> int:
        """Where a broker listened last, also in an earlier run; 0 if nobody knows."""
        return (self._one(f"incarnations/{broker}", Incarnation) or Incarnation()).port

    @staticmethod
    def _mark(plan: Plan, broker: int, incarnation: int, before: MemberState, after: MemberState) -> bool:
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
