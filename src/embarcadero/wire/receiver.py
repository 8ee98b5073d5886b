"""Receives frames: sans-I/O, bounded, without a copy for large payloads.

Theory of operation. The driver asks `get_buffer()` where the next bytes shall go, lets the socket write there, and
calls `received(n)`. Usually the place is the scratch, which all connections of an event loop share: one read brings
many small frames, which are parsed in a loop, and their bodies are copied to where they belong. When at least
DIRECT_BYTES_MIN of a body are still missing, the place is the body's own memory instead, and nothing is copied.

    between frames --header--> body --last byte--> event, between frames
                                 `-- admit said None: its bytes are counted and dropped, no event

A body's memory is made only after its header is complete and its length is checked: a batch's by `admit`, which knows
the log and the peer's credit; any other body's here. `admit` runs ahead of the events: one read may admit many batches
before the first BatchReceived is returned (in the same order), so whoever admits keeps what it gave in a queue.
Between two calls a connection holds at most part of a header (< 64 bytes) and the body under way; nothing refers to the
scratch. An error is final: it drops the events of the same call (nobody acted on them, and the connection is to be
closed; what was admitted and not returned is to be given back), and the receiver raises it again ever after.

A control frame may have an answer that is much larger. With `full`, the receiver therefore stops before each control
frame until all earlier events were handled: `go_on` returns the next ones. While `full()` is true it stays stopped, and
keeps the rest of the read as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from embarcadero import limits
from embarcadero.errors import BadFrame, EmbarcaderoError, FrameTooLarge, invariant
from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.types import Gap
from embarcadero.wire import codec
from embarcadero.wire.codec import ACK, HEADER_BYTES, BatchHeader, FetchedHeader, FrameKind
from embarcadero.wire.messages import AnyMessage

DIRECT_BYTES_MIN: Final = 32 * limits.KIB
"""Below this, one more call to the kernel costs more than the copy."""

_BATCH: Final = FrameKind.BATCH  # a global is found faster than a member of an enum, and each frame looks
_PREFIX_BYTES: Final = codec.PREFIX.size
_LONG_HEADER_BYTES: Final = max(HEADER_BYTES.values())
_LENGTH_MAX: Final[dict[FrameKind, int | None]] = {
    FrameKind.CONTROL: None,  # depends on whether the peer has said hello: `control_bytes_max`
    FrameKind.BATCH: limits.FRAME_BYTES_MAX,
    FrameKind.ACK: limits.ACKS_PER_FRAME_MAX * ACK.itemsize,
    FrameKind.CREDIT: 0,
    FrameKind.FULL: 0,
    FrameKind.FETCHED: limits.FETCH_BYTES_MAX + limits.FRAME_BYTES_MAX + limits.FETCH_ENTRIES_MAX * ORDER.itemsize,
}


class ControlReceived(NamedTuple):
    """A control message; `request` is its number, or its question's."""

    request: int
    message: AnyMessage


class BatchReceived(NamedTuple):
    """A batch whose payload is complete in the memory that `admit` gave."""

    header: BatchHeader


class AcksReceived(NamedTuple):
    """An array of frames.ACK."""

    acks: Entries


class CreditReceived(NamedTuple):
    """Bytes granted since the connection began."""

    total: int


class FullReceived(NamedTuple):
    """No room for too long: in the broker's memory (no lane), or in a lane with which disks do not keep up."""

    lane: int = -1
    replica: int = -1  # one that is in trouble
    trouble: int = 0  # bits of its health word


class FetchedReceived(NamedTuple):
    """The answer to a Fetch; entries and payloads are views of one received body."""

    request: int
    next_index: int
    tail_index: int
    gap: Gap | None
    entries: Entries
    payloads: list[memoryview]


Event = ControlReceived | BatchReceived | AcksReceived | CreditReceived | FullReceived | FetchedReceived
Admit = Callable[[BatchHeader], memoryview | None]


class _ShortHeader(NamedTuple):
    kind: FrameKind
    request: int


class FrameReceiver:
    """One connection's incoming half."""

    def __init__(
        self,
        *,
        allowed: frozenset[FrameKind],
        scratch: memoryview,
        admit: Admit | None = None,
        full: Callable[[], bool] | None = None,
        control_bytes_max: int,
    ) -> None:
        invariant(len(scratch) > _LONG_HEADER_BYTES, "the scratch holds more than a header")
        invariant(admit is not None or FrameKind.BATCH not in allowed, "batches need someone to admit them")
        self.control_bytes_max = control_bytes_max
        self._kinds = {codec.WORDS[kind]: (kind, HEADER_BYTES[kind], _LENGTH_MAX[kind]) for kind in allowed}
        self._scratch = scratch
        self._admit, self._full = admit, full
        self._kept: bytes | memoryview = b""  # the start of a header; all that waits while stopped
        self.stopped = False  # before a control frame, until `go_on`
        self._header: BatchHeader | FetchedHeader | _ShortHeader | None = None  # of the body under way; None: drained
        self._body: memoryview | None = None  # where that body goes; None: nowhere
        self._missing = 0  # bytes of that body
        self._direct = False  # the last buffer given out was the body's own memory
        self._error: BaseException | None = None

    def get_buffer(self) -> memoryview:
        """Where the next bytes shall go; never empty. Call `received` before another connection uses the scratch."""
        self._direct = self._body is not None and self._missing >= DIRECT_BYTES_MIN
        if self._direct and self._body is not None:
            return self._body[len(self._body) - self._missing :]
        if self.stopped:
            return self._scratch
        kept = len(self._kept)
        self._scratch[:kept] = self._kept
        return self._scratch[kept:]

    def received(self, n: int) -> list[Event]:
        """Take the `n` bytes that were written to the last buffer; what they complete, in order."""
        if self.stopped:
            self._kept = b"".join((self._kept, self._scratch[:n]))
            return []
        return self._take(self._scratch, len(self._kept) + n)

    def go_on(self) -> list[Event]:
        """What comes next in the bytes that were received, now that all earlier events were handled."""
        if not self.stopped:
            return []
        self.stopped = False
        return self._take(memoryview(self._kept), len(self._kept))

    def drop(self) -> None:
        """Drop what waits: the connection has ended."""
        self._kept, self.stopped = b"", False

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were received and wait until `full` is no longer true."""
        return len(self._kept) if self.stopped else 0

    def _take(self, data: memoryview, size: int) -> list[Event]:
        if self._error is not None:
            raise self._again(self._error)
        events: list[Event] = []
        try:
            if self._direct:
                self._missing -= size
                if not self._missing:
                    self._finish(events)
            else:
                self._scan(data, size, events)
        except BaseException as error:
            self._error = error
            self._header = self._body = None
            self._kept = b""
            raise
        return events

    @staticmethod
    def _again(error: BaseException) -> BaseException:
        """A fresh copy: raising one object twice would pile up its traceback."""
        return type(error)(error.message, error.hint) if isinstance(error, EmbarcaderoError) else error

    def _scan(self, data: memoryview, size: int, events: list[Event]) -> None:
        """Parse the first `size` bytes of the scratch, or of what was kept."""
        kinds, at = self._kinds, 0
        if self._missing:
            at = self._fill(data, 0, size, events)
        while size - at >= _PREFIX_BYTES:
            word, length = codec.PREFIX.unpack_from(data, at)
            known = kinds.get(word)
            if known is None:
                raise codec.wrong_prefix(word)
            kind, header_bytes, most = known
            if most is None:
                if self._full is not None and (events or self._full()):
                    self.stopped = True
                    break
                most = self.control_bytes_max
            if length > most:
                raise FrameTooLarge(f"a {kind.name} frame of {length} bytes is above the limit of {most}", "send less")
            body_at = at + header_bytes
            if body_at > size:
                break
            self._open(kind, length, data[at:body_at])
            at = self._fill(data, body_at, size, events)
        rest = data[at:size]
        self._kept = rest if self.stopped and data is not self._scratch else bytes(rest)

    def _open(self, kind: FrameKind, length: int, header: memoryview) -> None:
        """Get memory for the body of the frame with this header."""
        if kind is _BATCH and self._admit is not None:
            batch = codec.parse_batch_header(header)
            self._body = self._admit(batch)
            self._header = batch if self._body is not None else None
            invariant(self._body is None or len(self._body) == length, "admitted memory fits the payload exactly")
        else:
            if kind is FrameKind.FETCHED:
                self._header = codec.parse_fetched_header(header)
            elif kind is FrameKind.ACK and length % ACK.itemsize:
                raise BadFrame(f"an ACK frame of {length} bytes", f"acks have {ACK.itemsize} bytes each")
            else:
                self._header = _ShortHeader(kind, codec.parse_request(header))
            self._body = np.empty(length, dtype=np.uint8).data  # unlike a bytearray, not cleared first
        self._missing = length

    def _fill(self, data: memoryview, at: int, size: int, events: list[Event]) -> int:
        """Move what `data` has of the body, from `at`; where the next frame starts."""
        missing = self._missing
        taken = min(missing, size - at)
        if self._body is not None:
            start = len(self._body) - missing
            self._body[start : start + taken] = data[at : at + taken]
        self._missing = missing - taken
        if taken == missing:
            self._finish(events)
        return at + taken

    def _finish(self, events: list[Event]) -> None:
        """The body is complete: turn it into an event."""
        header, body = self._header, self._body
        self._header = self._body = None
        if isinstance(header, BatchHeader):
            events.append(BatchReceived(header))
        elif body is None or header is None:
            return  # drained
        elif isinstance(header, FetchedHeader):
            entries, payloads = codec.parse_fetched_body(header, body)
            events.append(
                FetchedReceived(header.request, header.next_index, header.tail_index, header.gap, entries, payloads)
            )
        elif header.kind is FrameKind.CONTROL:
            events.append(ControlReceived(header.request, codec.decode_control(body)))
        elif header.kind is FrameKind.ACK:
            events.append(AcksReceived(codec.parse_acks(body)))
        elif header.kind is FrameKind.CREDIT:
            events.append(CreditReceived(header.request))
        else:
            events.append(FullReceived(*codec.parse_full(header.request)))
