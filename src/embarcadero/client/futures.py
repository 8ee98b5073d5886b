"""Futures of published records. A batch has one result; the future of a record is that result and a number."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from embarcadero.client.waiting import Waitable
from embarcadero.errors import BadValue, EmbarcaderoError, TimedOut
from embarcadero.types import NO_INDEX, Position, StagedBatch

FutureType = TypeVar("FutureType", bound="RecordFuture")

_LOG: Final = logging.getLogger("embarcadero.client")


class Receipt(NamedTuple):
    """What was stored of one batch, beside its position."""

    topic_id: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int


class BatchResult:
    """What became of a batch. Settles once; may be waited for and called back from any thread.

    `condition` is shared by all results of a publisher, so a result costs no lock of its own. `receipt` is there once
    one batch is stored; a table that became several has none.
    """

    __slots__ = ("_callbacks", "condition", "done", "error", "position", "receipt")

    def __init__(self, condition: Waitable) -> None:
        self.condition = condition
        self.done = False
        self.position: Position | None = None
        self.receipt: Receipt | None = None
        self.error: EmbarcaderoError | None = None
        self._callbacks: list[Callable[[], object]] = []

    def settle(
        self, position: Position | None, error: EmbarcaderoError | None, receipt: Receipt | None = None
    ) -> None:
        """The batch has ended. Later calls change nothing."""
        with self.condition.lock:
            if self.done:
                return
            self.position, self.error, self.receipt, self.done = position, error, receipt, True
            callbacks, self._callbacks = self._callbacks, []
            self.condition.notify_all()
        for callback in callbacks:
            _call(callback)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back once it has ended: in the client's own thread, or at once if it has."""
        with self.condition.lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        _call(callback)

    def wait(self, timeout: float | None) -> None:
        """Wait until it has ended. Ctrl-C gets through."""
        if self.done:
            return
        if not self.condition.wait_for(lambda: self.done, timeout):
            raise TimedOut(f"no outcome within {timeout:g} s", "the record may still be stored; ask again later")


def _call(callback: Callable[[], object]) -> None:
    """A callback that fails is its author's trouble: others are called, other batches end, connections stay."""
    try:
        callback()
    except Exception:
        _LOG.exception("a callback of a published record failed")


def fresh(error: EmbarcaderoError) -> EmbarcaderoError:
    """A copy to raise: raising one object in many threads would mix up their tracebacks."""
    kind, arguments = error.__reduce__()
    return kind(*arguments)


class RecordFuture(msgspec.Struct, eq=False, gc=False):
    """The future position of one record (or of the first record of a table).

    There is one for every record, so it is made in C; it refers to nothing that refers back to it for long.
    """

    _result: BatchResult
    _number: int

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._result.done

    def result(self, timeout: float | None = None) -> Position | None:
        """Where the record is. Raises its error, or TimedOut.

        None: it is stored, but so long ago that the cluster no longer names the place; or ack=0, and nobody asked.
        """
        self._result.wait(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> EmbarcaderoError | None:
        """The error with which it ended, or None. Raises TimedOut while it has not ended."""
        self._result.wait(timeout)
        return self._result.error

    def staged(self, schema: int = 0, timeout: float | None = None) -> StagedBatch:
        """Name the stored batch, so that it can be published into another topic: see `publish_reference`.

        For batches that were published with `publish_encoded` into a topic of order 0 or 1. `schema` is the version of
        the other topic's schema by which the payload was encoded; 0: raw records. Raises the batch's error, TimedOut,
        or BadValue if its place is not known.

            staged = publisher.publish_encoded(payload, count).staged(schema=1)
        """
        position, receipt = self.result(timeout), self._result.receipt
        if position is None or receipt is None:
            raise BadValue(
                "the place of this batch is not known: it was published with ack=0, or as several batches",
                "stage with publish_encoded and ack=1 or ack=2",
            )
        return StagedBatch(
            receipt.topic_id, position.lane, position.index, receipt.size, receipt.count, receipt.crc, schema
        )

    def add_done_callback(self: FutureType, callback: Callable[[FutureType], object]) -> None:
        """Call `callback(self)` once the outcome is known, in the client's own thread: it should be quick.

        What it raises is logged and goes no further.
        """
        self._result.on_done(lambda: callback(self))

    def _outcome(self) -> Position | None:
        if self._result.error is not None:
            raise fresh(self._result.error)
        position = self._result.position
        if position is None or position.seq == NO_INDEX or not self._number:
            return position
        return Position(position.lane, position.index, position.seq + self._number)


class TableResult(BatchResult):
    """The result of a table that became several batches: ends when all have, with the first one's position."""

    __slots__ = ("_parts",)

    def __init__(self, condition: Waitable) -> None:
        super().__init__(condition)
        self._parts: list[BatchResult] = []

    def add(self, part: BatchResult) -> None:
        """One more batch belongs to the table."""
        self._parts.append(part)

    def complete(self) -> None:
        """All batches of the table were added."""
        for part in self._parts:
            part.on_done(self._part_done)

    def _part_done(self) -> None:
        if all(part.done for part in self._parts):
            error = next((part.error for part in self._parts if part.error is not None), None)
            receipt = self._parts[0].receipt if len(self._parts) == 1 else None
            self.settle(None if error else self._parts[0].position, error, receipt)
