"""Frames from both sides, and every control message."""

from __future__ import annotations

from random import Random
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, seal
from embarcadero.limits import CONTROL_BYTES_MAX, FETCH_BYTES_MAX, FRAME_BYTES_MAX, HELLO_BYTES_MAX, MIB, SCRATCH_BYTES
from embarcadero.types import Gap, GapKind
from embarcadero.wire import codec
from embarcadero.wire.codec import (
    BATCH_HEADER,
    FETCHED_HEADER,
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    REFERENCE,
    REFERENCE_BODY,
    AcksReceived,
    BatchReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
)
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import MESSAGES, acks, batch_frame, fetched_frame, raw_payload, reference_frame
from embarcadero_proof.fuzz.target import Inputs, Target, agree, comparable
from embarcadero_proof.fuzz.tree import tree_mutation

FROM_CLIENTS: Final = frozenset({FrameKind.CONTROL, FrameKind.BATCH})
FROM_BROKERS: Final = frozenset(set(FrameKind) - {FrameKind.BATCH})
_ONE_BY_ONE_MAX: Final = 250
_PIECES_MAX: Final = 40
_CHECK_AT: Final = 60
_ADMITTED_BYTES_MAX: Final = 1 * MIB

Seen = tuple[list[Any], tuple[str, str] | None]


class _Peer:
    """A receiver of frames, with memory for batches."""

    def __init__(self, allowed: frozenset[FrameKind], control_bytes_max: int) -> None:
        self._admitted: list[Any] = []
        self.receiver = FrameReceiver(
            allowed=allowed, scratch=memoryview(bytearray(SCRATCH_BYTES)), admit=self._admit,
            control_bytes_max=control_bytes_max,
        )  # fmt: skip

    def _admit(self, header: codec.BatchHeader) -> memoryview | None:
        if header.length > _ADMITTED_BYTES_MAX:
            return None
        self._admitted.append(np.zeros(header.length, dtype=np.uint8).data)
        return memoryview(self._admitted[-1])

    def plain(self, event: Event) -> Any:
        """Return an event in a form that can be compared."""
        if isinstance(event, AcksReceived):
            return "acks", event.acks.tobytes()
        if isinstance(event, FetchedReceived):
            return "fetched", event[:4], event.entries.tobytes(), [bytes(payload) for payload in event.payloads]
        if isinstance(event, BatchReceived):
            body = bytes(self._admitted.pop(0))
            return event, body, _named(body) if event.header.flags & REFERENCE else None
        return repr(event)


def _named(body: bytes) -> tuple[Any, ...]:
    """Return the reference in the body of a batch, or the reason why it can't be parsed."""
    try:
        reference = codec.parse_reference(body)
    except EmbarcaderoError as error:
        return comparable(error)
    again = codec.parse_reference(codec.reference_body(reference))
    agree(again == reference, "a reference changes when it is encoded again")
    agree(0 < reference.size <= FRAME_BYTES_MAX, "a reference to more bytes than a frame may have")
    return reference


def received(data: bytes, sizes: list[int], allowed: frozenset[FrameKind], control_bytes_max: int) -> Seen:
    """Return a receiver's events for bytes that arrive in reads of these sizes, then in reads as large as possible."""
    peer = _Peer(allowed, control_bytes_max)
    events: list[Any] = []
    at, number = 0, 0
    while at < len(data):
        buffer = peer.receiver.get_buffer()
        agree(len(buffer) > 0, "a receiver asks for no bytes")
        size = min(len(buffer), sizes[number] if number < len(sizes) else len(data), len(data) - at)
        buffer[:size] = data[at : at + size]
        at, number = at + size, number + 1
        try:
            events += map(peer.plain, peer.receiver.received(size))
        except EmbarcaderoError as error:
            return events, comparable(error)
    return events, None


def _run(data: bytes, allowed: frozenset[FrameKind], control_bytes_max: int) -> str:
    """Check that bytes give the same events or error in any pieces; a failing read drops its earlier events."""
    rng = Random(crc32(data))
    whole = received(data, [], allowed, control_bytes_max)
    ways = [[rng.choice((1, 3, 16, 17, 64, 200, 5_000)) for _ in range(_PIECES_MAX)]]
    if len(data) <= _ONE_BY_ONE_MAX:
        ways.append([1] * len(data))
    for sizes in ways:
        events, error = received(data, sizes, allowed, control_bytes_max)
        agree(error == whole[1], f"in pieces: {error}; together: {whole[1]}")
        agree(events == whole[0] if error is None else events[: len(whole[0])] == whole[0], "other events in pieces")
    return f"{min(len(whole[0]), 3)} events, then {' '.join(whole[1]) if whole[1] else 'nothing'}"


def mend_frames(data: bytes, rng: Random) -> bytes:
    """Make most frames whole again: magic, version, length, checks of headers and of entries."""
    out = bytearray()
    at = 0
    while len(data) - at >= 16:
        frame = bytearray(data[at:])
        frame[0:2] = MAGIC.to_bytes(2, "little")
        if rng.random() < 0.95:
            frame[2] = PROTOCOL_VERSION
        kind = frame[3] if frame[3] in HEADER_BYTES else rng.choice(list(HEADER_BYTES))
        frame[3] = kind
        header = HEADER_BYTES[FrameKind(kind)]
        if len(frame) < header:
            frame += bytes(header - len(frame))
        length = int.from_bytes(frame[4:8], "little")
        if length > len(frame) - header and rng.random() < 0.9:
            length = len(frame) - header
            frame[4:8] = length.to_bytes(4, "little")
        frame = frame[: header + length]
        if header == _CHECK_AT + 4 and rng.random() < 0.95:
            _mend_long(frame, FrameKind(kind), rng)
        out += frame
        at += len(frame)
    return bytes(out + data[at:])


def _mend_long(frame: bytearray, kind: FrameKind, rng: Random) -> None:
    if kind is FrameKind.FETCHED:
        row = np.frombuffer(frame, dtype=FETCHED_HEADER, count=1)
        space = (len(frame) - 64) // 64
        if row["count"][0] > space and rng.random() < 0.8:
            frame[32:36] = space.to_bytes(4, "little")
            row = np.frombuffer(frame, dtype=FETCHED_HEADER, count=1)
        count = min(int(row["count"][0]), space)
        if count and rng.random() < 0.9:
            entries = np.frombuffer(bytes(frame[64 : 64 + 64 * count]), dtype=ORDER).copy()
            frame[64 : 64 + 64 * count] = seal(entries).tobytes()
    else:
        row = np.frombuffer(frame, dtype=BATCH_HEADER, count=1)
        if row["low"][0] > row["session_seq"][0] and rng.random() < 0.8:
            frame[16:24] = frame[8:16]
        if len(frame) == 64 + REFERENCE_BODY.itemsize and row["flags"][0] & REFERENCE and rng.random() < 0.95:
            frame[92:96] = codec.payload_crc(bytes(frame[64:92])).to_bytes(4, "little")
    frame[_CHECK_AT : _CHECK_AT + 4] = codec.payload_crc(bytes(frame[:_CHECK_AT])).to_bytes(4, "little")


# --- corpora ----------------------------------------------------------------------------------------------------------
def _from_clients() -> Inputs:
    control = [codec.control_frame(message, number) for number, message in enumerate(MESSAGES)]
    batches = [batch_frame(raw_payload(count)) for count in (1, 3, 40)]
    large, named = batch_frame(bytes(100_000)), reference_frame(raw_payload(3))
    return [*control, *batches, named, named[:80], named + batches[0] + named, b"".join(batches),
            control[0] + batches[0] + control[1], b"".join(control), large[:200], large[:70_000]]  # fmt: skip


def _from_brokers() -> Inputs:
    control = [codec.control_frame(message, number) for number, message in enumerate(MESSAGES)]
    gap = Gap(GapKind.TRIMMED, 10, 50)
    others = [
        codec.ack_frame(acks(1)), codec.ack_frame(acks(5)), codec.credit_frame(1 << 24), codec.full_frame(),
        fetched_frame([raw_payload(2), b"", raw_payload(1)]), fetched_frame([], gap=gap),
        fetched_frame([bytes(40_000)]),
    ]  # fmt: skip
    return [*control, *others, b"".join(others[:6]), others[6][:300]]


def _bodies() -> Inputs:
    return [codec.control_frame(message)[16:] for message in MESSAGES]


def _control(data: bytes) -> str:
    """Check that an accepted message is unchanged after it is encoded again."""
    message = codec.decode_control(data)
    frame = codec.control_frame(message)
    agree(codec.control_frame(codec.decode_control(frame[16:])) == frame, "a message changes when it is encoded again")
    return type(message).__name__


def _frames(data: bytes, rng: Random, pool: Inputs) -> bytes:
    """Mutate frames, or put several one after another."""
    if rng.random() < 0.15:
        return data + rng.choice(pool)
    return mutated(data, rng, pool)


_FETCHED_BYTES = FETCH_BYTES_MAX + FRAME_BYTES_MAX + MIB
WIRE: Final = (
    Target("frames-from-strangers", "a broker's receiver before hello: nothing large is buffered", _from_clients,
           lambda data: _run(data, FROM_CLIENTS, HELLO_BYTES_MAX), _frames, mend_frames),
    Target("frames-from-clients", "a broker's receiver; whole, in pieces, byte by byte", _from_clients,
           lambda data: _run(data, FROM_CLIENTS, CONTROL_BYTES_MAX), _frames, mend_frames),
    Target("frames-from-brokers", "a client's receiver; whole, in pieces, byte by byte", _from_brokers,
           lambda data: _run(data, FROM_BROKERS, CONTROL_BYTES_MAX), _frames, mend_frames, memory_bytes=_FETCHED_BYTES),
    Target("control-messages", "every control message, decoded and encoded again", _bodies, _control,
           tree_mutation(msgspec.msgpack)),
)  # fmt: skip
