"""Following open ranges from the fabric: what was ordered since the last commit, with its payloads.

The order of loads is the safety argument: ordered frontier, entries, payload copies (each checked against its chunk and
its checksum), fence, and last of all whether the writer of the order may still be believed: no later epoch is open, or,
for a lane of a broker, no sequencer counts that incarnation as closed. Only then is anything appended. So whatever is
in a replica's files is in the one order, whoever takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from embarcadero.env import Doorbell
from embarcadero.fabric.layout import LINE, ORDER, BrokerLine, Entries, fold_line, frontier_offset
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.lines import FrontierReader, RingReader
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import Fabric, attach_unless_removed, broker_frontiers_region
from embarcadero.limits import BROKER_LANES_FIRST, MIB
from embarcadero.replica.copies import Copy
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState, TopicLane
from embarcadero.wire.codec import payload_crc

COMMIT_BYTES_MAX: Final = 16 * MIB
"""Payloads that one commit takes, of all lanes; a batch always fits."""

_LOW: Final = 0xFFFF_FFFF
COMMIT_ENTRIES_MAX: Final = 4_096
"""Entries that one commit takes of one lane."""


class Take(NamedTuple):
    """What one lane has for the next commit."""

    copy: Copy
    entries: Entries
    payloads: list[bytes]  # one per entry; empty for entries without a payload
    size: int
    writer: int  # whose word it is: the region handle of a broker incarnation, or one of the two below


BY_SEQUENCER: Final = -1
BY_STORE: Final = -2
"""The lane is closed: the store has its end, and nobody needs to be asked."""


class BrokerRegions:
    """Regions of brokers: payloads, order rings of lanes of their own, and who waits for durable lines."""

    def __init__(self, fabric: Fabric, refresh: Callable[[], None]) -> None:
        self._fabric = fabric
        self._logs = BrokerLogs(fabric, refresh)
        self._waiting: dict[str, FrontierReader] = {}  # by folder of a live incarnation
        self._lanes: dict[int, TopicLane] = {}
        self._rings: dict[int, RingReader] = {}

    def update(self, members: list[Member], lanes: list[TopicLane]) -> None:
        """Take note of all brokers, and of their lanes."""
        self._logs.update(members)
        live = [member.region_prefix for member in members if member.state is MemberState.LIVE]
        self._waiting = {folder: word for folder, word in self._waiting.items() if folder in live}
        for folder in live:
            if folder not in self._waiting and (
                regions := attach_unless_removed(self._fabric, broker_frontiers_region(folder))
            ):
                self._waiting[folder] = FrontierReader(regions[0], frontier_offset(BrokerLine.DURABLE_WAITING))
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
        log = self._logs.of(handle)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def ring_those_who_wait(self, bell: Doorbell) -> None:
        """Wake brokers that wait for durable lines. Ours were flushed before; they say that they wait, then look."""
        self._fabric.fence()
        for folder, waiting in self._waiting.items():
            if waiting.load():
                bell.ring(folder)


class _OrderSource(NamedTuple):
    ring: RingReader
    ordered: int
    writer: int


class Follower:
    """Reads order rings and broker logs for all copies that follow."""

    def __init__(self, leader: LeaderView, brokers: BrokerRegions) -> None:
        self._leader, self._brokers = leader, brokers

    def ordered(self, lane: int) -> int | None:
        """How far a lane is ordered, for people; None while nobody says."""
        source = self._source(lane)
        return None if source is None else source.ordered

    def take(self, copies: list[Copy]) -> list[Take]:
        """What these copies lack and may append now."""
        room, takes = COMMIT_BYTES_MAX, []
        for copy in copies:
            if room > 0 and (found := self._gather(copy, room)) is not None:
                takes.append(found)
                room -= found.size
        if not takes:
            return takes
        self._leader.steps.at(Step.REPLICA_LOADED)
        takes = self._believed(takes)
        if takes:
            self._leader.steps.at(Step.REPLICA_CHECKED)
        return takes

    def _source(self, lane: int) -> _OrderSource | None:
        if lane < BROKER_LANES_FIRST:
            ring = self._leader.order(lane)
            return None if ring is None else _OrderSource(ring, ring.frontier.load(), BY_SEQUENCER)
        ring, lane_is = self._brokers.ring(lane), self._brokers.lane(lane)
        if ring is None or lane_is is None:
            return None
        if lane_is.end is not None:
            return _OrderSource(ring, lane_is.end, BY_STORE)
        return _OrderSource(ring, ring.frontier.load(), lane_is.handle)

    def _gather(self, copy: Copy, room: int) -> Take | None:
        source, start = self._source(copy.range_.lane), copy.log.end
        if source is None or source.ordered <= start:
            return None
        if source.ordered == start + 1:
            return self._gather_one(copy, source, start)
        stop = min(source.ordered, start + min(COMMIT_ENTRIES_MAX, source.ring.slots))
        entries = source.ring.read(start, stop)
        payloads, size = self._payloads(entries, room)
        if not payloads:
            copy.behind = True  # the slot or the payload is gone: enough others had it on disk
            return None
        return Take(copy, entries[: len(payloads)], payloads, size, source.writer)

    def _gather_one(self, copy: Copy, source: _OrderSource, index: int) -> Take | None:
        """The same for a single entry, in plain numbers: somebody waits for just this one."""
        line = source.ring.line(index)
        size, place = line[5] & _LOW, line[6]
        whole = line[0] == index and line[7] >> 32 == fold_line(line)
        payload: bytes | None = b""
        if whole and size:
            payload = self._brokers.payload(place >> 32 & 0xFFFF, line[4] >> 32, size, place & _LOW)
        if not whole or payload is None:
            copy.behind = True
            return None
        entry = np.frombuffer(LINE.pack(*line), dtype=ORDER)
        return Take(copy, entry, [payload], size, source.writer)

    def _payloads(self, entries: Entries, room: int) -> tuple[list[bytes], int]:
        """Copies of payloads until the room runs out or one is gone."""
        payloads: list[bytes] = []
        taken = 0
        names = ("size", "origin", "location", "crc")
        for size, origin, location, crc in zip(*(entries[name].tolist() for name in names), strict=True):
            payload: bytes | None = b""
            if size:
                if taken + size > room and payloads:
                    break
                payload = self._brokers.payload(origin, location, size, crc)
            if payload is None:
                break
            payloads.append(payload)
            taken += size
        return payloads, taken

    def _believed(self, takes: list[Take]) -> list[Take]:
        """Those whose writers may still be believed. Everything they rest on was loaded before."""
        if len(takes) == 1 and takes[0].writer == BY_SEQUENCER:
            return takes if self._leader.may_act() else []
        known = {BY_STORE: True}
        for writer in {take.writer for take in takes} - {BY_STORE}:
            known[writer] = self._leader.may_act() if writer == BY_SEQUENCER else self._leader.counts_as_open(writer)
        return [take for take in takes if known[take.writer]]
