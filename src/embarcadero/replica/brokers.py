"""Broker incarnations as a replica sees them: where payloads are, where lanes are, and who waits for durable lines."""

from __future__ import annotations

from collections.abc import Callable

from embarcadero.env import Doorbell
from embarcadero.fabric.frontier import FrontierReader
from embarcadero.fabric.layout import ORDER, BrokerLine, frontier_offset
from embarcadero.fabric.log import LogReader
from embarcadero.fabric.region import Fabric, attach_unless_removed
from embarcadero.fabric.ring import RingReader
from embarcadero.types import Member, MemberState, TopicLane
from embarcadero.wire.codec import payload_crc


class Brokers:
    """All incarnations whose regions still hold data."""

    def __init__(self, fabric: Fabric, refresh: Callable[[], None]) -> None:
        self._fabric, self._refresh = fabric, refresh
        self._members: dict[int, Member] = {}
        self._logs: dict[int, LogReader] = {}
        self._waiting: dict[int, FrontierReader] = {}
        self._lanes: dict[int, TopicLane] = {}
        self._rings: dict[int, RingReader] = {}

    def update(self, members: list[Member], lanes: list[TopicLane]) -> None:
        """Take note of who there is, and of the lanes of brokers."""
        self._members = {member.handle: member for member in members}
        for handle in [h for h in self._logs if h not in self._members]:
            del self._logs[handle]
        live = {handle for handle, member in self._members.items() if member.state is MemberState.LIVE}
        self._waiting = {handle: word for handle, word in self._waiting.items() if handle in live}
        for handle in live - self._waiting.keys():
            name = f"{self._members[handle].region_prefix}/frontiers"
            if regions := attach_unless_removed(self._fabric, name):
                self._waiting[handle] = FrontierReader(regions[0], frontier_offset(BrokerLine.DURABLE_WAITING))
        self._lanes = {lane.lane: lane for lane in lanes}
        for number in [n for n in self._rings if n not in self._lanes]:
            del self._rings[number]

    def lane(self, number: int) -> TopicLane | None:
        """A lane of a broker, as the store has it."""
        return self._lanes.get(number)

    def ring(self, number: int) -> RingReader | None:
        """The order ring of a lane of a broker, while its region is there."""
        ring, lane = self._rings.get(number), self._lanes.get(number)
        if ring is None and lane is not None and (regions := attach_unless_removed(self._fabric, lane.region)):
            ring = self._rings[number] = RingReader(regions[0], ORDER)
        return ring

    def payload(self, handle: int, location: int, size: int, crc: int) -> bytes | None:
        """A copy of a payload with the right checksum; None when it left memory."""
        log = self._logs.get(handle) or self._attach(handle)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def _attach(self, handle: int) -> LogReader | None:
        if handle not in self._members:
            self._refresh()  # a broker that we have not heard of yet is not one that was removed
        member = self._members.get(handle)
        if member is None or not self._fabric.exists(f"{member.region_prefix}/pending"):
            return None
        prefix = member.region_prefix
        regions = attach_unless_removed(self._fabric, f"{prefix}/log", f"{prefix}/frontiers")
        if regions is None:
            return None
        log = self._logs[handle] = LogReader(*regions)
        return log

    def ring_those_who_wait(self, bell: Doorbell) -> None:
        """Wake brokers that wait for durable lines. Ours were flushed before; they say that they wait, then look."""
        self._fabric.fence()
        for handle, waiting in self._waiting.items():
            if waiting.load():
                bell.ring(self._members[handle].region_prefix)
