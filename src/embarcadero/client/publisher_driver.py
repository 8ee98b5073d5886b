"""What gives a publisher's core time and connections. Clients that only read do not load it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from embarcadero.client.connection import now_us
from embarcadero.client.drivers import CoreDriver
from embarcadero.client.futures import Receipt
from embarcadero.client.intake import Sealed
from embarcadero.client.outbatch import OutBatch
from embarcadero.client.publisher import PublisherCore
from embarcadero.errors import Backpressure, EmbarcaderoError, RecordsLost
from embarcadero.types import Ack

if TYPE_CHECKING:
    from embarcadero.client.brokers import Brokers


class PublisherDriver(CoreDriver):
    """Feeds sealed batches to a publisher's core, in order, as it has room."""

    core: PublisherCore

    def __init__(
        self, brokers: Brokers, core: PublisherCore, ack: Ack, schema: int, on_settled: Callable[[Sealed], None],
        on_lost: Callable[[RecordsLost], None], on_pressure: Callable[[Backpressure | None], None],
    ) -> None:  # fmt: skip
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

    def publishing(self) -> PublisherDriver | None:
        """Itself."""
        return self

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
