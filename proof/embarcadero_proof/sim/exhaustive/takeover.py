"""Scopes "ack", "read", "prefetched", "answers" and "rivals": acting on a sequencer's writes during a takeover.

Two batches, X of broker 0 and Y of broker 1, are published. The old sequencer is about to order X, then Y. A new one
takes them in the opposite order, so each batch that it does not find gets another position. These parts run here:
- old: the order of stores of one round, sequencer/leader/sequencer.py `_one_batch`, with the rings and frontiers of
  fabric/;
- new, next: `Sequencer.begin`, `Takeover.begin`, `Rounds._write` (sequencer/leader/), with the real EpochTable,
  PredecessorState, Lane and brokers' rings; the store is two numbers, as in placement/epochs.py;
- broker: fabric/leader.py and the relay of broker/pending.py; reader: the loads of broker/lane_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import numpy as np

from embarcadero.broker.pending import Relay, Waiting
from embarcadero.config import FabricSizes
from embarcadero.env import Env, SystemClock
from embarcadero.errors import invariant
from embarcadero.fabric.layout import (
    ORDER,
    PENDING,
    RESULT,
    SEQUENCER_FRONTIERS_BYTES,
    BrokerLine,
    Entries,
    Line,
    RegionKind,
    SequencerLine,
    frontier_offset,
    join,
    seal,
)
from embarcadero.fabric.leader import EpochTable, LeaderView, create_epochs
from embarcadero.fabric.lines import FrontierWriter, RingReader, RingWriter, create_ring
from embarcadero.fabric.region import EPOCHS_REGION, Fabric, Shape, order_region, results_region
from embarcadero.sequencer.leader.brokers import BrokerIncarnations, PendingSource
from embarcadero.sequencer.leader.takeover import PredecessorState, Prefetched, read_lane
from embarcadero.sequencer.order.batches import LaneOrder, OpenedFacts, open_entry, order_line, result_line
from embarcadero.sequencer.order.lane import Lane, LedEpoch
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable, create_reorder_region
from embarcadero.types import EntryKind, Member, Topic
from embarcadero_proof.bugs.table import is_injected
from embarcadero_proof.sim.exhaustive.actor import Lines, Play, Stage
from embarcadero_proof.sim.exhaustive.explore import Facts, Scope
from embarcadero_proof.sim.exhaustive.regions import FirstFabric

LANE: Final = 0
SIZES: Final = FabricSizes(
    pending_slots=1, order_slots=4, held_slots=1, log_bytes=4096, chunk_bytes=1024, sessions=1, round_entries=1
)
TOPIC: Final = Topic(name="t", lane=LANE)
MEMBERS: Final = [Member(broker=b, incarnation=1, handle=b, host="h", port=1, pid=1) for b in (0, 1)]
ENV: Final = Env(SystemClock())
_FRONTIERS: Final = Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
_LANE_LINE: Final = frontier_offset(SequencerLine.LANES + LANE)


def _pending(sequence: int) -> Any:
    entry = np.zeros(1, dtype=PENDING)
    entry["kind"], entry["session"], entry["session_seq"], entry["count"] = EntryKind.BATCH, 0, sequence, 1
    entry["crc"], entry["origin"] = sequence + 7, sequence
    return seal(entry)


def begin_takeover(lines: Lines, ordered: int = 0) -> Any:
    """Let epoch 1 lead: its log has the start of a session; X and Y are published. The model: handed out, started.

    `ordered`: the number of batches that are ordered and answered already.
    """
    fabric = FirstFabric(lines)
    create_epochs(fabric)
    table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
    table.open(1)
    table.start(1)
    frontiers = fabric.create("epoch-1/frontiers", _FRONTIERS)
    create_reorder_region(fabric, "epoch-1/held", SIZES.held_slots)
    order = create_ring(fabric, order_region(1, LANE), RegionKind.ORDER, ORDER, SIZES.order_slots)
    order.write(open_entry(0, 0, OpenedFacts(0, None, taken=False, strong=False)), 0)
    order.publish()
    frontiers.data[_LANE_LINE : _LANE_LINE + 16].view(np.uint64)[:] = 1, 0
    frontiers.keep()
    for member in MEMBERS:
        pending = create_ring(fabric, f"{member.region_prefix}/pending", RegionKind.PENDING, PENDING, 1)
        pending.write(_pending(member.broker), 0)
        pending.publish()
        fabric.create(
            f"{member.region_prefix}/frontiers",
            Shape(RegionKind.BROKER_FRONTIERS, frontier_offset(BrokerLine.CHUNKS)),
        )
        create_ring(fabric, results_region(1, member), RegionKind.RESULTS, RESULT, SIZES.results_slots, "position")
    if ordered:
        _order_batches(fabric, ordered)
    return (1, 1)


def call_store(world: Any, _actor: str, call: tuple[Any, ...]) -> tuple[Any, Any]:
    """The store's part of a takeover: placement/epochs.py."""
    handed_out, started = world
    if call[0] == "next epoch":
        return (handed_out + 1, started), handed_out + 1
    if call[0] == "started epoch":
        return world, started
    if call[0] == "start epoch":
        holds = is_injected("start-unconditional") or (call[1] == handed_out and call[1] > started)
        return ((handed_out, call[1]), True) if holds else (world, False)
    return world, None


# --- sequencers -------------------------------------------------------------------------------------------------------
def old_sequencer(rounds: int) -> Play:
    """Epoch 1 orders X, then Y, each in a round of its own."""
    return lambda stage: _order_batches(stage, rounds, stage.remembers)


def _order_batches(fabric: Fabric, rounds: int, begins: Callable[[int], None] = lambda _round: None) -> None:
    table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
    frontiers = fabric.attach("epoch-1/frontiers", writable=True)
    ring = RingWriter(fabric.attach(order_region(1, LANE), writable=True), ORDER)
    words = frontiers.data[_LANE_LINE : _LANE_LINE + 16].view(np.uint64)
    results = [
        RingWriter(fabric.attach(results_region(1, member), writable=True), RESULT, "position") for member in MEMBERS
    ]
    read = [FrontierWriter(frontiers, frontier_offset(SequencerLine.BROKERS + m.handle)) for m in MEMBERS]
    for number in range(rounds):
        begins(number)
        if table.superseded(1):
            return
        line: Line = _pending(number).view(np.uint64).tolist()
        index, seq = ring.next, ring.next - 1
        entry, answer = order_line(line, number, index, seq, 1), result_line(line, index, seq)
        if is_injected("results-before-entries"):
            results[number].write_line(answer, 0)
            results[number].publish()
            ring.write_line(entry, 0)
        else:
            ring.write_line(entry, 0)
            results[number].write_line(answer, 0)
        ring.publish()
        words[1], words[0] = seq + 1, ring.next
        frontiers.flush(_LANE_LINE, 16)
        results[number].publish()
        read[number].advance(1)


def new_sequencer(turn: int, after_old: bool = False, prefetches: bool = False) -> Play:
    """Take over from the leader, and order the remaining batches, beginning with broker `turn`.

    `prefetches`: before its line is open, it reads and re-issues all that it can.
    """

    def play(stage: Stage) -> None:
        if after_old:
            stage.wait_for("old")
        table = EpochTable(stage, stage.attach(EPOCHS_REGION, writable=True))
        epoch = stage.call("next epoch")
        frontiers, held = stage.create(f"epoch-{epoch}/frontiers", _FRONTIERS), ReorderBuffer(1)
        early = _Early(stage, epoch, held, frontiers) if prefetches else None
        if not is_injected("epoch-opened-late"):
            table.open(epoch)
        earlier = stage.call("started epoch")
        state = PredecessorState(stage, earlier, MEMBERS, prefetched=early.prefetched if early else None)
        create_reorder_region(stage, f"epoch-{epoch}/held", 1)
        if early is not None:
            lane = early.go_on(stage, state)
        else:
            found = state.lane(TOPIC, SIZES, held, 0)
            order, entries = found if found is not None else (LaneOrder(TOPIC, SessionTable(1), held), None)
            stage.remembers(epoch, earlier, *_found(state, entries))
            lane = Lane(LedEpoch(ENV, stage, epoch, SIZES, frontiers), order)
            if entries is not None:
                lane.inherit(entries, 0)
        led = LedEpoch(ENV, stage, epoch, SIZES, frontiers)
        brokers = BrokerIncarnations(led, None)  # type: ignore[arg-type]
        for member in MEMBERS:
            source = brokers.sources[member.handle] = PendingSource(led, member)
            source.inherit(state.brokers[member.handle])
        if is_injected("epoch-opened-late"):
            table.open(epoch)
        if not stage.call("start epoch", epoch):
            return
        table.start(epoch)
        if table.superseded(epoch):
            return
        _round(stage, lane, brokers, turn)

    return play


class _Early:
    """`Takeover.prefetch` and `_go_on_with`, for one lane that is never lapped."""

    def __init__(self, stage: Stage, epoch: int, held: ReorderBuffer, frontiers: Any) -> None:
        self.epoch, earlier = epoch, stage.call("started epoch")
        self.prefetched = Prefetched(stage, earlier, MEMBERS)
        order, self.entries = read_lane(stage, earlier, TOPIC, SIZES, held, 0)
        self.lane = Lane(LedEpoch(ENV, stage, epoch, SIZES, frontiers), order)
        self.lane.inherit(self.entries, 0)

    def go_on(self, stage: Stage, state: PredecessorState) -> Lane:
        rest = state.rest(self.lane.order, 0)
        invariant(rest is not None, "the ring is never lapped")
        stage.remembers(self.epoch, self.entries.tobytes(), *_found(state, rest))
        self.lane.inherit_more(cast(Entries, rest))
        return self.lane


def _found(state: PredecessorState, entries: Any) -> tuple[Any, ...]:
    """Return the whole state with which a takeover continues."""
    of = [(b.start, b.settled.tobytes(), b.answers.tobytes()) for b in state.brokers.values()]
    return tuple(of), state.waiting.tobytes(), None if entries is None else entries.tobytes()


def _round(stage: Stage, lane: Lane, brokers: BrokerIncarnations, turn: int) -> None:
    """`Rounds.next` and `_write`."""
    offers = [(source, source.offer(SIZES.order_slots, 0)) for source in brokers.in_turn(turn)]
    parts = [source.take(count, 8)[0] for source, count in offers if count]
    if parts:
        lane.decide(join(parts), 0, 0)
    if lane.write():
        slots = RingReader(stage.attach(lane.regions[0]), ORDER)._entries
        batches = slots[slots["kind"] == EntryKind.BATCH]
        stage.report("decided", *((int(entry["index"]), int(entry["session_seq"])) for entry in batches))
    answered = brokers.answer(lane.order.out.take_answers())
    lane.publish()
    for source in answered:
        source.publish()
    for source in brokers.sources.values():
        source.give_free()


# --- actors that act on the order -------------------------------------------------------------------------------------
class _Publisher:
    """A connection that reports acks."""

    gone = False

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.acked = 0

    def send_ack(self, _lane: int, _session: int, sequence: int, index: int, _seq: int, _extra: int, _out: int) -> None:
        self.acked += 1
        self._stage.report("acked", sequence, index)

    def send_acks(self, acks: Any) -> None:
        for ack in acks:
            self.send_ack(0, 0, int(ack["session_seq"]), int(ack["index"]), 0, 0, 0)


def broker(number: int, follows: bool) -> Play:
    """A broker that relays the answer to its batch: in one pass at any time, or until it comes, from any leader.

    One pass is enough to find a wrong ack: a pass without results does nothing.
    """

    def play(stage: Stage) -> None:
        member = MEMBERS[number]
        epoch, publisher = LeaderView(stage, member), _Publisher(stage)
        epoch.advance(1)
        relay = Relay(stage.attach(f"{member.region_prefix}/frontiers", writable=True), lambda _location: None)
        relay.wait(0, Waiting(EntryKind.BATCH, LANE, 0, publisher))  # type: ignore[arg-type]
        if not follows:
            relay.poll(epoch)
            return
        while not publisher.acked:
            stage.remembers(epoch.number, epoch._results is not None, relay._next)
            if not relay.poll(epoch) and not epoch.advance(0):
                stage.wait()

    return play


def reader(stage: Stage) -> None:
    """A broker that serves a subscriber the batches ordered by epoch 1, in one pass at any time."""
    epoch = LeaderView(stage, MEMBERS[0])
    epoch.advance(1)
    ring = epoch.order(LANE)
    if ring is None:
        return
    checked = stage.without("entries before the epoch") and epoch.may_act()
    frontier = ring.frontier.load()
    found = ring.read(1, frontier)
    if not (checked or epoch.may_act()):
        return
    if len(found) < frontier - 1:
        stage.report("not valid", 1, frontier)
    for entry in found:
        stage.report("served", int(entry["session_seq"]), int(entry["index"]))


# --- checks -----------------------------------------------------------------------------------------------------------
def check_takeover(_world: Any, facts: Facts) -> str:
    """Acked or served batches keep their positions; no batch has two positions, no position has two batches."""
    positions: dict[int, tuple[int, str]] = {}
    for fact in sorted(facts, key=str):
        if fact[0] == "not valid":
            return f"below the frontier {fact[2]} there is an invalid entry"
        pairs = [(sequence, index) for index, sequence in fact[1:]] if fact[0] == "decided" else [fact[1:]]
        for sequence, index in pairs:
            for other, (position, how) in positions.items():
                if (other == sequence) != (position == index):
                    return f"batch {sequence} is {fact[0]} at {index}, batch {other} is {how} at {position}"
            positions[sequence] = index, fact[0]
    return ""


def is_secret(region: str, world: Any) -> bool:
    """Whether a region belongs to an epoch that the store has not started: no other actor reads it."""
    number = region.removeprefix("epoch-").split("/")[0]
    return number.isdigit() and int(number) > world[1]


def takeover_scope(name: str, plays: dict[str, Play], patient: bool = False, ordered: int = 0) -> Scope:
    """Build a scope. Epoch 1's sequencer, if it takes part, may crash at any time."""
    return Scope(
        name, plays, partial(begin_takeover, ordered=ordered), call_store, check_takeover,
        _all_acked if patient else check_takeover, mortal=("old",), ready=lambda name, ended: name in ended,
        secret=is_secret,
    )  # fmt: skip


def _all_acked(world: Any, facts: Facts) -> str:
    return check_takeover(world, facts) or ("" if any(fact[0] == "acked" for fact in facts) else "nothing was acked")


def ack_scope(rounds: int) -> Scope:
    """A broker acks X by results of the old sequencer, which may be a zombie, while a new one takes over."""
    return takeover_scope(
        "ack against takeover", {"old": old_sequencer(rounds), "new": new_sequencer(1), "broker": broker(0, False)}
    )


def read_scope(rounds: int) -> Scope:
    """A broker serves batches ordered by the old sequencer."""
    return takeover_scope(
        "read against takeover", {"old": old_sequencer(rounds), "new": new_sequencer(1), "reader": reader}
    )


def prefetched_scope(rounds: int) -> Scope:
    """The same, but the new sequencer has read most of the order before its line is open."""
    plays = {"old": old_sequencer(rounds), "new": new_sequencer(1, prefetches=True), "broker": broker(0, False)}
    return takeover_scope("ack against a takeover with prefetch", plays)


def answers_scope(rounds: int) -> Scope:
    """The old sequencer ends anywhere in a round; the next one ensures that X is acked, by any sequencer."""
    return takeover_scope(
        "answers after a crash",
        {"old": old_sequencer(rounds), "new": new_sequencer(1, after_old=True), "broker": broker(0, True)}, True,
    )  # fmt: skip


def rivals_scope() -> Scope:
    """Two sequencers take over together; a broker acks X by results of the old one, which has answered and ended."""
    plays = {"new": new_sequencer(1), "next": new_sequencer(0), "broker": broker(0, False)}
    return takeover_scope("ack against two takeovers", plays, ordered=1)
