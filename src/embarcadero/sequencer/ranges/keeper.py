"""Open ranges: which replicas keep each lane on disk, how far the lane is durable, and when replicas must change.

Theory of operation. The epoch's range words name the open range of each lane. Before the sealer reads any durable line,
the word is closing, flushed and fenced. A counter loads the word again after its own reads. So either the counter sees
that the range is closing, or the sealer sees every line that was counted. The end is the A-th largest line of all R
replicas, dead ones included, and the seq at the end comes from the order ring. One transaction of the store seals the
range and opens the next one at that position. The transaction is conditional: our epoch is the newest one handed out.
Only then does the word name the new range. Positions never move, and ordering does not wait.

A successor adopts open ranges as they are in the store. Everything that a replica appended is in the successor's order
too, since replicas append only while no later epoch is open.

`Replicas` decides which replicas are reliable in the view of the sequencer: by the store, heartbeats, and health.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from embarcadero.env import COUNTS, LATENCY_US, Histogram
from embarcadero.fabric.layout import ORDER, RangeWord
from embarcadero.fabric.leader import NO_RANGE, DurableLines, create_ranges, durable_through, first_woken
from embarcadero.fabric.lines import RingReader, attach_ring
from embarcadero.fabric.region import durable_region
from embarcadero.limits import (
    CEILING_AHEAD,
    CEILING_AHEAD_HANDLES,
    CEILING_AHEAD_SEQ,
    RANGE_CHANGES_SHARE,
    RANGE_GRACE_S,
    RANGE_RETRY_S,
    REPLICA_LAG_ENTRIES_MAX,
    REPLICA_LAG_S,
    REPLICA_LAG_SHARE,
    REPLICA_LATE_S,
    REPLICA_SILENT_S,
    SEALS_PER_LOOK_MAX,
)
from embarcadero.liveness import Pulses
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.order.lane import Lane, LedEpoch
from embarcadero.steps import Step
from embarcadero.types import LanePosition, Range, RangeKey, ReplicaMember, ReplicaRef, ReplicaState, Topic, TopicLane

_LOOK_US: Final = 20_000
_MEMBERS_US: Final = 100_000
_LAG_US: Final = 500_000
_TARGET: Final = 1


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)


class SequencerCounters:
    """Counters of one leadership."""

    def __init__(self) -> None:
        self.rounds = self.entries = 0
        self.round_us = Histogram(LATENCY_US)  # of rounds with work
        self.round_entries = Histogram(COUNTS)
        self.brokers_closed = 0
        self.seals = self.seals_failed = 0  # ranges that were sealed and replaced
        self.recovered = 0  # lanes that were recovered after a restart
        self.recovery_us = 0  # from the start of the leadership to the last recovered lane


@dataclass(slots=True, eq=False)
class LaneRange:
    """A lane with an open range, or with a sealed range that waits for enough replicas to open the next one."""

    range_: Range
    topic: Topic
    lane: Lane | None = None  # of a topic of order 2 or 5
    broker_lane: TopicLane | None = None  # of a topic of order 0 or 1
    ring: RingReader | None = None
    durable: int = 0
    closing: bool = False
    sealed_us: int | None = None  # when this leadership sealed the previous range, if it did
    bad_us: int | None = None  # since when one of its replicas is unreliable
    retry_us: int = 0
    reported: bool = False  # the journal has reported that there are too few replicas
    slow_us: dict[ReplicaRef, int] = field(default_factory=dict)  # since when replicas lag beyond the limit
    late_us: dict[int, int] = field(default_factory=dict)  # when replicas were replaced because of their lag

    @property
    def number(self) -> int:
        """The lane's number."""
        return self.range_.lane

    def follow(self, topic: Topic, broker_lane: TopicLane | None) -> bool:
        """Adopt the topic and the lane of the store. True if they have changed."""
        news = self.topic != topic or self.broker_lane != broker_lane
        self.topic, self.broker_lane = topic, broker_lane
        return news

    def count(self, durable: int) -> None:
        """Note that the lane is durable up to this index."""
        self.durable = max(self.durable, durable)

    def close(self) -> None:
        """Note that the range is closing: brokers count nothing in it any more."""
        self.closing = True

    def reopen(self) -> None:
        """Note that the range is open: brokers may count in it."""
        self.closing = False

    def adopt(self, range_: Range) -> None:
        """Use this range, which the store has as the open one."""
        self.range_ = range_

    def go_on(self, opened: Range, now_us: int) -> None:
        """Continue with a range that was opened after the previous one was sealed."""
        self.adopt(opened)
        self.count(opened.start)
        self.sealed_us, self.bad_us, self.reported = now_us, None, False
        self.slow_us.clear()

    def note_bad(self, bad: bool, now_us: int) -> None:
        """Note since when a replica of the range is unreliable; None if all are reliable."""
        self.bad_us = (now_us if self.bad_us is None else self.bad_us) if bad else None

    def ordered(self) -> int:
        """The end of the lane's order now."""
        if self.lane is not None:
            return self.lane.order.next_index
        if self.broker_lane is not None and self.broker_lane.end is not None:
            return self.broker_lane.end
        return self.ring.frontier.load() if self.ring is not None else self.range_.start

    def seq_at(self, index: int) -> int | None:
        """Look up the seq at an index that is still in the order ring."""
        if index == self.range_.start:
            return self.range_.start_seq
        if self.lane is not None:
            return self.lane.seq_at(index)
        if self.broker_lane is not None and index == self.broker_lane.end:
            return self.broker_lane.end_seq
        if self.ring is None:
            return None
        here = self.ring.read(index, index + 1)
        if len(here):
            return int(here["seq"][0])
        before = self.ring.read(index - 1, index)
        return int(before["seq"][0]) + int(before["count"][0]) if len(before) else None


class RangeKeeper:
    """The range words of one epoch, and all decisions about open ranges."""

    def __init__(self, epoch: LedEpoch, directory: Directory, counters: SequencerCounters, now_us: int) -> None:
        self._env, self._fabric, self._epoch = epoch.env, epoch.fabric, epoch.number
        self._directory, self._counters, self._now_us = directory, counters, now_us
        self._wakes = True  # whether replicas are woken when a range is announced
        self._words = create_ranges(self._fabric, self._epoch)
        self.lines = DurableLines(self._fabric)
        self.replicas = Replicas(self.lines, now_us)
        self.lanes: dict[int, LaneRange] = {}
        self.grown: set[LaneRange] = set()  # our lanes with new entries since the last look
        self._moved: set[LaneRange] = set()  # the same, since replicas were last compared
        self._unsaved: set[LaneRange] = set()  # the same, since their last checkpoints
        self._unsettled: dict[int, LaneRange] = {}  # lanes whose range may have to change
        self._look_us = self._members_us = 0
        self._lag_us = now_us + _LAG_US
        self._gone: set[ReplicaRef] = set()  # incarnations that the store lists no more, whose lines still exist
        self._changing: list[LaneRange] = []  # lanes whose replicas begin a range after a change that was not urgent

    # --- words --------------------------------------------------------------------------------------------------------
    def publish(self, lane: int, number: int, closing: bool, target: int = 0) -> None:
        """Publish a lane's range word. Loads after a closing word see every line that was counted before it."""
        word = RangeWord(number, closing).encode() if number else NO_RANGE
        tags = RangeKey(lane, 0)
        if tags not in self._words:
            self._words.add(tags, word, target)
        else:
            self._words.set(tags, target, _TARGET)
            self._words.set(tags, word)
        if closing:
            self._fabric.fence()

    # --- keeping ------------------------------------------------------------------------------------------------------
    def keep(
        self, range_: Range, topic: Topic, lane: Lane | None = None, broker_lane: TopicLane | None = None
    ) -> LaneRange:
        """Start managing a lane. Its range may be sealed, by a clean stop: then the lane continues at its end."""
        durable = range_.start if range_.open else range_.end or 0
        lane_range = self.lanes[range_.lane] = LaneRange(range_, topic, lane, broker_lane, durable=durable)
        self._unsettled[range_.lane] = lane_range
        if range_.open:
            self._announce(lane_range)
        return lane_range

    def drop(self, lane: int) -> None:
        """Stop managing a lane, which is deleted, or whose last range is permanently sealed."""
        lane_range = self.lanes.pop(lane, None)
        self._unsettled.pop(lane, None)
        if lane_range is not None:
            self.grown.discard(lane_range)
            self._moved.discard(lane_range)
            self._unsaved.discard(lane_range)
            self._changing = [other for other in self._changing if other is not lane_range]
            self.publish(lane, 0, closing=False)

    def keep_only(self, lanes: AbstractSet[int]) -> None:
        """Drop the objects of lines of other lanes: their topics are deleted."""
        self.lines.keep(lanes)
        self._words.keep(lanes)

    def follow(self, lane: int, topic: Topic, broker_lane: TopicLane | None = None) -> None:
        """Adopt a change of a lane in the store."""
        lane_range = self.lanes[lane]
        if lane_range.follow(topic, broker_lane):
            self._unsettled[lane] = lane_range

    def _announce(self, lane_range: LaneRange) -> None:
        self.publish(lane_range.number, lane_range.range_.number, closing=False)
        lane_range.reopen()
        if lane_range.lane is not None:
            first = [ref.region_prefix for ref in first_woken(lane_range.range_)]
            lane_range.lane.wake([ref.region_prefix for ref in lane_range.range_.replicas], first)
        for ref in lane_range.range_.replicas if self._wakes else ():
            self._env.bell.ring(ref.region_prefix)

    def durable(self, lane: int) -> int:
        """Count how far a lane is durable. Its sealer may count directly: no other process closes its range."""
        lane_range = self.lanes[lane]
        if lane_range.range_.open and not lane_range.closing:
            lane_range.count(durable_through(lane_range.range_, self.lines.load(lane_range.range_)))
        return lane_range.durable

    def wake_replicas(self, yes: bool) -> None:
        """Set whether replicas are woken when a range is announced. They are not before we have started."""
        self._wakes = yes

    def ring(self, ref: ReplicaRef) -> None:
        """Wake a replica."""
        self._env.bell.ring(ref.region_prefix)

    # --- looking ------------------------------------------------------------------------------------------------------
    def look(self, now_us: int) -> None:
        """Do the work that is due. Cheap when there is none."""
        if now_us < self._look_us:
            return
        self._look_us, self._now_us = now_us + _LOOK_US, now_us
        self._look_after_grown()
        self._moved |= self.grown
        self.grown.clear()
        if not self.lanes:
            return
        self.look_at_replicas(now_us)
        if now_us >= self._lag_us:
            self._lag_us = now_us + _LAG_US
            self._find_slow()
        sealed = 0
        for lane_range in list(self._unsettled.values()):
            if sealed < SEALS_PER_LOOK_MAX:
                sealed += self._settle(lane_range)

    def look_at_replicas(self, now_us: int) -> None:
        """Update the replicas, and which of them are reliable."""
        if now_us >= self._members_us:
            self._members_us = now_us + _MEMBERS_US
            self._gone |= self.replicas.update(self._directory.replicas.all())
            if self._gone:
                self._remove_lines()
        if self.replicas.look(now_us):
            self._unsettled = dict(self.lanes)

    def _remove_lines(self) -> None:
        """Remove the durable lines of incarnations that no open range names: no process will ever count them."""
        open_ = [range_ for range_ in self._directory.ranges.all() if range_.open]
        named = {durable_region(ref) for range_ in open_ for ref in range_.replicas}  # disks may be unknown
        for ref in [ref for ref in self._gone if durable_region(ref) not in named]:
            self._fabric.remove(durable_region(ref))
            self.lines.forget(ref)
            self._gone.discard(ref)

    def _settle(self, lane_range: LaneRange) -> bool:
        """Change a lane's range if necessary. True if its range was sealed, or an attempt was made."""
        if self._ring_missing(lane_range):
            return False
        if (
            lane_range.broker_lane is not None
            and lane_range.broker_lane.end is not None
            and self._finish(lane_range, lane_range.broker_lane)
        ):
            return True
        range_ = lane_range.range_
        bad = [ref for ref in range_.replicas if self.replicas.problem(ref) or self._is_late(lane_range, ref)]
        lane_range.note_bad(bool(bad), self._now_us)
        if range_.open and not bad and self._as_asked(lane_range) and not lane_range.closing:
            if lane_range.broker_lane is None or lane_range.broker_lane.end is None:
                self._unsettled.pop(lane_range.number, None)
            return False
        if self._now_us < lane_range.retry_us or not (self._is_urgent(lane_range, bad) or self._may_change()):
            return False
        lane_range.retry_us = self._now_us + _us(RANGE_RETRY_S)
        refs = self._choose(lane_range, bad)
        if not self._better(lane_range, refs, bad):
            return False
        return self.seal(lane_range, refs, self._reason(bad)) if range_.open else self._reopen(lane_range, refs)

    @staticmethod
    def _as_asked(lane_range: LaneRange) -> bool:
        """Whether the range has the number of copies that its topic asks for. `topic alter` may change that."""
        range_, topic = lane_range.range_, lane_range.topic
        return len(range_.replicas) == topic.replicas and range_.durable_on == topic.durable_on

    def _ring_missing(self, lane_range: LaneRange) -> bool:
        """Whether the ring of a broker's lane does not exist yet."""
        if (
            lane_range.broker_lane is not None
            and lane_range.ring is None
            and self._fabric.exists(lane_range.broker_lane.region)
        ):
            lane_range.ring = attach_ring(self._fabric, lane_range.broker_lane.region, ORDER)
        return lane_range.broker_lane is not None and lane_range.ring is None and lane_range.broker_lane.end is None

    def _choose(self, lane_range: LaneRange, bad: list[ReplicaRef]) -> list[ReplicaRef]:
        """Choose the best replicas that are available now. Reliable ones stay."""
        late = {number for number, since in lane_range.late_us.items() if self._now_us - since < _us(REPLICA_LATE_S)}
        late |= {ref.replica for ref in bad if ref in self.replicas.good and self._is_late(lane_range, ref)}
        keep = [
            ref for ref in lane_range.range_.replicas if ref not in bad
        ] + bad  # a bad replica may have a new incarnation
        for avoided in (self.replicas.avoided() | late, self.replicas.avoided()):  # a late one is better than none
            found = self._directory.replicas.choose(lane_range.topic.replicas, keep, avoided)
            good = [ref for ref in found if ref in self.replicas.good]
            if len(good) >= max(1, lane_range.topic.durable_on):
                break
        return good

    def _better(self, lane_range: LaneRange, refs: list[ReplicaRef], bad: list[ReplicaRef]) -> bool:
        """Whether to open a new range with these replicas now."""
        range_, enough = lane_range.range_, max(1, lane_range.topic.durable_on)
        if len(refs) < enough:
            if not lane_range.reported:
                self._env.journal.warn(
                    "range waits",
                    topic=lane_range.topic.name,
                    lane=lane_range.number,
                    range=range_.number,
                    live=len(refs),
                    needed=enough,
                    bad=self._reason(bad),
                    do="start replicas, or add some",
                )
            lane_range.reported = True
            return False
        if not range_.open or lane_range.closing:
            return True
        altered = range_.durable_on != lane_range.topic.durable_on
        if set(refs) == set(range_.replicas) and not altered:
            return False
        if not bad:
            waited = lane_range.sealed_us is None or self._now_us - lane_range.sealed_us >= _us(RANGE_GRACE_S)
            return (altered or len(refs) != len(range_.replicas)) and waited
        full = len(refs) >= lane_range.topic.replicas
        return self._is_urgent(lane_range, bad) or full or self._now_us - (lane_range.bad_us or 0) >= _us(RANGE_GRACE_S)

    @staticmethod
    def _is_urgent(lane_range: LaneRange, bad: list[ReplicaRef]) -> bool:
        """Whether no entry of a lane can become durable until its range has changed."""
        range_ = lane_range.range_
        return not range_.open or lane_range.closing or len(range_.replicas) - len(bad) < range_.durable_on

    def _may_change(self) -> bool:
        """Whether a change that is not urgent may start now.

        Only a few run at a time: the replicas of the new range make files, and the lane's acks wait for that.
        """
        self._changing = [lane_range for lane_range in self._changing if self._is_beginning(lane_range)]
        return len(self._changing) < max(1, len(self.lanes) // RANGE_CHANGES_SHARE)

    def _is_beginning(self, lane_range: LaneRange) -> bool:
        late = lane_range.sealed_us is None or self._now_us - lane_range.sealed_us >= _us(RANGE_RETRY_S)
        return not late and lane_range.range_.open and None in self.lines.load(lane_range.range_)

    def _reason(self, bad: Iterable[ReplicaRef]) -> str:
        problems = [f"replica {ref.replica} is {self.replicas.problem(ref) or 'late'}" for ref in bad]
        return ", ".join(problems) or "the topic asks for other replicas, or more are available"

    # --- sealing ------------------------------------------------------------------------------------------------------
    def seal(self, lane_range: LaneRange, refs: list[ReplicaRef], why: str) -> bool:
        """Seal an open range at its durable end, and open the next one there with these replicas."""
        end, end_seq = self._close(lane_range)
        if end_seq is None:
            self._counters.seals_failed += 1
            self._env.journal.warn(
                "range not sealed", lane=lane_range.number, range=lane_range.range_.number, end=end, why="no entry"
            )
            self._announce(lane_range)
            return True
        opened = self._directory.ranges.seal_and_open(
            lane_range.number, lane_range.range_.number, end, end_seq, refs, self._epoch
        )
        if opened is None:
            self._counters.seals_failed += 1
            self._adopt_again(lane_range)
            return True
        self._env.steps.at(Step.SEAL_DECIDED)
        self._counters.seals += 1
        self._env.journal.note(
            "range sealed",
            topic=lane_range.topic.name,
            lane=lane_range.number,
            range=lane_range.range_.number,
            end=end,
            why=why,
            replicas=[ref.replica for ref in refs],
        )
        for ref in lane_range.range_.replicas:
            if ref in self.replicas.good and self._is_late(lane_range, ref):
                lane_range.late_us[ref.replica] = self._now_us
        self._go_on(lane_range, opened)
        self._changing.append(lane_range)
        self._env.steps.at(Step.SEAL_OPENED)
        return True

    def _close(self, lane_range: LaneRange) -> tuple[int, int | None]:
        """Publish that the range is closing, and then read its end: never in the opposite order."""
        lane_range.close()
        self.publish(lane_range.number, lane_range.range_.number, closing=True)
        self._env.steps.at(Step.SEAL_CLOSING)
        end = durable_through(lane_range.range_, self.lines.load(lane_range.range_))
        lane_range.count(end)
        self._env.steps.at(Step.SEAL_LINES)
        return end, lane_range.seq_at(end)

    def _go_on(self, lane_range: LaneRange, opened: Range) -> None:
        lane_range.go_on(opened, self._now_us)
        self._unsettled[lane_range.number] = lane_range
        self._announce(lane_range)

    def _adopt_again(self, lane_range: LaneRange) -> None:
        """Adopt the open range of the store, which refused ours. Recorded ends are never computed again."""
        found = self._directory.ranges.open_range(lane_range.number)
        if found is None:
            return  # the topic was deleted, and the next look at the store drops the lane
        lane_range.adopt(found)
        self._announce(lane_range)

    def _reopen(self, lane_range: LaneRange, refs: list[ReplicaRef]) -> bool:
        """Open the next range after a clean stop, at the end of the last one."""
        opened = self._directory.ranges.reopen(
            lane_range.number, refs, self._epoch
        ) or self._directory.ranges.open_range(lane_range.number)
        if opened is not None:
            self._go_on(lane_range, opened)
        return True

    def _finish(self, lane_range: LaneRange, lane: TopicLane) -> bool:
        """Seal the last range of a closed lane, once it is durable through the lane's end."""
        end = lane.end or 0
        if self.durable(lane_range.number) < end:
            return False
        return self.seal_last(lane_range, end, lane.end_seq or 0)

    def seal_last(self, lane_range: LaneRange, end: int, end_seq: int) -> bool:
        """Seal a range that is durable to its end, without opening a next one."""
        self.publish(lane_range.number, lane_range.range_.number, closing=True)
        lane_range.close()
        self._env.steps.at(Step.SEAL_LAST_CLOSING)
        if not self._directory.ranges.seal_clean(
            lane_range.number, lane_range.range_.number, end, end_seq, self._epoch
        ):
            return False
        self._env.steps.at(Step.SEAL_LAST_DECIDED)
        self._counters.seals += 1
        self.drop(lane_range.number)
        return True

    # --- lag ----------------------------------------------------------------------------------------------------------
    def _is_late(self, lane_range: LaneRange, ref: ReplicaRef) -> bool:
        since = lane_range.slow_us.get(ref)
        return since is not None and self._now_us - since >= _us(REPLICA_LAG_S)

    def _find_slow(self) -> None:
        """Find the replicas that lag beyond the limit while others keep up."""
        for lane_range in self.lanes.values():
            moves = lane_range in self._moved or lane_range.broker_lane is not None or lane_range.slow_us
            if not moves or len(lane_range.range_.replicas) < 2:
                continue
            lines = self.lines.load(lane_range.range_)
            behind = {
                ref: lane_range.ordered() - (lane_range.range_.start if line is None else line)
                for ref, line in zip(lane_range.range_.replicas, lines, strict=True)
            }
            limit = self._lag_limit(lane_range)
            for ref, lag in behind.items():
                others = min(other for one, other in behind.items() if one != ref)
                if lag > limit >= 2 * others:
                    lane_range.slow_us.setdefault(ref, self._now_us)
                else:
                    lane_range.slow_us.pop(ref, None)
            if any(self._is_late(lane_range, ref) for ref in lane_range.slow_us):
                self._unsettled[lane_range.number] = lane_range
        self._moved.clear()

    def _lag_limit(self, lane_range: LaneRange) -> int:
        slots = (
            lane_range.lane.slots
            if lane_range.lane is not None
            else lane_range.ring.slots
            if lane_range.ring is not None
            else 0
        )
        return min(REPLICA_LAG_ENTRIES_MAX, int(REPLICA_LAG_SHARE * slots))

    # --- ceilings -----------------------------------------------------------------------------------------------------
    def grew(self, lane: int) -> None:
        """Note that a lane of ours has new entries."""
        if (lane_range := self.lanes.get(lane)) is not None:
            self.grown.add(lane_range)

    def _look_after_grown(self) -> None:
        for lane_range in self.grown:
            if lane_range.lane is not None:
                self.reserve(lane_range.lane)
                self._unsaved.add(lane_range)
        for lane_range in list(
            self._unsaved
        ):  # replicas keep checkpoints: older entries may go, and a restart replays only the newer ones
            if lane_range.lane is None or lane_range.lane.save_if_due(self._now_us):
                self._unsaved.discard(lane_range)

    def reserve(self, lane: Lane) -> None:
        """Reserve positions and handles in the store, well ahead of the order."""
        capacity, order, table = lane.capacity, lane.order, lane.order.table
        if capacity is None:
            return
        (index, seq), handles = capacity.ceiling, max(CEILING_AHEAD_HANDLES, 4 * table.capacity)
        enough = index - order.next_index > CEILING_AHEAD // 2 and seq - order.next_seq > CEILING_AHEAD_SEQ // 2
        if enough and table.handles_reserved - table.next_handle > handles // 2:
            return
        number = order.topic.lane
        wanted = order.next_index + CEILING_AHEAD, order.next_seq + CEILING_AHEAD_SEQ
        self._env.steps.at(Step.CEILING_WANTED)
        if self._directory.ranges.raise_ceiling(number, *wanted, self._epoch, handle=table.next_handle + handles):
            self._env.steps.at(Step.CEILING_RAISED)
            self.learn_ceiling(lane)

    def learn_ceiling(self, lane: Lane) -> None:
        """Read the reservations of a lane from the store."""
        number = lane.order.topic.lane
        if lane.capacity is not None:
            lane.capacity.raise_to(LanePosition(*self._directory.ranges.ceiling(number)))
            lane.order.table.reserve_handles(self._directory.ranges.handle_ceiling(number))


_SILENT_US: Final = int(REPLICA_SILENT_S * 1_000_000)
_UNHEALTHY: Final = 7
"""Bits of a health word that concern the whole disk. A replica that repairs one copy still serves its other copies."""


class Replicas:
    """All replica incarnations of the store. Heartbeats are timed only by our clock."""

    def __init__(self, lines: DurableLines, now_us: int) -> None:
        self._lines, self._now_us = lines, now_us
        self._pulses = Pulses[ReplicaRef]()
        self.members: list[ReplicaMember] = []
        self.good: set[ReplicaRef] = set()
        self.why: dict[ReplicaRef, str] = {}  # problems of the others

    def update(self, members: list[ReplicaMember]) -> set[ReplicaRef]:
        """Adopt the store's list. Returns incarnations that left it, or came and went since the last one."""
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

    def look(self, now_us: int) -> bool:
        """Check the heartbeat and the health of all replicas. True if the set of reliable replicas has changed."""
        self._now_us, before = now_us, self.good
        found = {member.ref: self._problem(member) for member in self.members}
        self.good = {ref for ref, problem in found.items() if not problem}
        self.why = {ref: problem for ref, problem in found.items() if problem}
        return self.good != before

    def problem(self, ref: ReplicaRef) -> str:
        """The problem of one incarnation; empty when there is none."""
        return "" if ref in self.good else self.why.get(ref, "gone")

    def avoided(self) -> set[int]:
        """Numbers of replicas whose newest incarnation is not dead in the store, but which we consider unreliable."""
        newest = {member.replica: member for member in self.members if member.state is not ReplicaState.DEAD}
        return {number for number, member in newest.items() if member.ref not in self.good}

    def live(self) -> list[ReplicaMember]:
        """Incarnations that are not dead in the store, draining ones included."""
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
