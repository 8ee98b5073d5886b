"""Load that records all its actions and results: publishers, readers, and a poller of the ends of topics.

Each publisher writes a stream of batches with unique contents, one after the other through one session: the number of a
batch is its sequence. Publishers and readers stay connected during all faults.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import embarcadero as emb
from embarcadero.client.results import RecordFuture
from embarcadero.config import Config
from embarcadero.errors import Backpressure, EmbarcaderoError, OutcomeUnknown, RecordsLost, TimedOut
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.types import GapKind, Order, Tail
from embarcadero.wire.schemas import encode_batch, plain_batch
from embarcadero_proof.chaos.watch import Observer
from embarcadero_proof.sim.history import (
    Answered,
    Asked,
    Began,
    Delivered,
    GapSeen,
    LossTold,
    Moved,
    Passed,
    RoleFailed,
    Sent,
    Settled,
    TailRead,
    TopicMade,
    Verdict,
)
from embarcadero_proof.sim.tables import digest_of

SETTLE_S: Final = 90.0
"""The most time that publishes and calls may take to end after all faults are healed."""

_IN_FLIGHT_MAX: Final = 1_000
_POLL_S: Final = 0.05
_HURRY_S: Final = 0.5
_ASK_EVERY_S: Final = 0.5

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """A topic of the load. `start` is the position where the observer began; older records are ignored."""

    name: str
    lane: int
    order: int
    replicas: int
    durable_on: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The work of one publisher."""

    name: str
    topic: TopicPlan
    ack: int
    pace_s: float = 0.01
    records: int = 8
    record_bytes: int = 100

    @property
    def order(self) -> int:
        """Order of its session: in topics of order 2 some publishers are strong, some are weak."""
        weak = self.topic.order == Order.TOTAL and sum(self.name.encode()) % 2
        return self.topic.order if weak or self.topic.order < Order.TOTAL else int(Order.STRONG)


def make_topic(log: emb.Log, observer: Observer, name: str, order: int, replicas: int, durable_on: int) -> TopicPlan:
    """Create a topic, and record it."""
    made = log.create_topic(name, order=order, replicas=replicas, durable_on=durable_on)
    observer.saw(
        TopicMade, lane=made.lane, name=name, order=order, on_gap=str(made.on_gap), replicas=replicas,
        durable_on=durable_on,
    )  # fmt: skip
    return TopicPlan(name, made.lane, order, replicas, durable_on)


class Actor(threading.Thread, ABC):
    """A thread of the load. Faults are shorter than its timeouts, so any error that ends it is a failure."""

    def __init__(self, name: str, observer: Observer, addresses: list[str], config: Config | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.observer, self.addresses, self.config = observer, addresses, config
        self.over, self.abandoned = threading.Event(), threading.Event()

    def finish(self) -> None:
        """Finish in an orderly way."""
        self.over.set()

    def abandon(self) -> None:
        """Finish immediately: the result is not needed any more."""
        self.over.set()
        self.abandoned.set()

    def run(self) -> None:
        """Act until asked to finish."""
        try:
            with emb.connect(self.addresses, config=self.config) as log:
                self.act(log)
        except Exception as error:  # also errors of other code: no thread may end without a report
            self.observer.saw(RoleFailed, process=self.name, error=f"{type(error).__name__}: {error}")

    @abstractmethod
    def act(self, log: emb.Log) -> None:
        """Do the actor's work with its own connections."""


class Writer(Actor):
    """A publisher. `most`: the number of batches after which it ends by itself."""

    def __init__(
        self, plan: StreamPlan, observer: Observer, addresses: list[str], config: Config | None = None,
        most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan.name, observer, addresses, config)
        self.plan, self._most = plan, most
        self.sent = self.settled = 0

    def act(self, log: emb.Log) -> None:
        plan = self.plan
        self.observer.saw(Began, process=plan.name, stream=plan.name, strong=plan.order == Order.STRONG)
        with log.publisher(plan.topic.name, ack=plan.ack, order=plan.order) as publisher:
            due = time.monotonic()
            while not self.over.is_set() and (self._most is None or self.sent < self._most):
                if self.sent - self.settled < _IN_FLIGHT_MAX:
                    self._send(publisher)
                due = max(due + plan.pace_s, time.monotonic())
                self.over.wait(due - time.monotonic())
            self._flush(publisher)
            self._with_losses(lambda: publisher.close(timeout=_HURRY_S if self.abandoned.is_set() else SETTLE_S))

    def _flush(self, publisher: emb.Publisher) -> None:
        give_up = time.monotonic() + SETTLE_S
        while not self.abandoned.is_set() and time.monotonic() < give_up:
            with contextlib.suppress(TimedOut):
                self._with_losses(lambda: publisher.flush(timeout=_HURRY_S))
                return

    def _send(self, publisher: emb.Publisher) -> None:
        plan, number = self.plan, self.sent
        head = f"{plan.name}/{number}/".encode()
        values = [head + b"%d" % record + bytes(plan.record_bytes) for record in range(plan.records)]
        payload = encode_batch(plain_batch(values, [time.time()] * plan.records))
        self.sent += 1
        self.observer.saw(
            Sent, process=plan.name, stream=plan.name, lane=plan.topic.lane, number=number, digest=digest_of(payload),
            count=plan.records,
        )  # fmt: skip
        try:
            future = self._with_losses(lambda: publisher.publish_encoded(payload, plan.records))
        except EmbarcaderoError as error:
            self._settle(number, error, None)
            raise
        future.add_done_callback(lambda done: self._settle(number, done.exception(), done))

    def _with_losses(self, call: Callable[[], Result]) -> Result:
        """Make a call; when it reports a loss instead, record the loss and repeat the call."""
        while True:
            try:
                return call()
            except Backpressure:  # nothing was stored, and the publisher continues
                if self.abandoned.wait(_POLL_S):
                    raise
            except RecordsLost as lost:
                for gone in lost.positions:
                    self.observer.saw(LossTold, process=self.plan.name, lane=gone.lane, index=gone.index)

    def _settle(self, number: int, error: EmbarcaderoError | None, future: RecordFuture | None) -> None:
        """Record the outcome at the time of the ack; called in the client's thread."""
        plan, position = self.plan, None
        verdict = Verdict.STORED
        if error is not None:
            verdict = Verdict.UNKNOWN if isinstance(error, OutcomeUnknown) else Verdict.FAILED
        elif future is not None:
            position = future.result(0)
        if position is not None:
            self.observer.saw_lane(position.lane, plan.topic.lane, plan.topic.order)
        self.settled += 1
        self.observer.saw(
            Settled, process=plan.name, stream=plan.name, lane=position.lane if position else plan.topic.lane,
            number=number, verdict=verdict, index=position.index if position else None,
            seq=position.seq if position else None, error=type(error).__name__ if error else "", ack=plan.ack,
        )  # fmt: skip


class Reader(Actor):
    """A subscriber that reads a topic from the position where the observer began."""

    def __init__(
        self, name: str, topic: TopicPlan, read: str, observer: Observer, addresses: list[str],
        config: Config | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, observer, addresses, config)
        self.topic, self.read = topic, read
        self.goal: dict[int, int] | None = None  # by lane: the index that it must reach before it may end
        self.arrived = threading.Event()
        self._lanes: set[int] = set()

    def come_to(self, goal: dict[int, int]) -> None:
        """End after reading to this goal; `finish` ends it in any case."""
        self.goal = goal

    def act(self, log: emb.Log) -> None:
        with log.subscribe(self.topic.name, read=self.read) as subscriber:
            if self.topic.start:
                subscriber.seek(index=self.topic.start)
            if self.topic.order > Order.BROKER:
                self._begin(self.topic.lane)
            while not self.over.is_set():
                batch = subscriber.poll(_POLL_S)
                if batch is not None:
                    self._got(batch)
                elif self._is_there(subscriber):
                    break
            self._mark(subscriber)

    def _begin(self, lane: int) -> None:
        if lane not in self._lanes:
            self._lanes.add(lane)
            self.observer.saw_lane(lane, self.topic.lane, self.topic.order)
            self.observer.saw(Moved, reader=self.name, lane=lane, index=self.topic.start)

    def _got(self, batch: emb.Batch) -> None:
        self._begin(batch.lane)
        if batch.gap is None:
            self.observer.saw(
                Delivered, reader=self.name, lane=batch.lane, index=batch.index, seq=batch.seq, count=batch.count,
                session=batch.session, session_seq=batch.session_seq, partition=batch.partition,
                digest=digest_of(batch.payload), append_us=batch.append_us, durable=self.read == "durable",
            )  # fmt: skip
            return
        gap, skip = batch.gap, batch.gap.kind is GapKind.SKIPPED
        self.observer.saw(
            GapSeen, reader=self.name, lane=batch.lane, kind=gap.kind.name, start=gap.start, stop=gap.stop,
            session=gap.session if skip else None, index=batch.index if skip else None,
        )  # fmt: skip

    def _is_there(self, subscriber: emb.Subscriber) -> bool:
        if self.goal is None:
            return False
        positions = subscriber.positions()
        there = all((positions.get(lane) or 0) >= index for lane, index in self.goal.items())
        if there:
            self.arrived.set()
        return there

    def _mark(self, subscriber: emb.Subscriber) -> None:
        """Record the reached positions, control entries included, also for lanes without any entry."""
        positions = subscriber.positions()
        for lane in sorted({*positions, *(self.goal or ())}):
            self._begin(lane)
            self.observer.saw(Passed, reader=self.name, lane=lane, index=positions.get(lane) or 0)


class Asker(Actor):
    """Asks for the ends of topics, again and again."""

    def __init__(
        self, topics: list[TopicPlan], observer: Observer, addresses: list[str], config: Config | None = None
    ) -> None:
        super().__init__("asker", observer, addresses, config)
        self._topics, self._asked = topics, 0

    def act(self, log: emb.Log) -> None:
        while not self.over.is_set():
            for topic in self._topics:
                self.ask(log, topic)
            self.over.wait(_ASK_EVERY_S)

    def ask(self, log: emb.Log, topic: TopicPlan) -> Tail | None:
        """Ask once; return None if that failed, which is recorded."""
        self._asked += 1
        observer, number = self.observer, self._asked
        began_us = observer.saw(Asked, process=self.name, call="tail", number=number)
        try:
            tail = log.tail(topic.name, timeout=SETTLE_S if self.over.is_set() else 10.0)
        except EmbarcaderoError as error:
            observer.saw(Answered, process=self.name, call="tail", number=number, error=type(error).__name__)
            return None
        lanes = tail.lanes if topic.order <= Order.BROKER else (tail,)
        for one in lanes:
            observer.saw_lane(one.lane, topic.lane, topic.order)
            observer.saw(
                TailRead, process=self.name, began=began_us, lane=one.lane, index=one.index, seq=one.seq,
                durable_index=one.durable_index,
            )  # fmt: skip
        observer.saw(Answered, process=self.name, call="tail", number=number)
        return tail


def ends(tail: Tail) -> dict[int, int]:
    """Return the ends of a topic by lane."""
    return {one.lane: one.index for one in tail.lanes or (tail,) if one.lane >= BROKER_LANES_FIRST or not tail.lanes}
