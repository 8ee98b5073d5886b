"""The frames of the protocol, as tables. All numbers are little-endian.

Every frame starts with the same 8 bytes; `length` counts the bytes after the frame's header (16 or 64 bytes).

    any frame            batch (64)                 fetched (64)              ack (48 each)
    0 magic   u16 "EM"   8  session_seq u64         8  request    u64         0  lane        u32
    2 version u8         16 low         u64         16 next_index u64         4  session     u32
    3 kind    u8         24 lane        u32         24 tail_index u64         8  session_seq u64
    4 length  u32        28 session     u32         32 count      u32         16 index       u64
    short header (16):   32 count       u32         36 gap_kind   u8          24 seq         u64
    8 request u64        36 crc         u32         40 gap_start  u64         32 extra       u64
                         40 partition   u16         48 gap_stop   u64         40 outcome     u8
                         42 schema      u16         60 check      u32         41 pad
                         44 flags       u8
                         60 check       u32

kind     header  request is               body
CONTROL  16      the message's number     one msgpack message (messages.py); an answer has its request's number
BATCH    64      -                        an Arrow IPC record batch message, `crc` is its CRC32C
ACK      16      0                        `length` / 48 acks
CREDIT   16      total bytes granted      empty; the total counts whole batch frames from the start of the connection
FULL     16      why (`full_frame`)       empty; for 10 s the broker was above its high watermark, or a lane stood still
FETCHED  64      number of its Fetch      `count` order entries (64 bytes each), then payloads, each padded to 8 bytes

Flags of a batch:

- bit 0 (NO_ACK; orders 0 and 1): the publisher wants no ack, also not for a refusal.
- bit 1 (WANT_DURABLE): the broker acks the batch when it is durable, not when it is ordered.
- bit 2 (REFERENCE): the body is not a payload, but a REFERENCE_BODY that names the staged batch with the payload.

`check` of a 64-byte header is the CRC32C of its first 60 bytes. A batch's `low` is the publisher's lowest unsettled
sequence.

This module has pure functions between bytes and values for every frame. No function waits, and every length is checked.
It also has the receiver of frames: sans-I/O, bounded, without a copy for large payloads.

Headers use `struct`: a batch header costs about a microsecond; numpy scalars would cost twenty. Acks and order entries
stay arrays. For any input, a decoder raises only a ProtocolError (BadMagic, BadVersion, FrameTooLarge, BadFrame) if the
peer violates the protocol, or ChecksumMismatch if bytes are damaged.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from enum import IntEnum
from itertools import accumulate
from typing import Any, Final, NamedTuple

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from embarcadero import limits
from embarcadero.errors import (
    BadFrame,
    BadMagic,
    BadValue,
    BadVersion,
    ChecksumMismatch,
    EmbarcaderoError,
    FrameTooLarge,
    ProtocolError,
    invariant,
)
from embarcadero.fabric.layout import ORDER, Entries, every, sealed, table
from embarcadero.types import BATCH_KIND, Gap, GapKind, Outcome
from embarcadero.wire.messages import AnyMessage, Message

MAGIC: Final = 0x4D45
PROTOCOL_VERSION: Final = 1


class FrameKind(IntEnum):
    """Kinds of frames."""

    CONTROL = 1
    BATCH = 2
    ACK = 3
    CREDIT = 4
    FULL = 5
    FETCHED = 6


SHORT_HEADER: Final = table(
    16, magic=("<u2", 0), version=("u1", 2), kind=("u1", 3), length=("<u4", 4), request=("<u8", 8)
)

BATCH_HEADER: Final = table(
    64,
    magic=("<u2", 0), version=("u1", 2), kind=("u1", 3), length=("<u4", 4), session_seq=("<u8", 8), low=("<u8", 16),
    lane=("<u4", 24), session=("<u4", 28), count=("<u4", 32), crc=("<u4", 36), partition=("<u2", 40),
    schema=("<u2", 42), flags=("u1", 44), check=("<u4", 60),
)  # fmt: skip

FETCHED_HEADER: Final = table(
    64,
    magic=("<u2", 0), version=("u1", 2), kind=("u1", 3), length=("<u4", 4), request=("<u8", 8), next_index=("<u8", 16),
    tail_index=("<u8", 24), count=("<u4", 32), gap_kind=("u1", 36), gap_start=("<u8", 40), gap_stop=("<u8", 48),
    check=("<u4", 60),
)  # fmt: skip

ACK: Final = table(
    48,
    lane=("<u4", 0), session=("<u4", 4), session_seq=("<u8", 8), index=("<u8", 16), seq=("<u8", 24), extra=("<u8", 32),
    outcome=("u1", 40),
)  # fmt: skip

NO_ACK: Final = 1
"""Flag of a batch frame: the publisher wants no ack."""
WANT_DURABLE: Final = 2
"""Flag of a batch frame: the ack waits until the batch is durable. Refusals are sent immediately."""

REFERENCE: Final = 4
"""Flag of a batch frame: the body names a staged batch. `crc`, `count`, `partition` and `schema` are of its payload."""

REFERENCE_BODY: Final = table(
    32, lane=("<u4", 0), size=("<u4", 4), index=("<u8", 8), topic_id=("<u8", 16), check=("<u4", 28)
)

PAYLOAD_ALIGN: Final = 8
HEADER_BYTES: Final = {
    FrameKind.CONTROL: 16, FrameKind.BATCH: 64, FrameKind.ACK: 16, FrameKind.CREDIT: 16, FrameKind.FULL: 16,
    FrameKind.FETCHED: 64,
}  # fmt: skip

invariant(SHORT_HEADER.itemsize == 16 and BATCH_HEADER.itemsize == 64, "headers have their sizes")
invariant(FETCHED_HEADER.itemsize == 64 and ACK.itemsize == 48, "headers have their sizes")
invariant(np.dtype("<u2").itemsize == 2, "a magic has two bytes")


BytesLike = bytes | bytearray | memoryview

PREFIX: Final = struct.Struct("<II")  # magic, version and kind as one word; length
_SHORT: Final = struct.Struct("<IIQ")
_BATCH: Final = struct.Struct("<IIQQIIIIHHB15x")
_FETCHED: Final = struct.Struct("<IIQQQIB3xQQ4x")
_CHECK: Final = struct.Struct("<I")
_CHECK_AT: Final = 60
_REFERENCE: Final = struct.Struct("<IIQQ4x")
_ENTRY_BYTES: Final = ORDER.itemsize
_COPIED_BYTES_MAX: Final = 4_096
"""Up to this size, a copy is faster than a view for the checksum library."""

_crc32c = google_crc32c.value
_encode_message = msgspec.msgpack.Encoder().encode
_decode_message: Callable[[BytesLike], AnyMessage] = msgspec.msgpack.Decoder(AnyMessage).decode

WORDS: Final = {kind: MAGIC | PROTOCOL_VERSION << 16 | kind << 24 for kind in FrameKind}
"""The first four bytes of each kind of frame, as one number."""
PACKED_ACK: Final = struct.Struct("<IIQQQQB7x")
"""Lane, session, session sequence, index, seq, extra, outcome."""

_ACK_WORD: Final = WORDS[FrameKind.ACK]
invariant(PACKED_ACK.size == ACK.itemsize, "a packed ack has the layout of the table")
invariant(_REFERENCE.size + _CHECK.size == REFERENCE_BODY.itemsize, "a packed reference has the layout of the table")
_BATCH_WORD: Final = WORDS[FrameKind.BATCH]
_FETCHED_WORD: Final = WORDS[FrameKind.FETCHED]

_SPANS: Final = frozenset({GapKind.TRIMMED, GapKind.LOST, GapKind.NEVER_DURABLE})
_FETCHED_GAPS: Final = _SPANS | {GapKind.END_OF_LANE}
_OUTCOMES: Final = frozenset(int(outcome) for outcome in Outcome)
_OUTCOME_AT: Final = 40
invariant(PACKED_ACK.pack(0, 0, 0, 0, 0, 0, 1).index(1) == _OUTCOME_AT, "an ack's outcome has the table's offset")
_OUTCOME_KNOWN: Final = np.isin(np.arange(256), [int(outcome) for outcome in Outcome])


class BatchHeader(NamedTuple):
    """The header of a batch frame."""

    session_seq: int
    low: int
    lane: int
    session: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int
    length: int
    partition: int = 0
    schema: int = 0
    flags: int = 0


class BatchReference(NamedTuple):
    """The staged batch in a batch frame with the flag REFERENCE, and the size of its payload."""

    lane: int
    size: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    topic_id: int


class FetchedHeader(NamedTuple):
    """The header of a fetched frame."""

    request: int
    next_index: int
    tail_index: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    length: int
    gap: Gap | None = None


def payload_crc(buffer: Any) -> int:
    """Compute the CRC32C of any contiguous buffer, without a copy of large ones."""
    if isinstance(buffer, bytes):
        return int(_crc32c(buffer))
    if isinstance(buffer, memoryview) and buffer.nbytes <= _COPIED_BYTES_MAX:
        return int(_crc32c(bytes(buffer)))
    data = np.frombuffer(buffer, dtype=np.uint8)
    data.setflags(write=False)  # the library accepts only read-only buffers, and no memoryviews
    return int(_crc32c(data))


def wrong_prefix(word: int) -> ProtocolError:
    """Return the error for the first four bytes of a frame that is not accepted."""
    start, version, kind = word & 0xFFFF, word >> 16 & 0xFF, word >> 24
    if start != MAGIC:
        seen = start.to_bytes(2, "little")
        if seen == b"\x16\x03":
            hint = "this looks like TLS; this port speaks the Embarcadero protocol without TLS"
        elif seen.isalpha():
            hint = "this looks like HTTP or another text protocol; use an Embarcadero client"
        else:
            hint = "the peer may be an HTTP or TLS client; use an Embarcadero client"
        return BadMagic(f"a frame starts with {seen!r} instead of {MAGIC.to_bytes(2, 'little')!r}", hint)
    if version != PROTOCOL_VERSION:
        return BadVersion(
            f"the peer uses protocol version {version}, and this side uses version {PROTOCOL_VERSION}",
            "use releases that share a protocol version on both sides",
        )
    if kind in WORDS:
        problem = f"a {FrameKind(kind).name} frame is not allowed in this direction"
        return BadFrame(problem, "docs/protocol.md has the frames of each direction")
    return BadFrame(f"frame kind {kind} is unknown", "use releases that share a protocol version on both sides")


# --- control ----------------------------------------------------------------------------------------------------------
def control_frame(message: Message, request: int = 0) -> bytes:
    """Encode a whole frame with one control message."""
    body = _encode_message(message)
    if len(body) > limits.CONTROL_BYTES_MAX:
        raise FrameTooLarge(
            f"a {type(message).__name__} of {len(body)} bytes is above the limit of {limits.CONTROL_BYTES_MAX}",
            "request less in one call",
        )
    return _SHORT.pack(WORDS[FrameKind.CONTROL], len(body), request) + body


_PLACE: Final = re.compile(r" - at `\$\.(\w+)[^`]*`$")


def check_message(message: Message) -> None:
    """Refuse a message with a field of a wrong type, which the peer could not decode. Raises BadValue."""
    try:
        _decode_message(_encode_message(message))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        why = str(error)
        if found := _PLACE.search(why):
            name = found[1]
            expected = why[: found.start()].replace("`", "").replace(" | null", " or None")
            raise BadValue(f"{name}={getattr(message, name, None)!r} has a wrong type or value", expected) from None
        raise BadValue(f"an argument has a wrong type: {why}", "use plain int, str, bytes and float") from None


def decode_control(body: BytesLike) -> AnyMessage:
    """Decode the body of a control frame."""
    try:
        return _decode_message(body)
    except RecursionError as error:
        raise BadFrame("a control message is nested too deeply", "send flat messages") from error
    except (msgspec.DecodeError, ValueError) as error:  # wrong UTF-8 is a ValueError
        raise BadFrame(f"a control message can't be decoded: {error}", "docs/protocol.md lists the messages") from error


def parse_request(header: BytesLike) -> int:
    """Read the last field of a 16-byte header: a request's number, or granted bytes."""
    return int.from_bytes(header[8:16], "little")


# --- batches ----------------------------------------------------------------------------------------------------------
def batch_header(
    *,
    session_seq: int,
    low: int,
    lane: int,
    session: int,
    count: int,
    crc: int,
    length: int,
    partition: int = 0,
    schema: int = 0,
    flags: int = 0,
) -> bytes:
    """Encode the 64 bytes before a batch's payload of `length` bytes."""
    header = _BATCH.pack(_BATCH_WORD, length, session_seq, low, lane, session, count, crc, partition, schema, flags)
    return header + _CHECK.pack(_crc32c(header))


def parse_batch_header(buf: BytesLike) -> BatchHeader:
    """Decode the header in the first 64 bytes of `buf`, and check every field."""
    checked = bytes(buf[:_CHECK_AT])
    word, length, session_seq, low, lane, session, count, crc, partition, schema, flags = _BATCH.unpack(checked)
    if word != _BATCH_WORD:
        raise wrong_prefix(word)
    if _crc32c(checked) != _CHECK.unpack_from(buf, _CHECK_AT)[0]:
        raise _damaged_header("batch")
    if not 0 < length <= limits.FRAME_BYTES_MAX:
        raise _bad_length("batch", length, limits.FRAME_BYTES_MAX)
    if flags & REFERENCE and length != REFERENCE_BODY.itemsize:
        raise _bad_reference_length(length)
    if not 0 < count <= limits.RECORDS_PER_BATCH_MAX:
        raise BadFrame(f"a batch has {count} records", f"send 1 to {limits.RECORDS_PER_BATCH_MAX} records in a batch")
    if not low <= session_seq <= limits.SESSION_SEQUENCE_MAX:
        raise BadFrame(
            f"a batch has sequence {session_seq} and lowest unsettled sequence {low}",
            f"send `low` <= sequence <= {limits.SESSION_SEQUENCE_MAX}",
        )
    return BatchHeader._make((session_seq, low, lane, session, count, crc, length, partition, schema, flags))


def reference_body(reference: BatchReference) -> bytes:
    """Encode the body of a batch frame by reference."""
    body = _REFERENCE.pack(*reference)
    return body + _CHECK.pack(_crc32c(body))


def parse_reference(body: BytesLike) -> BatchReference:
    """Decode the body of a batch frame with the flag REFERENCE, and check every field."""
    if len(body) != REFERENCE_BODY.itemsize:
        raise _bad_reference_length(len(body))
    checked = bytes(body[: _REFERENCE.size])
    if _crc32c(checked) != _CHECK.unpack_from(body, _REFERENCE.size)[0]:
        raise ChecksumMismatch("the body of a batch by reference is damaged", "connect again, and send the batch again")
    reference = BatchReference._make(_REFERENCE.unpack(checked))
    if not 0 < reference.size <= limits.FRAME_BYTES_MAX:
        raise _bad_length("referenced batch", reference.size, limits.FRAME_BYTES_MAX)
    return reference


def _bad_reference_length(length: int) -> BadFrame:
    problem = f"the body of a batch by reference has {length} bytes"
    return BadFrame(problem, f"send a body of {REFERENCE_BODY.itemsize} bytes")


def _damaged_header(what: str) -> ChecksumMismatch:
    return ChecksumMismatch(f"the header of a {what} frame is damaged", "connect again; check the network if it recurs")


def _bad_length(what: str, length: int, most: int) -> ProtocolError:
    if length > most:
        return FrameTooLarge(f"a {what} frame of {length} bytes is above the limit of {most}", "send smaller frames")
    return BadFrame(f"the length of a {what} frame, {length} bytes, contradicts its header", "send consistent headers")


# --- acks and flow ----------------------------------------------------------------------------------------------------
def ack_frame(acks: Entries) -> bytes:
    """Encode a whole frame with an array of ACK, of at most ACKS_PER_FRAME_MAX."""
    if len(acks) > limits.ACKS_PER_FRAME_MAX:
        raise FrameTooLarge(f"one frame has {len(acks)} acks", f"send at most {limits.ACKS_PER_FRAME_MAX}")
    return _SHORT.pack(WORDS[FrameKind.ACK], len(acks) * ACK.itemsize, 0) + acks.tobytes()


def one_ack_frame(lane: int, session: int, sequence: int, index: int, seq: int, extra: int, outcome: int) -> bytes:
    """Encode a whole frame with one ack."""
    ack = PACKED_ACK.pack(lane, session, sequence, index, seq, extra, outcome)
    return _SHORT.pack(_ACK_WORD, len(ack), 0) + ack


def parse_acks(body: BytesLike) -> Entries:
    """Decode the body of an ack frame. The array is a view of `body`."""
    if len(body) % ACK.itemsize:
        raise BadFrame(f"an ACK frame has {len(body)} bytes", f"send a multiple of {ACK.itemsize} bytes")
    if len(body) == ACK.itemsize and body[_OUTCOME_AT] in _OUTCOMES:
        return np.frombuffer(body, dtype=ACK)
    acks = np.frombuffer(body, dtype=ACK) if len(body) else np.empty(0, dtype=ACK)
    known = _OUTCOME_KNOWN[acks["outcome"]]
    if not known.all():
        outcome = int(acks["outcome"][~known][0])
        problem = f"an ack has the unknown outcome {outcome}"
        raise BadFrame(problem, "use releases that share a protocol version on both sides")
    return acks


def credit_frame(total: int) -> bytes:
    """Encode a whole frame that grants `total` bytes, counted from the start of the connection."""
    return _SHORT.pack(WORDS[FrameKind.CREDIT], 0, total)


def full_frame(lane: int = -1, replica: int = -1, trouble: int = 0) -> bytes:
    """Encode a whole frame that reports: full for too long. Without a lane, the broker's own memory is full.

    With a lane, disks do not keep up with it (orders 0 and 1: the topic's number). `replica` is a replica with
    `trouble`, in bits of its health word. 64 bits: lane + 1 (32), replica + 1 (24), trouble (8).
    """
    why = (lane + 1) << 32 | (replica + 1 & 0xFF_FFFF) << 8 | trouble & 0xFF
    return _SHORT.pack(WORDS[FrameKind.FULL], 0, why)


def parse_full(why: int) -> tuple[int, int, int]:
    """Decode lane, replica and trouble of a FULL frame; -1, -1 and 0 if it has none."""
    return (why >> 32) - 1, (why >> 8 & 0xFF_FFFF) - 1, why & 0xFF


# --- fetched ----------------------------------------------------------------------------------------------------------
def fetched_header(
    *, request: int, next_index: int, tail_index: int, count: int, length: int, gap: Gap | None = None
) -> bytes:
    """Encode the 64 bytes before `count` entries and their padded payloads, together `length` bytes."""
    kind, start, stop = (0, 0, 0) if gap is None else (gap.kind, gap.start, gap.stop)
    header = _FETCHED.pack(_FETCHED_WORD, length, request, next_index, tail_index, count, kind, start, stop)
    return header + _CHECK.pack(_crc32c(header))


def parse_fetched_header(buf: BytesLike) -> FetchedHeader:
    """Decode the header in the first 64 bytes of `buf`, and check every field."""
    checked = bytes(buf[:_CHECK_AT])
    word, length, request, next_index, tail_index, count, gap_kind, start, stop = _FETCHED.unpack(checked)
    if word != _FETCHED_WORD:
        raise wrong_prefix(word)
    if _crc32c(checked) != _CHECK.unpack_from(buf, _CHECK_AT)[0]:
        raise _damaged_header("fetched")
    if count > limits.FETCH_ENTRIES_MAX:
        raise BadFrame(f"a fetched frame has {count} entries", f"send at most {limits.FETCH_ENTRIES_MAX}")
    most = limits.FETCH_BYTES_MAX + limits.FRAME_BYTES_MAX + count * _ENTRY_BYTES if count else 0
    if not count * _ENTRY_BYTES <= length <= most:
        raise _bad_length("fetched", length, most)
    gap = None
    if gap_kind:
        whole = start < stop if gap_kind in _SPANS else start == stop
        if not whole or gap_kind not in _FETCHED_GAPS:
            problem = f"a fetched frame has a gap of kind {gap_kind} over [{start}, {stop})"
            raise BadFrame(problem, "send a gap of positions, or END_OF_LANE")
        gap = Gap(GapKind(gap_kind), start, stop)
    return FetchedHeader(request, next_index, tail_index, count, length, gap)


def parse_fetched_body(header: FetchedHeader, body: memoryview) -> tuple[Entries, list[memoryview]]:
    """Decode entries and payloads of a fetched frame, as views of `body`. The reader checks the CRCs of payloads."""
    if not header.count:
        return np.empty(0, dtype=ORDER), []
    body = body.toreadonly()
    entries: Entries = np.frombuffer(body, dtype=ORDER, count=header.count)
    if not every(sealed(entries)):
        raise ChecksumMismatch("an order entry in a fetched frame is damaged", "fetch again, from another broker")
    sizes: npt.NDArray[np.int64] = entries["size"].astype(np.int64)
    if sizes.max() > limits.FRAME_BYTES_MAX or ((entries["kind"] == BATCH_KIND) & (sizes == 0)).any():
        problem = "the size of a payload in an order entry is out of range"
        raise BadFrame(problem, f"send payloads of 1 to {limits.FRAME_BYTES_MAX} bytes")
    padded = (sizes + (PAYLOAD_ALIGN - 1)) & -PAYLOAD_ALIGN
    first = header.count * _ENTRY_BYTES
    if first + int(padded.sum()) != header.length:
        raise BadFrame(
            f"a fetched frame has {header.length} bytes, and its entries need {first + int(padded.sum())}",
            "send a length that fits the entries",
        )
    starts = accumulate(padded.tolist(), initial=first)
    return entries, [body[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=False)]


# --- receiving --------------------------------------------------------------------------------------------------------
DIRECT_BYTES_MIN: Final = 32 * limits.KIB
"""Below this size, another system call costs more than the copy."""

_BATCH_KIND: Final = FrameKind.BATCH  # a global lookup is faster than an enum member, and every frame needs it
_PREFIX_BYTES: Final = PREFIX.size
_LONG_HEADER_BYTES: Final = max(HEADER_BYTES.values())
_LENGTH_MAX: Final[dict[FrameKind, int | None]] = {
    FrameKind.CONTROL: None,  # smaller before the peer's Hello: `control_bytes_max`
    FrameKind.BATCH: limits.FRAME_BYTES_MAX,
    FrameKind.ACK: limits.ACKS_PER_FRAME_MAX * ACK.itemsize,
    FrameKind.CREDIT: 0,
    FrameKind.FULL: 0,
    FrameKind.FETCHED: limits.FETCH_BYTES_MAX + limits.FRAME_BYTES_MAX + limits.FETCH_ENTRIES_MAX * ORDER.itemsize,
}


class ControlReceived(NamedTuple):
    """A control message; `request` is its number, or the number of its request."""

    request: int
    message: AnyMessage


class BatchReceived(NamedTuple):
    """A batch with its complete payload, in the memory from `admit`."""

    header: BatchHeader


class AcksReceived(NamedTuple):
    """An array of ACK."""

    acks: Entries


class CreditReceived(NamedTuple):
    """Bytes granted from the start of the connection."""

    total: int


class FullReceived(NamedTuple):
    """Full for too long: the broker's memory (no lane), or a lane with which disks do not keep up."""

    lane: int = -1
    replica: int = -1  # a replica in trouble
    trouble: int = 0  # bits of its health word


class FetchedReceived(NamedTuple):
    """The answer to a Fetch. Entries and payloads are views of one received body."""

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
    """The receiving half of a connection.

    Theory of operation. `get_buffer()` returns the memory for the next bytes. The driver lets the socket write there,
    and calls `received(n)`. Usually the memory is the scratch buffer, which all connections of an event loop share: one
    read brings many small frames, which are parsed in a loop, and their bodies are copied. If at least
    DIRECT_BYTES_MIN of a body are missing, it is the body's own memory, and no copy is made.

        between frames --header--> body --last byte--> event, between frames
                                     `-- admit returned None: the bytes are counted and dropped, without an event

    Memory for a body is allocated only after its header is complete and its length is checked. `admit`, which knows the
    log and the peer's credit, allocates for batches; the receiver allocates for other bodies. `admit` runs ahead of the
    events: one read may admit many batches before the first BatchReceived is returned (in the same order). So the
    caller queues the results of `admit`. Between two calls a connection has at most a part of a header (< 64 bytes) and
    one incomplete body, and no reference to the scratch buffer.

    An error is final. It drops the events of the same call, which were not handled, and every later call raises it
    again. The caller must close the connection, and release memory of admitted batches that were not returned.

    A control frame may have a much larger answer. With `full`, the receiver therefore stops before each control frame
    until all earlier events were handled: `go_on` returns the next ones. While `full()` is true it stays stopped, and
    keeps the rest of the read unparsed.
    """

    def __init__(
        self,
        *,
        allowed: frozenset[FrameKind],
        scratch: memoryview,
        admit: Admit | None = None,
        full: Callable[[], bool] | None = None,
        control_bytes_max: int,
    ) -> None:
        invariant(len(scratch) > _LONG_HEADER_BYTES, "the scratch buffer is larger than a header")
        invariant(admit is not None or FrameKind.BATCH not in allowed, "a receiver of batches has `admit`")
        self.control_bytes_max = control_bytes_max
        self._kinds = {WORDS[kind]: (kind, HEADER_BYTES[kind], _LENGTH_MAX[kind]) for kind in allowed}
        self._scratch = scratch
        self._admit, self._full = admit, full
        self._kept: bytes | memoryview = b""  # the start of a header; while stopped, all unparsed bytes
        self.stopped = False  # before a control frame, until `go_on`
        self._header: BatchHeader | FetchedHeader | _ShortHeader | None = None  # of the open body; None: drop the body
        self._body: memoryview | None = None  # memory of the open body; None: drop it
        self._missing = 0  # bytes of that body
        self._direct = False  # the last buffer was the body's own memory
        self._error: BaseException | None = None

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes, never empty. Call `received` before another connection uses it."""
        self._direct = self._body is not None and self._missing >= DIRECT_BYTES_MIN
        if self._direct and self._body is not None:
            return self._body[len(self._body) - self._missing :]
        if self.stopped:
            return self._scratch
        kept = len(self._kept)
        self._scratch[:kept] = self._kept
        return self._scratch[kept:]

    def received(self, n: int) -> list[Event]:
        """Parse the `n` bytes that were written to the last buffer. Return the completed events, in order."""
        if self.stopped:
            self._kept = b"".join((self._kept, self._scratch[:n]))
            return []
        return self._take(self._scratch, len(self._kept) + n)

    def go_on(self) -> list[Event]:
        """Continue to parse received bytes, after all earlier events were handled. Return the next events."""
        if not self.stopped:
            return []
        self.stopped = False
        return self._take(memoryview(self._kept), len(self._kept))

    def drop(self) -> None:
        """Drop unparsed bytes: the connection has ended."""
        self._kept, self.stopped = b"", False

    @property
    def waiting_bytes(self) -> int:
        """Number of received bytes that wait until `full` is false."""
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
        """Return a copy of the error: one object that is raised twice would accumulate tracebacks."""
        return type(error)(error.message, error.hint) if isinstance(error, EmbarcaderoError) else error

    def _scan(self, data: memoryview, size: int, events: list[Event]) -> None:
        """Parse the first `size` bytes of the scratch buffer, or of kept bytes."""
        kinds, at = self._kinds, 0
        if self._missing:
            at = self._fill(data, 0, size, events)
        while size - at >= _PREFIX_BYTES:
            word, length = PREFIX.unpack_from(data, at)
            known = kinds.get(word)
            if known is None:
                raise wrong_prefix(word)
            kind, header_bytes, most = known
            if most is None:
                if self._full is not None and (events or self._full()):
                    self.stopped = True
                    break
                most = self.control_bytes_max
            if length > most:
                problem = f"a {kind.name} frame of {length} bytes is above the limit of {most}"
                raise FrameTooLarge(problem, "send smaller frames")
            body_at = at + header_bytes
            if body_at > size:
                break
            self._open(kind, length, data[at:body_at])
            at = self._fill(data, body_at, size, events)
        rest = data[at:size]
        self._kept = rest if self.stopped and data is not self._scratch else bytes(rest)

    def _open(self, kind: FrameKind, length: int, header: memoryview) -> None:
        """Allocate memory for the body of the frame with this header."""
        if kind is _BATCH_KIND and self._admit is not None:
            batch = parse_batch_header(header)
            self._body = self._admit(batch)
            self._header = batch if self._body is not None else None
            invariant(self._body is None or len(self._body) == length, "admitted memory has the size of the payload")
        else:
            if kind is FrameKind.FETCHED:
                self._header = parse_fetched_header(header)
            elif kind is FrameKind.ACK and length % ACK.itemsize:
                raise BadFrame(f"an ACK frame has {length} bytes", f"send a multiple of {ACK.itemsize} bytes")
            else:
                self._header = _ShortHeader(kind, parse_request(header))
            self._body = np.empty(length, dtype=np.uint8).data  # not cleared first, unlike a bytearray
        self._missing = length

    def _fill(self, data: memoryview, at: int, size: int, events: list[Event]) -> int:
        """Copy the part of the body in `data`, from `at` on. Return the offset of the next frame."""
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
        """Convert a complete body to an event."""
        header, body = self._header, self._body
        self._header = self._body = None
        if isinstance(header, BatchHeader):
            events.append(BatchReceived(header))
        elif body is None or header is None:
            return  # the body was dropped
        elif isinstance(header, FetchedHeader):
            entries, payloads = parse_fetched_body(header, body)
            events.append(
                FetchedReceived(header.request, header.next_index, header.tail_index, header.gap, entries, payloads)
            )
        elif header.kind is FrameKind.CONTROL:
            events.append(ControlReceived(header.request, decode_control(body)))
        elif header.kind is FrameKind.ACK:
            events.append(AcksReceived(parse_acks(body)))
        elif header.kind is FrameKind.CREDIT:
            events.append(CreditReceived(header.request))
        else:
            events.append(FullReceived(*parse_full(header.request)))
