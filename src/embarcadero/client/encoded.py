"""Batches whose bytes are made already: sent as they are, or named where they are staged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import pyarrow as pa

from embarcadero.client.arguments import check_timeout
from embarcadero.client.results import RecordFuture, TableResult
from embarcadero.types import StagedBatch

if TYPE_CHECKING:
    from embarcadero.client.aio import RecordAwaitable
    from embarcadero.client.publish.intake import Intake, Sealed
    from embarcadero.client.publish.pump import Pump

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`


class _Waits(Protocol):
    _pump: Pump

    async def _room(self, timeout: float | None, patient: bool = False) -> None: ...


class _Adds(Protocol):
    pump: Pump
    _intake: Intake

    def _add_piece(
        self, piece: Sealed, whole: TableResult, claim: tuple[int, int] | None, timeout: float | None
    ) -> None: ...


class EncodedCalls:
    """The part of a Publisher about encoded batches."""

    async def publish_encoded(
        self: _Waits, payload: pa.Buffer, count: int, *, partition: int = 0, timeout: float | None = None
    ) -> RecordAwaitable:
        """Take one batch of `count` records that is encoded already, by `encode_batch` and the topic's schema.

        For those who have to know the very bytes before they are sent; nothing is checked here.

            await (await publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows))
        """
        check_timeout(timeout)
        self._pump.raise_lost()
        return await _add_alone(self, self._pump.intake.encoded_piece(payload, count, partition), timeout)

    async def publish_reference(
        self: _Waits, reference: StagedBatch, *, partition: int = 0, timeout: float | None = None
    ) -> RecordAwaitable:
        """Publish a batch that is staged in a topic of order 0 or 1 of this cluster: its bytes are copied there.

        `reference` is what `staged()` of its future returned. The batch has one sequence of the session, like any
        other, and takes as much of the window. The future ends with BadReference if the staged batch is not there or
        is another one, and with NotAvailable if the connected brokers are of a version without references.

            staged = (await staging.publish_encoded(payload, count)).staged(schema=1)   # once it is awaited
            position = await (await publisher.publish_reference(staged))
        """
        check_timeout(timeout)
        self._pump.raise_lost()
        return await _add_alone(self, self._pump.intake.reference_piece(reference, partition), timeout)


class SyncEncodedCalls:
    """The same for the synchronous client."""

    def publish_encoded(
        self: _Adds, payload: pa.Buffer, count: int, *, partition: int = 0, timeout: float | None = None
    ) -> RecordFuture:
        """Take one batch of `count` records that is encoded already, by `encode_batch` and the topic's schema.

        For those who have to know the very bytes before they are sent; nothing is checked here.

            publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows)
        """
        check_timeout(timeout)
        self.pump.raise_lost()
        return _sync_add_alone(self, self._intake.encoded_piece(payload, count, partition), timeout)

    def publish_reference(
        self: _Adds, reference: StagedBatch, *, partition: int = 0, timeout: float | None = None
    ) -> RecordFuture:
        """Publish a batch that is staged in a topic of order 0 or 1 of this cluster: its bytes are copied there.

        `reference` is what `staged()` of its future returned. The batch has one sequence of the session, like any
        other, and takes as much of the window. The future ends with BadReference if the staged batch is not there or
        is another one, and with NotAvailable if the connected brokers are of a version without references.

            staged = staging.publish_encoded(payload, count).staged(schema=1)
            position = publisher.publish_reference(staged).result()
        """
        check_timeout(timeout)
        self.pump.raise_lost()
        return _sync_add_alone(self, self._intake.reference_piece(reference, partition), timeout)


async def _add_alone(publisher: _Waits, piece: Sealed, timeout: float | None) -> RecordAwaitable:
    intake, whole = publisher._pump.intake, TableResult(publisher._pump.intake.condition)
    await publisher._room(timeout)
    with intake.lock:
        intake.add_piece(piece)
    whole.add(piece.result)
    publisher._pump.poke()
    whole.complete()
    return cast("RecordAwaitable", intake.future(whole, 0))


def _sync_add_alone(publisher: _Adds, piece: Sealed, timeout: float | None) -> RecordFuture:
    whole = TableResult(publisher._intake.condition)
    publisher._add_piece(piece, whole, None, timeout)
    whole.complete()
    return RecordFuture(whole, 0)
