"""A sequencer: it stands by, is elected, takes over, and runs rounds until it is deposed or stopped.

Elections. The store names the sequencer that won the last election, with a mark that identifies its process forever.
That sequencer publishes its heartbeat in the frontiers of its epoch. A standby takes over
- immediately, when the driver has seen that process end (possible on the same host);
- when the heartbeat stops for too long by the standby's own clock: clocks of hosts are never compared;
- when an operator asked for a hand-over to this standby.

A winner that has not started its epoch yet gets more time: it doubles with each epoch that is not started, up to a
limit. So two standbys that consider each other dead do not depose each other forever. A wrong guess costs a moment's
pause and nothing else: a takeover is safe against a live predecessor.

Leading. `lead` is the usual entry point. A standby process makes a Sequencer, which prefetches while another one may
lead, and then calls `begin` to lead.

Rounds. Each round takes published entries of all brokers, orders them lane by lane, and writes, in this order: order
entries, answers, frontiers, waiting batches, read-through watermarks. Then it clears the slots of batches that wait no
longer. Each kind is flushed before the next is written, so after any crash a successor finds every entry in one of
these regions. A round begins with the check whether a later epoch is open; if so, this leadership is over.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from embarcadero.config import DEFAULTS, FabricSizes
from embarcadero.config.table import SequencerKeys as Settings
from embarcadero.env import Env, Journal
from embarcadero.fabric.layout import Entries, every, join, pick
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.region import Fabric, epoch_folder, writer_of
from embarcadero.limits import EPOCHS_AHEAD_MAX, STANDBY_LOOKS
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.placement.records import Epochs, HandOver, LeadershipRecord
from embarcadero.sequencer.leader.brokers import BrokerIncarnations, PendingSource, take_plain
from embarcadero.sequencer.leader.leadership import ClusterParts, LeaderLanes, Leadership, Upkeep
from embarcadero.sequencer.leader.takeover import Takeover
from embarcadero.sequencer.order.batches import is_batch, result_line
from embarcadero.sequencer.order.lane import Lane
from embarcadero.sequencer.order.sessions import NEVER, ReorderBuffer
from embarcadero.sequencer.ranges.keeper import RangeKeeper, SequencerCounters
from embarcadero.sequencer.ranges.recovery import Recovery
from embarcadero.sequencer.ranges.recovery_sources import Mirrors
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, Outcome

_NO_PROCESS: Final = ""
_ASKED: Final = "hand-over"
_LOOK_US: Final = 2_000
"""Checking whether the store has changed is cheap, but not as cheap as an empty round."""
_LOOK_LONE_US: Final = 10_000
"""While batches come one by one, publishers wait for each answer, and the check would delay it."""


class StandbySequencer:
    """A process that may become the next leader. Call `look` periodically; it returns an epoch that was won."""

    def __init__(self, env: Env, cluster: ClusterParts, number: int, mark: str, after_us: int) -> None:
        """Stand by as sequencer `number`.

        `mark` identifies this process forever. `after_us` is how long the leader's heartbeat may stand still.
        """
        self.number, self.mark = number, mark
        self._directory, self._clock, self._journal = cluster.directory, env.clock, env.journal
        self._after_us = after_us
        self.hurries = True  # perhaps no sequencer leads: the epoch that was won last must start immediately
        self._leader = LeaderView(cluster.fabric)
        self._watch = StoreWatch(cluster.directory)
        self._epochs = Epochs()
        self._elected: LeadershipRecord | None = None
        self._asked: HandOver | None = None
        self._stopping = False
        self._ended = _NO_PROCESS  # mark of the process that was seen to end
        self._sign = (-1, -1)  # the last sign of life: (epoch handed out, heartbeat count)
        self._sign_us = env.clock.now_us()

    # --- for the driver -----------------------------------------------------------------------------------------------
    @property
    def watched(self) -> str:
        """Mark of the process whose end makes us take over; empty when there is none."""
        elected = self._elected
        if elected is None or elected.epoch != self._epochs.handed_out or elected.mark == self.mark:
            return _NO_PROCESS
        return elected.mark

    @property
    def leading(self) -> int:
        """The newest started epoch, as last seen."""
        return self._epochs.started

    def process_ended(self, mark: str) -> None:
        """Note that the driver saw this process end."""
        self._ended = mark

    @property
    def patience_us(self) -> int:
        """How long the heartbeat of the sequencer that was elected last may stand still."""
        return self._after_us << min(EPOCHS_AHEAD_MAX, max(0, self._epochs.handed_out - self._epochs.started))

    def wait_us(self) -> int:
        """The longest sleep before the next look."""
        return max(1, self.patience_us // STANDBY_LOOKS)

    # --- looking ------------------------------------------------------------------------------------------------------
    def look(self) -> int | None:
        """Check the leader, and hold an election if it is time. Returns the epoch if we won: take over now."""
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
        self._watch.reread()  # the store has changed, whichever standby won
        self._ended = _NO_PROCESS  # acted upon
        self._sign_us = now_us
        if epoch is not None:
            self.hurries = reason != _ASKED
            self._journal.note("elected", epoch=epoch, candidate=self.number, reason=reason)
        return epoch

    def _learn(self) -> None:
        self._epochs, self._elected = self._directory.elections.newest_epochs(), self._directory.elections.leadership()
        self._asked, self._stopping = self._directory.elections.asked_hand_over(), self._directory.elections.stopping
        if self._ended != self.watched:
            self._ended = _NO_PROCESS  # obsolete; if the report was wrong, that process may lead again later

    def _reason(self, now_us: int) -> str:
        """The reason to take over; empty when there is none."""
        handed_out, asked = self._epochs.handed_out, self._asked
        if handed_out == 0 and self.number == 0:
            return "first leader"
        if self.watched and self._ended == self.watched:
            return "the leader's process ended"
        if asked is not None and asked.to == self.number and asked.epoch == handed_out == self._epochs.started:
            return _ASKED
        if now_us - self._sign_us >= self.patience_us:
            return "the leader's heartbeat stopped"
        return ""


# --- rounds -----------------------------------------------------------------------------------------------------------
class Rounds:
    """Runs the rounds of a leader, one after another."""

    def __init__(self, leader: Leadership, lanes: LeaderLanes, brokers: BrokerIncarnations, upkeep: Upkeep) -> None:
        self._leader, self._lanes, self._brokers, self._upkeep = leader, lanes, brokers, upkeep
        self._steps, self._bell = leader.env.steps, leader.env.bell
        self._buffer, self._refused = lanes.buffer, lanes.refused
        self.more = False  # the last round left published entries for the next one
        self.depth = 0  # least number of batches in flight of the publishers in the last round
        self._look_us = 0  # time of the next look into the store

    def next(self) -> int:
        """Run one pass over all rings. Returns the amount of work done: 0 when idle."""
        leader, upkeep = self._leader, self._upkeep
        leader.tick()
        offers = self._offers()
        lone = len(offers) == 1 and offers[0][1] == 1 and self._one_batch(offers[0][0])
        if leader.now_us >= self._look_us + (_LOOK_LONE_US if lone else 0):
            self._look_us = leader.now_us + _LOOK_US
            leader.ask_store(upkeep.refresh)
            offers = self._offers() if not lone else []
        upkeep.beat()
        leader.ask_store(upkeep.look_after_ranges)
        if lone:
            return 1
        entries = self._take(offers)
        if entries is not None:
            self._steps.at(Step.ROUND_TAKEN)
            self.depth = _depth(entries)
            self._decide(entries)
        lanes = self._lanes.by_number.values()
        work = sum(lane.expire(leader.now_us, leader.wall_us) for lane in lanes)
        work += len(entries) if entries is not None else 0
        self._lanes.release_backlog()
        self._write()
        upkeep.finish_closing()
        self._count(len(entries) if entries is not None else 0)
        return work

    def behind(self) -> bool:
        """Whether entries were published since the round began."""
        return any(source.offer(1, 0) for source in self._brokers.sources.values())

    def next_deadline_us(self) -> int | None:
        """Time of the earliest deadline; None when there is none."""
        due = min((lane.due_us for lane in self._lanes.by_number.values()), default=NEVER)
        return None if due == NEVER else due

    def _is_due(self) -> bool:
        """Whether a deadline has passed."""
        due = self.next_deadline_us()
        return due is not None and due <= self._leader.now_us

    def _count(self, entries: int) -> None:
        counters = self._leader.counters
        if entries:
            counters.entries += entries
            counters.round_entries.add(entries)
            counters.round_us.add(self._leader.env.clock.now_us() - self._leader.now_us)
        counters.rounds += 1

    # --- taking -------------------------------------------------------------------------------------------------------
    def _offers(self) -> list[tuple[PendingSource, int]]:
        """Choose how many entries to take from each broker. Each round starts with a different broker."""
        remaining, offers = self._leader.sizes.round_entries, []
        for source in self._brokers.in_turn(self._leader.counters.rounds):
            if count := source.offer(remaining, int(self._buffer.by_origin[source.member.handle])):
                offers.append((source, count))
                remaining -= count
        self.more = remaining <= 0
        return offers

    def _take(self, offers: list[tuple[PendingSource, int]]) -> Entries | None:
        """Take the offered entries, and the backlog."""
        backlog = self._lanes.backlog
        parts = [pick(self._buffer.entries, backlog)] if len(backlog) else []
        requests = self._leader.settings.controls_per_round
        if offers and (plain := take_plain(offers)) is not None:
            return join([*parts, plain]) if parts else plain
        for source, count in offers:
            entries, whole = source.take(count, requests)
            if not whole:
                self._leader.problems.append(
                    f"{source.member.region_prefix}: pending entry {source.next} is not valid; closed"
                )
                source.close(whole=False)
            if len(entries):
                parts.append(entries)
                requests -= source.requests
        self.more |= requests <= 0
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else join(parts)

    # --- deciding -----------------------------------------------------------------------------------------------------
    def _one_batch(self, source: PendingSource) -> bool:
        """Run a whole round for one batch, if it is the common case. The order of stores is that of every round."""
        line, handle = source.line(), source.member.handle
        lane = self._lanes.by_number.get(line[3] & 0xFFFF_FFFF)
        if lane is None or len(self._lanes.backlog) or not (source.plain and is_batch(line, source.next)):
            return False
        if self._is_due():
            return False
        self._steps.at(Step.ROUND_TAKEN)
        position = lane.decide_one(line, handle, self._leader.now_us, self._leader.wall_us)
        if position is None:
            return False
        self._steps.at(Step.ROUND_ENTRIES)
        self.depth = line[1] - line[2]
        source.pass_over(1)
        source.answer_line(result_line(line, *position))
        self._steps.at(Step.ROUND_RESULTS)
        lane.publish()
        source.publish()
        self._steps.at(Step.ROUND_FRONTIERS)
        source.give_free()
        self._steps.at(Step.ROUND_READ_THROUGH)
        if lane.capacity is not None:
            self._lanes.ranges.grew(lane.order.topic.lane)
        for bell in lane.first_bells:
            self._bell.ring(bell)
        # An early wake prepares the broker for an ack that waits for one disk. With several, replicas need processors.
        rings = not line[7] & 0xFF or len(lane.first_bells) <= 1
        self._brokers.wake([source] if rings else [], grown=True)
        self._upkeep.finish_closing()
        self._count(1)
        return True

    def _decide(self, entries: Entries) -> None:
        lanes = entries["lane"]
        if every(lanes == lanes[0]):
            self._decide_lane(int(lanes[0]), entries)
            return
        keys = lanes.astype(np.int64) << 32 | np.arange(len(entries))
        keys.sort()
        for run in np.split(keys, np.flatnonzero(np.diff(keys >> 32)) + 1):
            self._decide_lane(int(run[0] >> 32), pick(entries, run & 0xFFFF_FFFF))

    def _decide_lane(self, number: int, entries: Entries) -> None:
        leader, lanes = self._leader, self._lanes
        if number not in lanes.by_number:
            leader.ask_store(self._upkeep.meet_new_topic)
        lane = lanes.by_number.get(number)
        if lane is None:
            waits = leader.store_is_failing or number in lanes.without_memory or number in lanes.recovery.lanes
            self._refused.answer_all(entries, Outcome.BACKPRESSURE if waits else Outcome.UNKNOWN_TOPIC)
        else:
            lane.decide(entries, leader.now_us, leader.wall_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        lanes = self._lanes.by_number.values()
        written = [lane for lane in lanes if lane.write()]
        if written:
            self._steps.at(Step.ROUND_ENTRIES)
        answers = self._refused.take_answers()
        for lane in lanes:
            answers += lane.order.out.take_answers()
        answered = self._brokers.answer(answers)
        if answered:
            self._steps.at(Step.ROUND_RESULTS)
        for lane in written:
            lane.publish()
        for source in answered:
            source.publish()
        if answered or written:
            self._steps.at(Step.ROUND_FRONTIERS)
        freed = self._lanes.write_buffer()
        for source in self._brokers.sources.values():
            source.give_free()
        if answered or len(freed):
            self._steps.at(Step.ROUND_READ_THROUGH)
        self._lanes.clear_slots(freed)
        self._ring_replicas(written)
        self._brokers.wake(answered, bool(written))

    def _ring_replicas(self, lanes: list[Lane]) -> None:
        """Wake the replicas of lanes that have new entries."""
        for lane in lanes:
            if lane.capacity is not None:
                self._lanes.ranges.grew(lane.order.topic.lane)
        for bell in dict.fromkeys(bell for lane in lanes for bell in lane.bells):  # an order without hashes
            self._bell.ring(bell)


def _depth(entries: Entries) -> int:
    """Least number of batches in flight of these publishers; 0 if a request waits for its answer."""
    if (entries["kind"] != BATCH_KIND).any():
        return 0
    return int((entries["session_seq"] - entries["low"]).min())


# --- the sequencer of one epoch ---------------------------------------------------------------------------------------
class Sequencer:
    """Leads one epoch. `deposed` is set when a later epoch has begun."""

    def __init__(
        self, env: Env, cluster: ClusterParts, settings: Settings = DEFAULTS.sequencer, epoch: int | None = None
    ) -> None:
        """Prepare to lead. Call `begin` before any other method.

        `epoch` is an epoch that was won in an election. Without it, take the next epoch, whichever sequencer leads.
        """
        self.leadership = leader = Leadership(env, cluster, settings, epoch)
        self._lanes = LeaderLanes(leader, cluster.mirrors)
        self.brokers = BrokerIncarnations(leader.led, leader.directory)
        self._upkeep = Upkeep(leader, self._lanes, self.brokers)
        self._rounds = Rounds(leader, self._lanes, self.brokers, self._upkeep)
        self._takeover = Takeover(leader, self._lanes, self.brokers, self._upkeep)
        leader.unless_deposed(self._takeover.prefetch, None)

    def begin(self) -> None:
        """Take over. Once our epoch line is open, other processes wait until we have started."""
        leader = self.leadership
        if not leader.deposed:
            leader.tick()
            leader.epochs.open(leader.epoch)
            leader.env.steps.at(Step.TAKEOVER_EPOCH_OPEN)
            leader.unless_deposed(self._takeover.begin, None)

    def round(self) -> int:
        """Run one pass over all rings. Returns the amount of work done: 0 when idle."""
        leader = self.leadership
        return 0 if leader.is_over() else leader.unless_deposed(self._round, 0)

    def _round(self) -> int:
        work = self._rounds.next()
        self._upkeep.be_seen()
        return work

    def drain(self) -> bool:
        """Do one step towards a clean stop: nothing more is ordered. True when this leadership may end."""
        return self.leadership.is_over() or self._upkeep.drain()

    # --- for the driver -----------------------------------------------------------------------------------------------
    def behind(self) -> bool:
        """Whether entries were published since the round began."""
        return self._rounds.behind()

    def awake(self, now: bool) -> bool:
        """Publish whether we look without a ring. True if that changed; after a change to no, look before sleeping."""
        return self._upkeep.awake(now)

    def next_deadline_us(self) -> int | None:
        """Time of the earliest deadline; None when there is none."""
        return self._rounds.next_deadline_us()

    @property
    def deposed(self) -> bool:
        """Whether a later epoch has begun."""
        return self.leadership.deposed

    @property
    def more(self) -> bool:
        """Whether the last round left published entries for the next one."""
        return self._rounds.more

    @property
    def depth(self) -> int:
        """Least number of batches in flight of the publishers in the last round."""
        return self._rounds.depth

    @property
    def problems(self) -> list[str]:
        """Problems with rings, for the log; the driver removes them."""
        return self.leadership.problems

    @property
    def settings(self) -> Settings:
        """The sequencer's part of the configuration."""
        return self.leadership.settings

    @property
    def journal(self) -> Journal:
        """The journal for events."""
        return self.leadership.env.journal

    # --- for metrics and tests ----------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that is led."""
        return self.leadership.epoch

    @property
    def counters(self) -> SequencerCounters:
        """Counters of this leadership."""
        return self.leadership.counters

    @property
    def lanes(self) -> dict[int, Lane]:
        """The lanes that are ordered here, by number."""
        return self._lanes.by_number

    @property
    def without_memory(self) -> set[int]:
        """Lanes for which the fabric has no memory left."""
        return self._lanes.without_memory

    @property
    def buffer(self) -> ReorderBuffer:
        """Batches that wait for a gap to close, of all lanes."""
        return self._lanes.buffer

    @property
    def ranges(self) -> RangeKeeper:
        """Open ranges."""
        return self._lanes.ranges

    @property
    def recovery(self) -> Recovery:
        """Lanes that are being recovered."""
        return self._lanes.recovery


def lead(
    env: Env,
    fabric: Fabric,
    directory: Directory,
    sizes: FabricSizes,
    settings: Settings = DEFAULTS.sequencer,
    epoch: int | None = None,
    mirrors: Mirrors | None = None,
) -> Sequencer:
    """Make a sequencer and take over immediately."""
    sequencer = Sequencer(env, ClusterParts(fabric, directory, sizes, mirrors), settings, epoch)
    sequencer.begin()
    return sequencer


def give_up_epoch(fabric: Fabric, directory: Directory, epoch: int) -> None:
    """Remove the regions of a takeover that failed, so that other standbys can try.

    No process reads regions of an epoch that has not started. No epoch before ours will start, because only the newest
    epoch that was handed out can start.
    """
    started = directory.elections.started_epoch()
    if started >= epoch:
        return
    unused = {epoch_folder(number) for number in range(started + 1, epoch + 1)}
    for name in fabric.names():
        if writer_of(name) in unused:
            fabric.remove(name)
