"""Between a publisher's intake (any thread) and its driver (the event loop): seals what lingered, submits, closes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from embarcadero.client.arguments import PublisherOptions, asked_order, checked_ack, checked_durable
from embarcadero.client.net import lifetime
from embarcadero.client.net.brokers import BrokerPool, CoreDriver
from embarcadero.client.net.connection import now_us
from embarcadero.client.publish.batches import OutBatch
from embarcadero.client.publish.intake import Intake, Sealed
from embarcadero.client.publish.publisher import PublisherCore
from embarcadero.client.results import Receipt, RecordFuture, TopicInfo
from embarcadero.errors import (
    Backpressure,
    Closed,
    EmbarcaderoError,
    Forked,
    OutOfSequence,
    RecordsLost,
    TimedOut,
    fresh,
    raise_as_one,
)
from embarcadero.forks import abandon, tell_of_forks
from embarcadero.types import Ack

_POLL_S = 0.001  # how often a congested publisher is looked at, at most


class PublisherDriver(CoreDriver):
    """Feeds sealed batches to a publisher's core, in order, as it has room."""

    core: PublisherCore

    def __init__(
        self,
        brokers: BrokerPool,
        core: PublisherCore,
        ack: Ack,
        schema: int,
        on_settled: Callable[[Sealed], None],
        on_lost: Callable[[RecordsLost], None],
        on_pressure: Callable[[Backpressure | None], None],
    ) -> None:
        super().__init__(brokers)
        self.core, self._ack, self._schema, self._on_settled = core, ack, schema, on_settled
        self._on_lost, self._on_pressure = on_lost, on_pressure
        self._pressure: Backpressure | None = None
        self._queue: deque[Sealed] = deque()
        self._unsent: deque[OutBatch] = deque()  # ack=0: batches whose futures wait to be handed to a connection
        self._closing = False
        self.ended = self._loop.create_future()  # the publisher takes nothing more: it failed, or was closed
        self.final = self._loop.create_future()  # and it is known which acked records are lost
        self.opened = asyncio.Event()  # the session is open, or will never be
        brokers.attach(self)

    @property
    def congested(self) -> bool:
        """Whether sealing more batches would only make them wait here."""
        return bool(self._queue)

    def submit(self, batches: list[Sealed]) -> None:
        """Take batches in their order."""
        self._queue.extend(batches)
        self.run()

    def run(self) -> None:
        """Move whatever can move."""
        if (lost := self.core.take_losses()) is not None:
            self._on_lost(lost)  # before anything that was sent later is settled
        while True:
            self._feed()
            super().run()
            settled = self.core.take_settled()
            for batch in settled:
                receipt = Receipt(self.core.topic_id, batch.size, batch.count, batch.crc) if batch.position else None
                batch.token.result.settle(batch.position, batch.error, receipt)
                self._on_settled(batch.token)
            while self._unsent and self._unsent[0].sent:
                self._unsent.popleft().token.result.settle(None, None)
            if not settled or not self._queue:
                break  # settling makes room, and nothing else
        if self._closing and not self._queue and not self.core.closed:
            self._closing = False
            self.core.close(now_us())
            super().run()
        if (pressure := self.core.pressure()) is not None or self._pressure is not None:
            self._pressure = pressure
            self._on_pressure(pressure)
        if (self.core.closed or self.core.failed is not None) and not self.ended.done():
            self.ended.set_result(None)
        if self.core.closed and not self.final.done():
            self.final.set_result(None)
        if self.core.first_sequence is not None or self.core.closed:
            self.opened.set()

    def _feed(self) -> None:
        while self._queue and self.core.has_room(self._queue[0].size):
            sealed = self._queue.popleft()
            if sealed.reference is not None:
                batch = self.core.add_reference(sealed.reference, sealed.partition, now_us())
            else:
                batch = self.core.add(sealed.payload, sealed.count, sealed.partition, self._schema, now_us())
            batch.token = sealed
            if self._ack == Ack.NONE:
                self._unsent.append(batch)

    def close(self) -> None:
        """Close the session once everything is settled; `final` tells when."""
        self._closing = True
        self.run()

    def fail(self, error: EmbarcaderoError) -> None:
        """End at once, whatever is not known: every batch ends, with the error or with an unknown outcome."""
        self.core.give_up(error)
        self.run()


class Pump:
    """The event loop's half of a publisher. `moved` is set whenever room may have come free or the end has come."""

    def __init__(
        self,
        brokers: BrokerPool,
        topic: TopicInfo,
        options: PublisherOptions,
        future: type[RecordFuture] = RecordFuture,
    ) -> None:
        checked_durable(options.ack, topic)
        self.intake = Intake(
            topic=topic.name,
            schemas=topic.versions,
            compression=options.compression,
            partitions=topic.partitions,
            partitioner=topic.partitioner,
            key=topic.key,
            batch_bytes=options.batch_bytes,
            frame_bytes_max=brokers.frame_bytes_max,
            window_bytes=options.window_bytes,
            record_bytes_max=brokers.record_bytes_max,
            records_max=brokers.records_max,
            future=future,
            session=options.session,
        )
        core = PublisherCore(
            topic=topic.name,
            session_name=options.session or "",
            window_bytes=options.window_bytes,
            resend_after_us=int(brokers.settings.resend_after_s * 1e6),
            delivery_timeout_us=int(options.delivery_timeout * 1e6),
            order=topic.order,
            acks=options.ack != Ack.NONE,
            durable=options.ack == Ack.DURABLE,
            replicated=topic.replicas > 0,
            session_at=options.session_at,
            topic_id=topic.id,
            session_order=asked_order(options.order, topic),
            order_required=options.order is not None,
        )
        self.topic, self.loop = topic.name, asyncio.get_running_loop()
        self._failed_records = 0  # of batches that ended with an error
        self._linger_s, self._patience_s = options.linger_ms / 1000, options.delivery_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False
        self.moved = asyncio.Event()
        self.driver = PublisherDriver(
            brokers,
            core,
            checked_ack(options.ack),
            topic.versions.version,
            self._settled,
            self._lost,
            self._pressed,
        )
        self.driver.ended.add_done_callback(self._ended)
        self.forked = False
        tell_of_forks(self)
        self._open_pumps = brokers.pumps
        self._open_pumps.add(self)
        lifetime.opened(self)

    @property
    def failure(self) -> EmbarcaderoError | None:
        """Why it failed, if it did."""
        return self.driver.core.failed

    def reports(self) -> list[EmbarcaderoError]:
        """Losses that no caller was told yet, and losses in doubt."""
        return [report for report in (self.take_lost(), self.driver.core.unknown) if report is not None]

    @property
    def unstored(self) -> int:
        """Records that ended with an error, or have no outcome. Without the lock: the program may be about to end."""
        return self._failed_records + self.intake.pending_records

    def _after_fork(self) -> None:
        """In a forked child: the session is the parent's, and so are the records."""
        self.forked = True
        problem = f"this publisher into {self.topic!r} was opened before the process was forked"
        self.intake.condition.refuse(Forked(problem, "open another one in the child: log.publisher(...)"))
        self.intake.lock = self.intake.condition.lock
        abandon(self)

    # --- any thread, with the intake's lock held ---
    def tell(self, call: Callable[[Callable[[], object]], object]) -> None:
        """Have the event loop look at what is new (`call` makes it call something), unless it will anyway."""
        if not self._poked and (self.intake.has_sealed or (self._timer is None and self.intake.gathering)):
            call(self.poke)  # before the flag: Ctrl-C in between costs a second look, never the only one
            self._poked = True
        self.intake.told()

    def next_sequence(self, first: int) -> int:
        """The sequence of the next batch of a publisher whose batches began with `first`."""
        self.intake.seal()
        return first + self.intake.sealed_total

    def continues(self, session_seq: int, first: int) -> None:
        """Refuse a sequence that is not the next one of a session whose batches began with `first`."""
        expected = self.next_sequence(first)
        if session_seq != expected:
            what = "leaves a gap" if session_seq > expected else "goes back"
            raise OutOfSequence(
                f"session_seq {session_seq} {what}: the next one of this session is {expected}",
                f"publish with session_seq={expected}, or leave it out",
            )

    # --- event loop ---
    def poke(self) -> None:
        """Take what is sealed, and see that what is not will be."""
        intake = self.intake
        with intake.lock:
            self._poked = False
            self._seal_lingered()
            sealed = intake.take_sealed()
            oldest_s = intake.oldest_s()
            if oldest_s is not None and self._timer is None:
                wait_s = max(oldest_s + self._linger_s - time.monotonic(), 0.0)
                self._timer = self.loop.call_later(wait_s or max(self._linger_s, _POLL_S), self._ring)
            intake.told()
        if sealed:
            self.driver.submit(sealed)

    def _seal_lingered(self) -> None:
        """Batches that could not be sent anyway go on growing instead."""
        if not self.driver.congested:
            self.intake.seal(time.monotonic() - self._linger_s)

    def _ring(self) -> None:
        self._timer = None
        self.poke()

    def _settled(self, sealed: Sealed) -> None:
        with self.intake.lock:
            self.intake.settled(sealed)
            self._failed_records += sealed.count if sealed.result.error is not None else 0
        self.moved.set()

    def _lost(self, lost: RecordsLost) -> None:
        with self.intake.lock:
            self.intake.lose(lost)

    def _pressed(self, pressure: Backpressure | None) -> None:
        """The cluster has had no room for long, or has some again: callers are refused, or go on."""
        with self.intake.lock:
            self.intake.press(pressure)
            self.intake.condition.notify_all()
        self.moved.set()

    def raise_lost(self) -> None:
        """Any thread, without the lock: tell the caller of a loss, once. The publisher goes on."""
        if (lost := self.take_lost()) is not None:
            raise lost

    def take_lost(self) -> RecordsLost | None:
        """Any thread, without the lock: what no caller was told yet."""
        with self.intake.lock:
            return self.intake.take_lost()

    def problems(self) -> list[EmbarcaderoError]:
        """Any thread, without the lock: losses that no caller was told yet, losses in doubt, why it failed."""
        if self.forked:
            return []  # they are the parent's
        core = self.driver.core
        return [*filter(None, [self.take_lost()]), *(fresh(each) for each in (core.unknown, core.failed) if each)]

    def raise_problem(self) -> None:
        """Any thread, without the lock: tell the caller of losses and of why the publisher failed."""
        raise_as_one(self.problems())

    def _ended(self, _: Any) -> None:
        """The publisher failed or was closed: whatever still gathers ends as well."""
        with self.intake.lock:
            closed = Closed("the publisher is closed", "open another one")
            self.intake.refusal = self.intake.refusal or self.driver.core.failed or closed
            self.intake.seal()
            self.intake.condition.notify_all()
        self.poke()
        self.moved.set()

    async def first_sequence(self, timeout: float | None) -> int:  # noqa: ASYNC109 - its end has its own error
        """The sequence of the publisher's first batch; waits until its session is open. Numbers stay from then on."""
        patience = self._patience_s if timeout is None else timeout
        with self.intake.lock:
            pass  # raises in a forked child
        try:
            async with asyncio.timeout(patience):
                await self.driver.opened.wait()
        except TimeoutError:
            problem = f"the session was not open within {patience:g} s"
            raise Backpressure(problem, "nothing was taken; try again") from None
        core = self.driver.core
        if (first := core.first_sequence) is None or core.failed is not None:
            raise fresh(core.failed or self.intake.refusal or Closed("the publisher is closed", "open another one"))
        core.keeps_numbers = True  # the caller goes by these numbers from now on
        return first

    async def already_in(self, timeout: float | None) -> int:  # noqa: ASYNC109 - as above
        """How far beyond its first batch the session was when it was opened."""
        first, found = await self.first_sequence(timeout), self.driver.core.found
        return max(0, (found or 0) - first)

    async def close(self, timeout: float | None) -> None:  # noqa: ASYNC109 - what is left at its end gets its own end
        """Settle everything, learn what is lost, close the session. After `timeout` the rest has an unknown outcome.

        In a forked child it does nothing: the parent closes it.
        """
        if self.forked:
            return
        with self.intake.lock:
            if self.intake.refusal is None:
                self.intake.refusal = Closed("the publisher is closed", "open another one")
            self.intake.seal()
            self.intake.condition.notify_all()
        self.moved.set()
        self.poke()
        self.driver.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may swallow a cancellation
                    await asyncio.shield(self.driver.final)
        finally:
            if not self.driver.final.done():  # the time is over, or we were cancelled
                self.driver.fail(TimedOut("not settled when the publisher was closed", "read the log to find out"))
            if self._timer is not None:
                self._timer.cancel()
            self.driver.stop()
        self._open_pumps.discard(self)  # one whose close was cancelled stays: its caller has not heard what is lost
        lifetime.closed(self)
