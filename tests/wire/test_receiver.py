"""The receiver: same events however the bytes arrive, zero-copy for large bodies, and a bound on memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero import limits
from embarcadero.errors import (
    BadFrame,
    BadMagic,
    BadVersion,
    ChecksumMismatch,
    Corrupt,
    FrameTooLarge,
    InvariantBroken,
    OverCredit,
    ProtocolError,
)
from embarcadero.types import Outcome
from embarcadero.wire import codec, messages
from embarcadero.wire.codec import (
    BatchReceived,
    ControlReceived,
    CreditReceived,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    FullReceived,
)
from tests.wire.samples import EVERY_KIND, Peer, acks, batch_frame, fetched_frame, vectors

BROKER_SIDE = frozenset({FrameKind.CONTROL, FrameKind.BATCH})
FAIR = (ProtocolError, Corrupt)

some_acks = st.integers(0, 5).map(
    lambda count: codec.ack_frame(acks(*[(1, 2, i, i, i, 0, Outcome.ORDERED) for i in range(count)]))
)
frames = st.one_of(
    st.binary(min_size=1, max_size=200).map(batch_frame),
    st.text(max_size=50).map(lambda text: codec.control_frame(messages.Hello(versions=[1], client=text), 3)),
    st.just(codec.control_frame(messages.Ping(), 4)),
    some_acks,
    st.integers(0, 2**64 - 1).map(codec.credit_frame),
    st.just(codec.full_frame()),
    st.lists(st.binary(max_size=50), max_size=4).map(fetched_frame),
)
streams = st.lists(frames, min_size=1, max_size=8).map(b"".join)
splits = st.lists(st.integers(1, 150), max_size=60)
direct_mins = st.sampled_from([1, 40, 1 << 20])
scratch_sizes = st.sampled_from([65, 100, 4096])


# --- the same events however bytes arrive -----------------------------------------------------------------------------
@given(streams, splits, direct_mins, scratch_sizes)
@settings(deadline=None, max_examples=150)
def test_same_events_however_bytes_arrive(data: bytes, reads: list[int], direct_min: int, scratch: int) -> None:
    """Whole, byte at a time, or split anywhere: the events are the same, and none refers to the scratch."""
    whole = Peer(scratch_bytes=len(data) + 65).feed(data)
    assert whole.error is None
    assert Peer(scratch_bytes=scratch).feed(data, [1] * len(data), direct_min).seen == whole.seen
    assert Peer(scratch_bytes=scratch).feed(data, reads, direct_min).seen == whole.seen


@given(streams, st.data(), splits, direct_mins)
@settings(deadline=None, max_examples=150)
def test_same_error_however_bytes_arrive(data: bytes, choose: Any, reads: list[int], direct_min: int) -> None:
    """Damage anywhere gives the same fair error, or the same events, for every way in which the bytes arrive."""
    damaged = bytearray(data)
    damaged[choose.draw(st.integers(0, len(data) - 1))] ^= 1 << choose.draw(st.integers(0, 7))
    slow = Peer().feed(bytes(damaged), [1] * len(data), direct_min)
    whole = Peer(scratch_bytes=len(data) + 65).feed(bytes(damaged))
    for other in (whole, Peer().feed(bytes(damaged), reads, direct_min)):
        assert repr(other.error) == repr(slow.error)
        assert slow.seen[: len(other.seen)] == other.seen
    assert slow.error is None or isinstance(slow.error, FAIR)


@given(st.binary(max_size=300), splits)
@settings(deadline=None, max_examples=150)
def test_arbitrary_bytes_are_refused_fairly(noise: bytes, reads: list[int]) -> None:
    """Random bytes, also after a valid prefix, end in a typed error or wait for more; nothing else happens."""
    for start in (b"", b"EM\x01\x01\x20\x00\x00\x00", b"EM\x01\x06\x40\x00\x00\x00", b"EM\x01\x03\x30\x00\x00\x00"):
        peer = Peer().feed(start + noise, reads)
        assert peer.error is None or isinstance(peer.error, FAIR)


def test_each_vector_gives_its_event() -> None:
    """One frame of each kind is one event of its kind, in order."""
    peer = Peer().feed(b"".join(vectors().values()))
    kinds = [type(event[0] if type(event) is tuple else event).__name__ for event in peer.events]
    assert kinds == [
        "ControlReceived", "ControlReceived", "ControlReceived", "BatchReceived", "BatchReceived", "AcksReceived",
        "CreditReceived", "FullReceived", "FetchedReceived", "FetchedReceived",
    ]  # fmt: skip
    assert peer.events[1] == ControlReceived(2, messages.Ping())
    assert peer.events[6:8] == [CreditReceived(16 << 20), FullReceived()]
    fetched = peer.events[8]
    assert isinstance(fetched, FetchedReceived)
    assert [bytes(payload) for payload in fetched.payloads] == [b"hello", b""]


# --- where bytes land -------------------------------------------------------------------------------------------------
def test_many_small_batches_of_one_read() -> None:
    """A bulk read gives one event per batch, each payload in the memory admitted for it."""
    payloads = [bytes([i]) * (i + 1) for i in range(200)]
    peer = Peer(scratch_bytes=limits.SCRATCH_BYTES)
    peer.read(b"".join(batch_frame(payload, session_seq=10 + i) for i, payload in enumerate(payloads)))
    assert [stored for _, stored in peer.events] == payloads
    assert [event.header.session_seq for event, _ in peer.events] == list(range(10, 210))


def test_a_large_payload_is_received_in_place() -> None:
    """Once the header is known, the buffer is the admitted memory itself, for exactly the missing bytes."""
    payload = np.arange(300_000, dtype=np.uint8).tobytes()
    peer = Peer()
    frame = batch_frame(payload)
    peer.read(frame[:1064])
    buffer = peer.receiver.get_buffer()
    assert buffer.obj is peer.admitted[0]
    assert len(buffer) == len(payload) - 1000
    peer.feed(frame[1064:] + codec.full_frame())
    assert [stored for _, stored in peer.events[:1]] == [payload]
    assert peer.events[1:] == [FullReceived()]


def test_the_rest_of_a_small_payload_goes_through_the_scratch() -> None:
    """A small rest shares its read with the next frames."""
    peer = Peer()
    frame = batch_frame(b"x" * 1000)
    peer.read(frame[:500])
    assert peer.receiver.get_buffer().obj is peer.scratch
    peer.read(frame[500:] + codec.full_frame())
    assert len(peer.events) == 2


def test_large_fetched_payloads_share_one_body() -> None:
    """A fetched frame is received in place; its payloads are views of one body and keep it alive by themselves."""
    payloads = [b"a" * 100_001, b"b" * 70_000, b"c"]
    peer = Peer().feed(fetched_frame(payloads), [1500] * 3)
    event = peer.events[0]
    assert isinstance(event, FetchedReceived)
    views = event.payloads
    assert len({id(view.obj) for view in views}) == 1
    peer.events.clear()
    assert [bytes(view) for view in views] == payloads


def test_a_refused_payload_is_drained() -> None:
    """When `admit` returns None, the payload leaves no event, whatever its size, and the next frame is understood."""
    for size in (1, 1000, 200_000):
        peer = Peer(admit=lambda header: None).feed(batch_frame(b"EM" * size) + codec.credit_frame(5), [70, 1, 500])
        assert peer.events == [CreditReceived(5)]


def test_an_error_of_admit_is_final() -> None:
    """An error that `admit` raises is raised by received(), and again on the next call."""

    def refuse(header: codec.BatchHeader) -> None:
        raise OverCredit(f"{header.length} bytes too many", "wait for credit")

    peer = Peer(admit=refuse).feed(batch_frame(b"x"))
    assert isinstance(peer.error, OverCredit)
    with pytest.raises(OverCredit, match="1 bytes too many"):
        peer.read(b"more")


def test_admitted_memory_must_fit() -> None:
    """Memory of another size than requested is a bug, found before a byte is written."""
    peer = Peer(admit=lambda header: memoryview(bytearray(header.length + 1)))
    with pytest.raises(InvariantBroken):
        peer.read(batch_frame(b"x"))


def test_nothing_is_admitted_before_the_header_is_whole() -> None:
    """63 bytes of a batch header allocate no memory."""
    peer = Peer().feed(batch_frame(b"x")[:63])
    assert peer.admitted == []
    peer.feed(batch_frame(b"x")[63:])
    assert [type(event) for event, _ in peer.events] == [BatchReceived]


# --- refused frames
# -----------------------------------------------------------------------------------------------------
def short(kind: int, length: int) -> bytes:
    return b"EM\x01" + bytes([kind]) + length.to_bytes(4, "little") + bytes(8)


def damaged(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]


def control(body: bytes) -> bytes:
    return short(FrameKind.CONTROL, len(body)) + body


FACTS = b"\x82\xa4type\xa8StatusIs\xa5facts\x81\xa1a"

MALFORMED = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", BadMagic),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", BadMagic),
    "version": (b"EM\x02" + bytes(13), BadVersion),
    "kind": (short(7, 0), BadFrame),
    "kind zero": (short(0, 0), BadFrame),
    "credit with a body": (short(FrameKind.CREDIT, 1), FrameTooLarge),
    "full with a body": (short(FrameKind.FULL, 1), FrameTooLarge),
    "broken acks": (short(FrameKind.ACK, 47), BadFrame),
    "too many acks": (short(FrameKind.ACK, 48 * (limits.ACKS_PER_FRAME_MAX + 1)), FrameTooLarge),
    "unknown outcome": (short(FrameKind.ACK, 48) + bytes(48), BadFrame),
    "batch header damaged": (damaged(batch_frame(b"x"), 20), ChecksumMismatch),
    "batch check damaged": (damaged(batch_frame(b"x"), 63), ChecksumMismatch),
    "batch without bytes": (batch_frame(b"x", length=0), BadFrame),
    "batch without records": (batch_frame(b"x", count=0), BadFrame),
    "batch above its low mark": (batch_frame(b"x", low=2**40), BadFrame),
    "batch too large": (batch_frame(b"x", length=limits.FRAME_BYTES_MAX + 1), FrameTooLarge),
    "fetched header damaged": (damaged(fetched_frame([b"x"]), 20), ChecksumMismatch),
    "fetched entry damaged": (damaged(fetched_frame([b"x"]), 80), ChecksumMismatch),
    "fetched count": (fetched_frame([b"x"], count=2), BadFrame),
    "no message": (control(b""), BadFrame),
    "no msgpack": (control(b"\xc1"), BadFrame),
    "not a map": (control(b"\x93\x01\x02\x03"), BadFrame),
    "unknown message": (control(b"\x81\xa4type\xa4Nope"), BadFrame),
    "missing field": (control(b"\x81\xa4type\xa7GetTail"), BadFrame),
    "wrong type": (control(b"\x82\xa4type\xa7GetTail\xa4lane\xa1x"), BadFrame),
    "number out of range": (control(b"\x82\xa4type\xa7GetTail\xa4lane\xff"), BadFrame),
    "truncated msgpack": (control(b"\x82\xa4type\xa7GetTail\xa4lane"), BadFrame),
    "trailing bytes": (control(b"\x81\xa4type\xa4Pingxx"), BadFrame),
    "wrong utf-8": (control(FACTS + b"\xa2\xff\xfe"), BadFrame),
    "deep nesting": (control(FACTS + b"\x91" * 50_000), BadFrame),
    "array bomb": (control(FACTS + b"\xdd\xff\xff\xff\xff"), BadFrame),
    "map bomb": (control(FACTS + b"\xdf\xff\xff\xff\xff"), BadFrame),
    "string bomb": (control(FACTS + b"\xdb\xff\xff\xff\xff"), BadFrame),
    "map as key": (control(FACTS + b"\x81\x81\x01\x01\x01"), BadFrame),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_frames_are_refused_permanently(name: str) -> None:
    """Each malformed frame raises its error, however split; the receiver stays dead and raises it again."""
    frame, error = MALFORMED[name]
    for reads in ([], [1] * 200, [7, 60, 3]):
        peer = Peer(scratch_bytes=100_000).feed(frame, reads)
        assert type(peer.error) is error, peer.error
        assert peer.error.hint
        seen = len(peer.events)
        with pytest.raises(error, match="^" + str(peer.error)[:20].replace("(", r"\(")):
            peer.read(codec.full_frame())
        assert len(peer.events) == seen


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_kind_that_is_not_allowed(kind: FrameKind) -> None:
    """A peer sends only the kinds of its side."""
    peer = Peer(allowed=EVERY_KIND - {kind}).feed(short(kind, 0))
    assert isinstance(peer.error, BadFrame)
    assert kind.name in str(peer.error)


@pytest.mark.parametrize("name", list(vectors()))
def test_a_truncated_frame_waits(name: str) -> None:
    """A frame without its last byte is no event and no error."""
    peer = Peer().feed(vectors()[name][:-1])
    assert peer.events == []
    assert peer.error is None


def test_receiving_batches_needs_an_admit() -> None:
    """A receiver that allows batches without an `admit` is a bug of its maker."""
    with pytest.raises(InvariantBroken):
        FrameReceiver(allowed=BROKER_SIDE, scratch=memoryview(bytearray(100)), control_bytes_max=100)


# --- memory -----------------------------------------------------------------------------------------------------------
def peak_of(peer: Peer, data: bytes) -> int:
    """Most bytes allocated while `data` is fed."""
    tracemalloc.start()
    try:
        peer.feed(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_claim_of_4_gib_allocates_nothing(kind: FrameKind) -> None:
    """A first header that claims 4 GiB is refused before memory is allocated."""
    peer = Peer(control_bytes_max=limits.HELLO_BYTES_MAX)
    assert peak_of(peer, short(kind, 2**32 - 1)) < 16 * limits.KIB
    assert isinstance(peer.error, FrameTooLarge)


def test_a_stranger_holds_at_most_4_kib() -> None:
    """Before its hello is done, the largest frame allowed makes us hold 4 KiB; one byte more is refused."""
    frame = short(FrameKind.CONTROL, limits.HELLO_BYTES_MAX)
    peer = Peer(allowed=BROKER_SIDE, control_bytes_max=limits.HELLO_BYTES_MAX)
    assert limits.HELLO_BYTES_MAX <= peak_of(peer, frame + b"\x80") < 2 * limits.HELLO_BYTES_MAX + 16 * limits.KIB
    assert peer.error is None
    peer = Peer(allowed=BROKER_SIDE, control_bytes_max=limits.HELLO_BYTES_MAX)
    assert isinstance(peer.feed(short(FrameKind.CONTROL, limits.HELLO_BYTES_MAX + 1)).error, FrameTooLarge)


def test_the_limit_of_control_messages_can_be_raised() -> None:
    """After the hello the same connection may send large control messages."""
    peer = Peer(control_bytes_max=limits.HELLO_BYTES_MAX)
    peer.receiver.control_bytes_max = limits.CONTROL_BYTES_MAX
    message = messages.StatusIs(facts={"x": "y" * 200_000})
    peer.feed(codec.control_frame(message, 4))
    assert peer.events == [ControlReceived(4, message)]


@pytest.mark.parametrize("claims", [b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff" * 900, b"\x9f" * 3900])
def test_msgpack_claims_are_not_trusted(claims: bytes) -> None:
    """Arrays that claim millions of items, or are nested by the hundred, cost memory by their bytes alone."""
    peer = Peer(control_bytes_max=limits.HELLO_BYTES_MAX, scratch_bytes=8192)
    assert peak_of(peer, control(FACTS + claims)) < 2 * limits.MIB
    assert isinstance(peer.error, BadFrame)


def test_an_idle_connection_holds_no_buffer() -> None:
    """Between frames nothing but the receiver itself is held: bodies are gone once their events are."""
    peer = Peer(control_bytes_max=limits.CONTROL_BYTES_MAX, scratch_bytes=limits.SCRATCH_BYTES)
    frame = codec.control_frame(messages.StatusIs(facts={"x": "y" * 200_000}))
    tracemalloc.start()
    try:
        peer.feed(frame + frame[:10])
        peer.events.clear()
        assert tracemalloc.get_traced_memory()[0] < 16 * limits.KIB
    finally:
        tracemalloc.stop()


# --- answers that wait ------------------------------------------------------------------------------------------------
@given(streams, splits, st.lists(st.booleans(), max_size=40))
@settings(deadline=None, max_examples=150)
def test_a_receiver_that_stops_gives_the_same_events_one_control_frame_at_a_time(
    data: bytes, reads: list[int], full: list[bool]
) -> None:
    """Bytes that come meanwhile wait, too; nothing is lost, and order is kept."""
    whole = Peer(scratch_bytes=len(data) + 65).feed(data)
    answers = iter(full)
    peer = Peer(scratch_bytes=100, full=lambda: next(answers, False))
    at, sizes = 0, iter(reads)
    while at < len(data):
        at += peer.read(data[at : at + next(sizes, len(data))])
        peer.go_on()
    while peer.receiver.stopped:
        before = len(peer.events)
        peer.go_on()
        assert sum(isinstance(event, ControlReceived) for event in peer.events[before:]) <= 1
    assert peer.seen == whole.seen
    assert peer.receiver.waiting_bytes == 0


def test_requests_behind_a_full_output_stay_encoded() -> None:
    """No event and no memory of their bodies: their bytes, until there is space."""
    ping, full = codec.control_frame(messages.Ping(), 4), True
    peer = Peer(full=lambda: full)
    peer.feed(bytes(ping) * 10 + batch_frame(b"behind"))
    assert peer.events == []
    assert peer.receiver.waiting_bytes == 10 * len(ping) + len(batch_frame(b"behind"))
    assert not peer.admitted
    full = False
    for _ in range(11):
        peer.go_on()
    assert [type(event[0] if type(event) is tuple else event).__name__ for event in peer.events] == [
        *["ControlReceived"] * 10, "BatchReceived",
    ]  # fmt: skip
    assert not peer.receiver.stopped
