"""Publishers and subscribers as simulated processes, and the contents of their batches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from embarcadero.client.arguments import Lookup
from embarcadero.client.batches import OutBatch
from embarcadero.client.lanes import LanesCore
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.results import Batch
from embarcadero.client.session import PublisherSettings
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore
from embarcadero.errors import OutcomeUnknown
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.types import Ack, GapKind, Order
from embarcadero.wire import messages as m
from embarcadero.wire.codec import AcksReceived, CreditReceived, FetchedReceived, FullReceived
from embarcadero_proof.sim.clients import ClientProcess
from embarcadero_proof.sim.history import (
    Began,
    Delivered,
    GapSeen,
    LossTold,
    Moved,
    Numbered,
    Passed,
    PublisherEnded,
    RoleFailed,
    Sent,
    SessionOpened,
    Settled,
    Verdict,
)
from embarcadero_proof.sim.plan import CLAIMED_FROM_SEED, ReaderPlan, StreamPlan
from embarcadero_proof.sim.tables import STAGED, digest_of, no_table

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_THINK_US_MAX = 8_000_000
_THINK_HEALED_US = 300_000
"""After healing, publishers send faster to finish."""


class Content(NamedTuple):
    """One batch of a stream."""

    payload: bytes
    records: int
    partition: int
    digest: int


class Stream:
    """The batches of one publisher: batch `n` has the same bytes from each sender, however often it is sent."""

    def __init__(self, plan: StreamPlan, seed: int, chunk_bytes: int) -> None:
        self.plan, self._seed, self._chunk_bytes = plan, seed, chunk_bytes
        self._contents: dict[int, Content] = {}
        self.processes = 0
        self.next_number = 0  # the first number that no process has sent yet
        self.batches: list[OutBatch] = []  # all batches sent by any process, with the number as token

    def number_at(self, expected: int) -> int:
        """Return the next batch number for a session that expects this sequence.

        After a loss, sequences may stay behind numbers: the next batch closes the hole. A process that continues the
        stream knows this, whatever the outcome of the batches, as from a journal of sent batches.
        """
        numbers = {batch.sequence: int(batch.token) for batch in self.batches}
        below = max((sequence for sequence in numbers if sequence < expected), default=-1)
        return expected + (numbers[below] - below if below >= 0 else 0)

    def content(self, number: int) -> Content:
        """Return batch `number`."""
        found = self._contents.get(number)
        if found is None:
            seal = blake2b(f"{self._seed}:{self.plan.name}:{number}".encode()).digest()
            dice = int.from_bytes(seal[:8], "little")
            large = dice % 1000 < self.plan.large_rate * 1000
            size = self._chunk_bytes - dice % 200 if large else 24 + dice % self.plan.size_span
            payload = (seal * (size // len(seal) + 1))[:size]
            first_lane = 0
            if self.plan.staging:
                payload, first_lane = STAGED + payload[len(STAGED) :], BROKER_LANES_FIRST
            digest = digest_of(payload, first_lane)
            found = Content(payload, 1 + dice % 7, dice // 7 % self.plan.topic.partitions, digest)
            self._contents[number] = found
        return found


class PublisherProcess(ClientProcess):
    """One process that writes a stream, from the position of the stream's session on."""

    role = "publisher"

    def __init__(self, world: World, stream: Stream) -> None:
        plan = stream.plan
        settings = PublisherSettings(
            topic=plan.topic.name,
            session_name=plan.name if plan.named else "",
            window_bytes=plan.window_bytes,
            resend_after_us=world.plan.resend_after_us,
            delivery_timeout_us=world.plan.delivery_timeout_us,
            order=plan.topic.order,
            session_order=int(Order.STRONG) if plan.strong else None,
            durable=plan.ack == Ack.DURABLE,
            replicated=plan.topic.replicas > 0,
        )
        self._publisher = PublisherCore(settings)
        stream.processes += 1
        self.stream = stream
        super().__init__(world, f"{plan.name}.{stream.processes}", self._publisher)
        # another process may have used a named session before: the cluster reports the next number
        self._number: int | None = None if plan.named else 0
        self._claims = plan.named and plan.topic.order > Order.BROKER and world.plan.seed >= CLAIMED_FROM_SEED
        self._closing = False
        self._ending_us: int | None = None  # when it was asked to close, or failed

    @property
    def done(self) -> bool:
        """Whether it has sent all of its stream, and every batch has an outcome."""
        sent_all = self._number is not None and self._number >= self.stream.plan.batches
        return sent_all and self._publisher.unsettled == 0

    @property
    def busy(self) -> bool:
        """Whether some of its batches have no outcome yet."""
        return self._publisher.unsettled > 0

    def start(self) -> None:
        super().start()
        plan = self.stream.plan
        strong = plan.strong or plan.topic.order is Order.STRONG
        self.world.seen(Began(at=self.world.queue.now_us, process=self.name, stream=plan.name, strong=strong))
        if self._claims:
            self.world.seen(Numbered(at=self.world.queue.now_us, stream=plan.name))
        self._plan_burst()

    def _plan_burst(self) -> None:
        think_us = int(self.rng.expovariate(1.0) * self.stream.plan.think_us)
        most_us = _THINK_HEALED_US if self.world.healed else _THINK_US_MAX
        self.world.queue.after(min(think_us, most_us), lambda: self.submit(self._burst))

    def _burst(self) -> None:
        plan = self.stream.plan
        if self.finished or self._closing:
            return
        for _ in range(self.rng.randint(1, 2 * plan.burst - 1)):
            if self._publisher.failed is not None or not self._send_next():
                break
        done = self._number is not None and self._number >= plan.batches
        if done and self.rng.random() < 0.5:
            self.close()
        else:
            self._plan_burst()

    def _send_next(self) -> bool:
        """Hand the next batch to the publisher. False if there is none, or no capacity."""
        if self._number is None or self._number >= self.stream.plan.batches:
            return False
        content = self._next_content(self._number)
        if content is None or not self._publisher.has_room(len(content.payload)):
            return False
        self._send(self._number, content)
        self._number += 1
        self.stream.next_number = max(self.stream.next_number, self._number)
        return True

    def _next_content(self, number: int) -> Content | None:
        """Return the content of batch `number`; None if it is not known yet."""
        return self.stream.content(number)

    def close(self) -> None:
        """Close the publisher; another process continues its stream."""
        if not (self.finished or self._closing):
            self._closing, self._ending_us = True, self.world.queue.now_us
            self._publisher.close(self.clock.now_us())

    def _send(self, number: int, content: Content) -> None:
        self.world.seen(Sent(
            at=self.world.queue.now_us, process=self.name, stream=self.stream.plan.name,
            lane=self.stream.plan.topic.lane, number=number, digest=content.digest, count=content.records,
            partition=content.partition))  # fmt: skip
        batch = self._add(number, content)
        batch.token = number
        self.stream.batches.append(batch)

    def _add(self, number: int, content: Content) -> OutBatch:  # noqa: ARG002 - publishers by reference use it
        return self._publisher.add(content.payload, content.records, content.partition, 0, self.clock.now_us())

    def _settled(self, batch: OutBatch) -> None:
        """Hook: called after the outcome of a batch is recorded."""

    def on_event(self, number: int, event: Any, now_us: int) -> None:
        if isinstance(event, AcksReceived):
            self._publisher.on_acks(number, event.acks, now_us)
        elif isinstance(event, CreditReceived):
            self._publisher.on_credit(number, event.total, now_us)
        elif isinstance(event, FullReceived):
            self._publisher.on_full(number, now_us, event)

    def on_answer(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Opened):
            self.world.seen(SessionOpened(
                at=self.world.queue.now_us, process=self.name, stream=self.stream.plan.name, lane=message.lane,
                session=message.session, expected=message.expected))  # fmt: skip
            if self._number is None:
                self._number = message.expected if self._claims else self.stream.number_at(message.expected)

    def harvest(self) -> None:
        if (lost := self._publisher.take_losses()) is not None:
            for gone in lost.positions:
                self.world.seen(
                    LossTold(at=self.world.queue.now_us, process=self.name, lane=gone.lane, index=gone.index)
                )
        for batch in self._publisher.take_settled():
            error = batch.error
            verdict = Verdict.STORED
            if error is not None:
                verdict = Verdict.UNKNOWN if isinstance(error, OutcomeUnknown) else Verdict.FAILED
            position = batch.position
            if position is not None:
                self.world.see_lane(position.lane)
            self.world.seen(Settled(
                at=self.world.queue.now_us, process=self.name, stream=self.stream.plan.name,
                lane=position.lane if position else self.stream.plan.topic.lane, number=batch.token, verdict=verdict,
                index=position.index if position else None, seq=position.seq if position else None,
                error=type(error).__name__ if error else "", ack=self.stream.plan.ack))  # fmt: skip
            self._settled(batch)
            if position is not None and self.stream.plan.ack == Ack.ORDERED and self.world.restarts.armed:
                self.world.queue.after(1, self.world.restarts.acked)
            if position is not None and verdict is Verdict.STORED and self.stream.plan.ack == Ack.DURABLE:
                digest = self.stream.content(batch.token).digest
                self.world.disks.see_copies(self.name, position.lane, position.index, digest)
        if self._publisher.failed is not None and self._ending_us is None:
            self._ending_us = self.world.queue.now_us
        if self._publisher.closed and not self.finished:
            since = self.world.queue.now_us if self._ending_us is None else self._ending_us
            self.world.seen(PublisherEnded(at=self.world.queue.now_us, process=self.name, since=since))
            if self._publisher.failed is not None:
                self.world.note(self.name, f"ends: {self._publisher.failed}")
            self.disconnect()
            self.world.publisher_ended(self, failed=self._publisher.failed is not None or not self.done)

    def on_death(self, silently: bool) -> None:
        super().on_death(silently)
        self.world.publisher_ended(self, failed=True)

    def stuck_for_us(self) -> tuple[str, int, int]:
        plan = self.stream.plan
        return plan.name, plan.topic.lane, plan.topic.gap_timeout_ms * 1000


class SubscriberProcess(ClientProcess):
    """One reader of one topic."""

    role = "subscriber"

    def __init__(self, world: World, plan: ReaderPlan) -> None:
        settings = ReaderSettings(
            partitions=plan.partitions, silent_after_us=world.plan.resend_after_us, wait_ms=2_000,
            max_bytes=plan.max_bytes, read=plan.read, **world.tiering.settings,
        )  # fmt: skip
        topic, start = plan.topic.lane, Lookup(plan.by, 0)
        self._subscriber: SubscriberCore | LanesCore = (
            LanesCore(settings, topic, world.directory.lanes.all(topic), start)
            if plan.topic.order <= Order.BROKER
            else SubscriberCore(settings, topic, start)
        )
        super().__init__(world, plan.name, self._subscriber)
        self.plan = plan
        self._lanes: set[int] = set()  # lanes whose first read is recorded
        self._earliest = plan.by == "earliest"  # where it starts to read newly found lanes
        self._begins: set[int] = set()  # lanes read from the earliest record, without a batch so far
        self._seeks_left = plan.seeks
        self._taken_to = 0
        self._failed = False

    def start(self) -> None:
        super().start()
        self._note_lanes()
        if self.plan.slow_us:
            self.world.queue.after(self.plan.slow_us, lambda: self.submit(self._take_some))
        if self._seeks_left:
            self._plan_seek()

    def _moved(self, lane: int, index: int | None, earliest: bool = False) -> None:
        whole = earliest and not self.plan.topic.replicas and self.plan.partitions is None
        self._begins = self._begins | {lane} if whole else self._begins - {lane}
        partitions = None if self.plan.partitions is None else tuple(self.plan.partitions)
        self.world.seen(Moved(at=self.world.queue.now_us, reader=self.name, lane=lane, index=index,
                              partitions=partitions))  # fmt: skip

    def _note_lanes(self) -> None:
        """Record that this reader begins to read the lanes that it has found."""
        lanes = self._subscriber.positions().keys()
        for lane in sorted(lanes - self._lanes) if len(lanes) > len(self._lanes) else ():
            self._lanes.add(lane)
            self.world.see_lane(lane)
            self._moved(lane, 0 if self.plan.by == "index" else None, self._earliest)

    def _plan_seek(self) -> None:
        self.world.queue.after(self.rng.randrange(500_000, 15_000_000), lambda: self.submit(self._seek))

    def _seek(self) -> None:
        self.mark_passed()
        self._seeks_left -= 1
        self._note_lanes()
        positions = self._subscriber.positions()
        lane = self.rng.choice(sorted(positions)) if positions else self.plan.topic.lane
        index = self.rng.randint(0, positions.get(lane) or 0)
        by = self.rng.choice(["index", "index", "earliest", "latest"]) if positions else "earliest"
        if by == "index":
            self._subscriber.seek(by, index, self.clock.now_us(), lane)
            self._moved(lane, index)
        else:
            self._subscriber.seek(by, 0, self.clock.now_us())
            self._earliest = by == "earliest"
            for lane in positions:
                self._moved(lane, None, self._earliest)
        if self._seeks_left:
            self._plan_seek()

    def mark_passed(self) -> None:
        """Record how far this reader has read, control entries included."""
        self._note_lanes()
        for lane, position in self._subscriber.positions().items():
            if position is not None:
                self.world.seen(Passed(at=self.world.queue.now_us, reader=self.name, lane=lane, index=position))

    def mark_missed(self) -> None:
        """Record the lanes that this reader has never found."""
        for lane in self.world.lanes_of(self.plan.topic):
            if lane not in self._subscriber.positions():
                self.world.seen(Passed(at=self.world.queue.now_us, reader=self.name, lane=lane, index=0))

    def on_event(self, number: int, event: Any, now_us: int) -> None:
        if isinstance(event, FetchedReceived):
            self._subscriber.on_fetched(number, event, now_us)

    def _take_some(self) -> None:
        self._take(self.rng.randint(1, 8))
        self.world.queue.after(self.plan.slow_us, lambda: self.submit(self._take_some))

    def harvest(self) -> None:
        if not self.plan.slow_us or self.world.healed:
            self._take(1_000)
        no_table(self._subscriber, self.clock.now_us())
        if self._subscriber.failed is not None and not self._failed:
            self._failed = True
            what = f"the subscriber failed: {type(self._subscriber.failed).__name__}: {self._subscriber.failed}"
            self.world.seen(RoleFailed(at=self.world.queue.now_us, process=self.name, error=what))

    def _take(self, most: int) -> None:
        batches = self._subscriber.take_batches(most, self.clock.now_us())
        durable = self.plan.read == "durable"
        self._note_lanes()
        if not batches:
            return
        for lane in sorted({batch.lane for batch in batches}):
            self.world.see_frontier(lane)
        for batch in batches:
            lane = batch.lane
            skip = batch.gap is not None and batch.gap.kind is GapKind.SKIPPED
            if lane in self._begins:
                self._begins.discard(lane)
                self.world.see_start(self.name, lane, batch.index if batch.gap is None or skip else batch.gap.start)
            note_batch(self.world, self.name, batch, durable)

    def positions(self) -> dict[int, int | None]:
        """Return its next index, by lane."""
        return self._subscriber.positions()


def note_batch(world: World, reader: str, batch: Batch, durable: bool) -> None:
    """Record that a reader got a batch or a gap."""
    now_us, lane, gap = world.queue.now_us, batch.lane, batch.gap
    if gap is None:
        digest = digest_of(batch.payload, lane)
        world.seen(Delivered(
            at=now_us, reader=reader, lane=lane, index=batch.index, seq=batch.seq, count=batch.count,
            session=batch.session, session_seq=batch.session_seq, partition=batch.partition, digest=digest,
            append_us=(batch.append_time - _EPOCH) // _MICROSECOND, durable=durable))  # fmt: skip
        if durable:
            world.disks.see_copies(reader, lane, batch.index, digest)
        return
    skip = gap.kind is GapKind.SKIPPED
    if gap.kind in (GapKind.TRIMMED, GapKind.LOST, GapKind.NEVER_DURABLE):
        world.disks.see_gaps()
    world.seen(GapSeen(at=now_us, reader=reader, lane=lane, kind=gap.kind.name, start=gap.start, stop=gap.stop,
                       session=gap.session if skip else None, index=batch.index if skip else None))  # fmt: skip
    if gap.kind is GapKind.TRIMMED:
        world.see_trimmed(reader, lane, gap.stop - 1)
