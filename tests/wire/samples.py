"""Frames for tests: builders, a sample of each kind (the vectors of docs/protocol.md), a driver with split reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy as np

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, seal
from embarcadero.limits import CONTROL_BYTES_MAX
from embarcadero.types import EntryKind, Gap, GapKind, Outcome
from embarcadero.wire import codec, messages
from embarcadero.wire.codec import (
    ACK,
    REFERENCE,
    AcksReceived,
    BatchReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
)

ACK_FIELDS = ("lane", "session", "session_seq", "index", "seq", "extra", "outcome")
EVERY_KIND = frozenset(FrameKind)
Admit = Callable[[codec.BatchHeader], memoryview | None]


def batch_frame(payload: bytes, **fields: int) -> bytes:
    """A whole batch frame; fields have defaults."""
    header = {"session_seq": 5, "low": 3, "lane": 1, "session": 9, "count": 2, "length": len(payload)}
    return codec.batch_header(**header | {"crc": codec.payload_crc(payload)} | fields) + payload


def reference_frame(payload: bytes, *, at: tuple[int, int, int] = (4096, 7, 1 << 40), **fields: int) -> bytes:
    """A whole batch frame that names a staged batch with this payload, by its lane, index and topic id."""
    lane, index, topic_id = at
    body = codec.reference_body(codec.BatchReference(lane, len(payload), index, topic_id))
    return batch_frame(body, **{"crc": codec.payload_crc(payload), "flags": REFERENCE} | fields)


def acks(*rows: tuple[int, int, int, int, int, int, Outcome]) -> np.ndarray:
    """An array of acks: lane, session, session_seq, index, seq, extra, outcome."""
    made = np.zeros(len(rows), dtype=ACK)
    for i, row in enumerate(rows):
        for name, value in zip(ACK_FIELDS, row, strict=True):
            made[name][i] = value
    return made


def entries_for(payloads: list[bytes], first_index: int = 100) -> np.ndarray:
    """Sealed order entries for payloads; an empty payload gets a SESSION_OPEN."""
    entries = np.zeros(len(payloads), dtype=ORDER)
    for i, payload in enumerate(payloads):
        kind = EntryKind.BATCH if payload else EntryKind.SESSION_OPEN
        entries[i]["index"], entries[i]["kind"] = first_index + i, kind
        entries[i]["size"], entries[i]["count"], entries[i]["crc"] = len(payload), 1, codec.payload_crc(payload)
    return seal(entries)


def fetched_frame(payloads: list[bytes], *, entries: np.ndarray | None = None, **fields: Any) -> bytes:
    """A whole fetched frame; fields of its header have defaults that fit."""
    entries = entries_for(payloads) if entries is None else entries
    body = entries.tobytes() + b"".join(payload + bytes(-len(payload) % 8) for payload in payloads)
    header = {"request": 7, "next_index": 200, "tail_index": 300, "count": len(entries), "length": len(body)} | fields
    return codec.fetched_header(**header) + body


def vectors() -> dict[str, bytes]:
    """The test vectors of docs/protocol.md: name -> frame."""
    failed = messages.Failed(code="UnknownTopic", message="no topic 'x'", hint="create it")
    return {
        "CONTROL: Hello, request 1": codec.control_frame(messages.Hello(versions=[1], client="doc"), 1),
        "CONTROL: Ping, request 2": codec.control_frame(messages.Ping(), 2),
        "CONTROL: Failed, request 3": codec.control_frame(failed, 3),
        "BATCH: sequence 5 of session 9": batch_frame(b"payload!", partition=4, schema=1),
        "BATCH: sequence 6 of session 9, by reference": reference_frame(
            b"payload!", session_seq=6, partition=4, schema=1
        ),
        "ACK: one ordered, one fenced": codec.ack_frame(
            acks((1, 9, 5, 1000, 4000, 0, Outcome.ORDERED), (1, 10, 8, 0, 0, 6, Outcome.FENCED))
        ),
        "CREDIT: 16 MiB in all": codec.credit_frame(16 << 20),
        "FULL": codec.full_frame(),
        "FETCHED: one batch and one control entry": fetched_frame([b"hello", b""]),
        "FETCHED: a trimmed gap": fetched_frame([], next_index=50, gap=Gap(GapKind.TRIMMED, 10, 50)),
    }


def plain(event: Any) -> Any:
    """An event as comparable values."""
    if isinstance(event, AcksReceived):
        return "acks", event.acks.tobytes()
    if isinstance(event, FetchedReceived):
        return "fetched", event[:4], event.entries.tobytes(), [bytes(payload) for payload in event.payloads]
    return event


class Peer:
    """A receiver with a log for its batches, fed with reads of any size.

    The scratch is overwritten after every read.
    """

    def __init__(
        self,
        *,
        allowed: frozenset[FrameKind] = EVERY_KIND,
        scratch_bytes: int = 4096,
        control_bytes_max: int = CONTROL_BYTES_MAX,
        admit: Admit | None = None,
        full: Callable[[], bool] | None = None,
    ) -> None:
        self.scratch = bytearray(scratch_bytes)
        self.admitted: list[bytearray] = []
        self.receiver = FrameReceiver(
            allowed=allowed,
            scratch=memoryview(self.scratch),
            admit=admit or self._admit,
            full=full,
            control_bytes_max=control_bytes_max,
        )
        self.events: list[Any] = []
        self.error: EmbarcaderoError | None = None
        self._batches = 0

    def _admit(self, header: codec.BatchHeader) -> memoryview:
        self.admitted.append(bytearray(header.length))
        return memoryview(self.admitted[-1])

    def read(self, data: bytes) -> int:
        """One read: as much of `data` as fits in the buffer; errors are raised."""
        buffer = self.receiver.get_buffer()
        assert len(buffer) > 0
        taken = min(len(buffer), len(data))
        buffer[:taken] = data[:taken]
        self._take(self.receiver.received(taken))
        return taken

    def go_on(self) -> None:
        """Take the bytes that wait after the last events."""
        self._take(self.receiver.go_on())

    def _take(self, events: list[Event]) -> None:
        self.scratch[:] = b"\xa5" * len(self.scratch)
        for event in events:
            if isinstance(event, BatchReceived):
                self.events.append((event, bytes(self.admitted[self._batches]) if self.admitted else None))
                self._batches += 1
            else:
                self.events.append(event)

    def feed(self, data: bytes, reads: Iterable[int] = (), direct_min: int = codec.DIRECT_BYTES_MIN) -> Peer:
        """Read all of `data`, in reads of these sizes (then the largest possible), up to the first error."""
        sizes = iter(reads)
        at = 0
        with patch.object(codec, "DIRECT_BYTES_MIN", direct_min):
            while at < len(data):
                size = next(sizes, len(data))
                try:
                    at += self.read(data[at : at + size])
                except EmbarcaderoError as error:
                    self.error = error
                    break
        return self

    @property
    def seen(self) -> list[Any]:
        """All events as comparable values."""
        return [plain(event) for event in self.events]
