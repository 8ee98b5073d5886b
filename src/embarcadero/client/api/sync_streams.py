"""The client for threads: publishers, subscribers. Generated from `aio_streams` by `make faces`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa

from embarcadero.client.api.threads import ThreadedPublisher, ThreadedSubscriber
from embarcadero.client.results import Batch, RecordFuture
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Position, StagedBatch


class Publisher(ThreadedPublisher):
    """Publishes records into one topic; thread-safe. `with` it, or close it: closing waits for every outcome."""

    def publish(
        self,
        data: Any,
        *,
        partition: int | None = None,
        session_seq: int | None = None,
        timeout: float | None = None,
    ) -> RecordFuture:
        """Take rows: a pyarrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, a dict of columns.

        They are checked against the topic's schema before anything is sent (BadSchema names the column and both types);
        columns may be in any order, and those that may be null may be missing. Arrow must have the topic's very types;
        everything else is converted where that loses nothing. Without a schema a topic takes `value`, and if you like
        `key`, `headers` and `timestamp`.

        A RecordBatch that fits a frame (8 MiB) stays one batch; everything else is cut by `batch_bytes`, and other
        publishers' batches may come between. There is one future: its result is the Position of the first record, there
        once all of the rows are stored. Waits while the window is full. `session_seq` says which batch of the session
        the first one must become; OutOfSequence when another one is next.

            publisher.publish(pa.table({"symbol": ["EMB"], "price": [12.5]})).result()
            publisher.publish([{"symbol": "EMB", "price": 12.5}, {"symbol": "ARC", "price": 3.25}])
            publisher.publish(data_frame, partition=3)
        """
        return self._publish(data, partition=partition, session_seq=session_seq, timeout=timeout)

    def publish_encoded(
        self, payload: pa.Buffer, count: int, *, partition: int = 0, timeout: float | None = None
    ) -> RecordFuture:
        """Take one batch of `count` records that is encoded already, by `encode_batch` and the topic's schema.

        For those who have to know the very bytes before they are sent; nothing is checked here.

            publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows)
        """
        return self._publish_encoded(payload, count, partition=partition, timeout=timeout)

    def publish_reference(
        self, reference: StagedBatch, *, partition: int = 0, timeout: float | None = None
    ) -> RecordFuture:
        """Publish a batch that is staged in a topic of order 0 or 1 of this cluster: its bytes are copied there.

        `reference` is what `staged()` of its future returned. The batch has one sequence of the session, like any
        other, and takes as much of the window. The future ends with BadReference if the staged batch is not there or
        is another one, and with NotAvailable if the connected brokers are of a version without references.

            staged = staging.publish_encoded(payload, count).staged(schema=1)   # once it is awaited
            position = publisher.publish_reference(staged).result()
        """
        return self._publish_reference(reference, partition=partition, timeout=timeout)

    def next_session_seq(self, timeout: float | None = None) -> int:
        """The sequence that the next batch of this session gets; waits until the session is open.

            with log.publisher("orders", session="job-7") as publisher:
                done = publisher.next_session_seq()     # so many batches are in the log already
        """
        return self._next_session_seq(timeout)

    def already_in(self, timeout: float | None = None) -> int:
        """How many sequences from `session_at` on an earlier holder of this session has used.

            with log.publisher("orders", session="job-7", session_at=4096) as publisher:
                done = publisher.already_in()           # batches 4096 to 4096 + done are in, or some of them
        """
        return self._already_in(timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything taken so far has its outcome. Raises TimedOut, RecordsLost, or why it failed.

            publisher.flush(timeout=10)
        """
        self._flush(timeout)

    def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, at most `timeout` seconds; what is left then has an unknown outcome.

        Raises RecordsLost, or why the publisher failed, if it did; if both, the failure is the cause of the
        RecordsLost. Raises LossUnknown if records were acked with ack=1 and no broker could say in time whether they
        are lost (the cluster is down). Closing twice is fine.
        """
        self._close(timeout)


class Subscriber(ThreadedSubscriber):
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order (`batch.lane`).

    It fetches ahead, within bounds.
    """

    def poll(self, timeout: float | None = None) -> Batch | None:
        """The next batch (or typed gap: `batch.gap`); None when none came in time. Raises what ended the reading.

        TierUnavailable names a store that could not be reached for some seconds; polling again goes on.

            batch = subscriber.poll(timeout=1.0)
        """
        return self._poll(timeout)

    def seek(
        self,
        where: str | Position | None = None,
        *,
        seq: int | None = None,
        index: int | None = None,
        time: datetime | None = None,
        lane: int | None = None,
    ) -> None:
        """Go on from "earliest", "latest", a Position, the batch that holds a seq, an index, or the first since a time.

        Orders 0 and 1: a seq or an index is a place in one lane, so say which; the other lanes go on as they are.

            subscriber.seek(time=datetime.now(UTC) - timedelta(hours=1))
            subscriber.seek(seq=1_000, lane=4_097)
        """
        self._seek(where, seq=seq, index=index, time=time, lane=lane)

    @property
    def paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        return self._paused

    def pause(self) -> None:
        """Stop fetching and keep the position: until `resume`, polls end with their timeout.

            subscriber.pause()      # while the disk is full; subscriber.resume() goes on
        """
        self._pause()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._resume()

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is. Orders 0 and 1: `positions()`."""
        return self._position()

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None until the cluster has told where that is."""
        return self._positions()

    def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:
        """Stop reading. Closing twice is fine; in a forked child it does nothing."""
        self._close(timeout)
