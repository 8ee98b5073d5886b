"""Publishers that never stop: each numbers its records, and keeps the acks and their positions.

A stream stays connected while the cluster dies and comes back. Its acks are the truth for later checks of readers.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import embarcadero as emb
from embarcadero.client.results import RecordFuture
from embarcadero.errors import EmbarcaderoError
from embarcadero.types import Position

RECORD: Final = struct.Struct("<IQ")
_BURST: Final = 8
_IN_FLIGHT: Final = 256
_ACK_S: Final = 120.0
_PACE_S: Final = 0.1


@dataclass(slots=True)
class FirstAck:
    """The first ack of a record with this number or a higher one: its time, by the monotonic clock."""

    since: int
    at_s: float | None = None


class Stream(threading.Thread):
    """One publisher."""

    def __init__(self, number: int, addresses: list[str], topic: str, record_bytes: int, ack: int = 2) -> None:
        super().__init__(name=f"stream-{number}", daemon=True)
        self.number, self.topic, self.ack = number, topic, ack
        self.acked: dict[int, Position | None] = {}  # None: stored, but its position is no longer known
        self.problems: list[str] = []
        self.sent = 0
        self._awaited = FirstAck(0)
        self._addresses, self._padding = addresses, bytes(max(0, record_bytes - RECORD.size))
        self._waiting: deque[tuple[int, RecordFuture]] = deque()
        self._over = threading.Event()

    def next_ack(self) -> FirstAck:
        """Return the first ack of a record sent from now on. `acked` lags behind: it is filled later."""
        self._awaited = FirstAck(self.sent)
        return self._awaited

    def finish(self) -> None:
        """Stop sending; records in flight get their answers before the thread ends."""
        self._over.set()

    def run(self) -> None:
        """Publish until asked to finish."""
        try:
            with emb.connect(self._addresses) as log, log.publisher(self.topic, ack=self.ack, linger_ms=1) as publisher:
                while not self._over.is_set():
                    self._burst(publisher)
                    self._settle(_IN_FLIGHT)
                    self._over.wait(_PACE_S)
                publisher.flush(timeout=_ACK_S)
                self._settle(0)
        except EmbarcaderoError as error:
            self.problems.append(f"stream {self.number} ended: {type(error).__name__}: {error}")

    def _burst(self, publisher: emb.Publisher) -> None:
        for _ in range(_BURST):
            number, record = self.sent, RECORD.pack(self.number, self.sent) + self._padding
            self.sent += 1
            future = publisher.send(record)
            future.add_done_callback(lambda done, number=number: self._on_ack(number, done))  # type: ignore[misc]
            self._waiting.append((number, future))

    def _on_ack(self, number: int, future: RecordFuture) -> None:
        """Record the time of the ack; called in the client's thread."""
        awaited = self._awaited
        if awaited.at_s is None and number >= awaited.since and future.exception() is None:
            awaited.at_s = time.monotonic()

    def _settle(self, most: int) -> None:
        """Take available answers, and wait for the oldest one while more than `most` are missing."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0][1].done()):
            number, future = self._waiting.popleft()
            try:
                self.acked[number] = future.result(timeout=_ACK_S)
            except (EmbarcaderoError, TimeoutError) as error:
                self.problems.append(f"stream {self.number}, record {number}: {type(error).__name__}: {error}")
