"""Encoding and decoding of single frames."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero import limits
from embarcadero.errors import BadFrame, BadMagic, BadVersion, ChecksumMismatch, FrameTooLarge
from embarcadero.fabric.layout import seal
from embarcadero.types import EntryKind, Gap, GapKind, Outcome, Topic
from embarcadero.wire import codec, messages
from embarcadero.wire.codec import (
    ACK,
    BATCH_HEADER,
    FETCHED_HEADER,
    NO_ACK,
    REFERENCE,
    REFERENCE_BODY,
    WANT_DURABLE,
    FrameKind,
)
from tests.wire.samples import acks, batch_frame, entries_for, fetched_frame

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))


@st.composite
def batch_headers(draw: Any) -> codec.BatchHeader:
    """Headers with every field anywhere in its range."""
    low, seq = sorted(draw(st.tuples(*[st.integers(0, limits.SESSION_SEQUENCE_MAX)] * 2)))
    count = draw(st.integers(1, limits.RECORDS_PER_BATCH_MAX))
    flags = draw(U8)
    length = REFERENCE_BODY.itemsize if flags & REFERENCE else draw(st.integers(1, limits.FRAME_BYTES_MAX))
    lane, session, crc = draw(st.tuples(U32, U32, U32))
    return codec.BatchHeader(seq, low, lane, session, count, crc, length, draw(U16), draw(U16), flags)


@given(batch_headers())
@settings(deadline=None, max_examples=200)
def test_batch_header_round_trip(header: codec.BatchHeader) -> None:
    """A batch header survives the wire, and its bytes are those of the table in frames.py."""
    encoded = codec.batch_header(**header._asdict())
    assert codec.parse_batch_header(encoded) == header
    assert codec.parse_batch_header(memoryview(bytearray(encoded + b"more"))) == header
    row = np.frombuffer(encoded, dtype=BATCH_HEADER)[0]
    assert {name: int(row[name]) for name in header._fields} == header._asdict()


@given(st.integers(0, 64 * 8 - 1))
@settings(deadline=None, max_examples=200)
def test_batch_header_shows_every_flipped_bit(bit: int) -> None:
    """No single flipped bit of a batch header goes unnoticed."""
    header = bytearray(batch_frame(b"x")[:64])
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises((BadMagic, BadVersion, BadFrame, ChecksumMismatch)):
        codec.parse_batch_header(header)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"length": 0}, BadFrame),
        ({"length": limits.FRAME_BYTES_MAX + 1}, FrameTooLarge),
        ({"count": 0}, BadFrame),
        ({"count": limits.RECORDS_PER_BATCH_MAX + 1}, BadFrame),
        ({"low": 6}, BadFrame),
        ({"flags": REFERENCE, "length": 31}, BadFrame),
        ({"flags": REFERENCE, "length": 33}, BadFrame),
        ({"session_seq": limits.SESSION_SEQUENCE_MAX + 1}, BadFrame),
    ],
)
def test_batch_header_with_a_field_out_of_range(fields: dict[str, int], error: type[Exception]) -> None:
    """Each field of a batch header has its range, even under a fitting checksum."""
    with pytest.raises(error):
        codec.parse_batch_header(batch_frame(b"x", **fields))


@given(U32, st.integers(1, limits.FRAME_BYTES_MAX), U64, U64)
@settings(deadline=None, max_examples=100)
def test_reference_round_trip(lane: int, size: int, index: int, topic_id: int) -> None:
    """A reference survives the wire, and its bytes are those of the table in frames.py."""
    reference = codec.BatchReference(lane, size, index, topic_id)
    body = codec.reference_body(reference)
    assert codec.parse_reference(memoryview(bytearray(body))) == reference
    row = np.frombuffer(body, dtype=REFERENCE_BODY)[0]
    assert {name: int(row[name]) for name in reference._fields} == reference._asdict()


@pytest.mark.parametrize("bit", range(0, 32 * 8, 5))
def test_reference_shows_a_flipped_bit(bit: int) -> None:
    """No flipped bit of a reference, its reserved bytes included, goes unnoticed."""
    body = bytearray(codec.reference_body(codec.BatchReference(4096, 100, 7, 1 << 40)))
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChecksumMismatch):
        codec.parse_reference(body)


@pytest.mark.parametrize(("size", "error"), [(0, BadFrame), (limits.FRAME_BYTES_MAX + 1, FrameTooLarge)])
def test_reference_of_a_size_out_of_range(size: int, error: type[Exception]) -> None:
    """The size of a referenced payload has the range of a payload, even under a fitting checksum."""
    with pytest.raises(error):
        codec.parse_reference(codec.reference_body(codec.BatchReference(4096, size, 7, 1)))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_reference_of_another_length(length: int) -> None:
    """A body of another length is refused before its fields are read."""
    with pytest.raises(BadFrame):
        codec.parse_reference(bytes(length))


@pytest.mark.parametrize(
    ("start", "error", "says"),
    [
        (b"GET ", BadMagic, "HTTP"),
        (b"\x16\x03\x01\x02", BadMagic, "TLS"),
        (b"\x00\x00\x01\x02", BadMagic, "HTTP or TLS"),
        (b"EM\x02\x01", BadVersion, "version 2, and this side uses version 1"),
        (b"EM\x01\x02", BadFrame, "BATCH frame is not allowed"),
        (b"EM\x01\x63", BadFrame, "kind 99"),
    ],
)
def test_wrong_prefix_names_the_mistake(start: bytes, error: type[Exception], says: str) -> None:
    """The first four bytes of another protocol identify the mistake."""
    found = codec.wrong_prefix(int.from_bytes(start, "little"))
    assert type(found) is error
    assert says in str(found)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_payload_crc_of_any_buffer(data: bytes) -> None:
    """The CRC is that of the bytes, whatever kind of buffer holds them."""
    expected = codec.payload_crc(data)
    writable = np.frombuffer(bytearray(data), dtype=np.uint8)
    assert codec.payload_crc(bytearray(data)) == expected
    assert codec.payload_crc(memoryview(bytearray(data))) == expected
    assert codec.payload_crc(memoryview(data)) == expected
    assert codec.payload_crc(writable) == expected


def test_payload_crc_is_crc32c() -> None:
    """The checksum is CRC-32C (Castagnoli), by its published check value."""
    assert codec.payload_crc(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    "message",
    [
        messages.Hello(versions=[1, 2], client="test"),
        messages.OpenSession(topic="t", name="n", resume=7),
        messages.Fetch(lane=3, by="seq", start=2**63 - 1, max_bytes=5, partitions=[1, 2]),
        messages.Fetch(lane=3, max_bytes=5, read="ordered"),
        messages.TailIs(lane=3, index=9, seq=90, start_index=1, start_seq=10, durable_index=7, durable_seq=70),
        messages.Opened(
            lane=3, session=4, index=5, expected=6, low=0, lost_from=70, lost_to=90, lost_before=[(5, 8), (20, 60)]
        ),
        messages.StatusIs(facts={"a": [1, {"b": None}], "c": 1.5}),
        messages.TopicIs(topic=Topic(name="t", lane=1)),
        messages.Ping(),
    ],
)
def test_control_round_trip(message: messages.Message) -> None:
    """A control message survives the wire with its request number."""
    frame = codec.control_frame(message, request=2**64 - 1)
    assert codec.decode_control(frame[16:]) == message
    assert codec.parse_request(frame) == 2**64 - 1
    assert int.from_bytes(frame[4:8], "little") == len(frame) - 16


def test_unknown_fields_are_ignored() -> None:
    """A later release may add fields to a message."""
    assert codec.decode_control(b"\x82\xa4type\xa4Ping\xa3new\x01") == messages.Ping()


def test_a_list_of_all_topics_fits_a_control_message() -> None:
    """The limits agree: the maximum number of topics, with names of the maximum length, fits one answer."""
    topics = [
        Topic(
            name=f"{n:x>{limits.TOPIC_NAME_CHARS_MAX}}", lane=limits.LANES_MAX, partitions=limits.PARTITIONS_MAX,
            order=5, replicas=9, durable_on=9, gap_timeout_ms=2**31, session_ttl_s=2**31,
        )
        for n in range(limits.TOPICS_MAX)
    ]  # fmt: skip
    assert codec.decode_control(codec.control_frame(messages.TopicsAre(topics=topics))[16:])


def test_a_control_message_too_large_is_not_sent() -> None:
    """The sender detects a message that the peer would refuse."""
    with pytest.raises(FrameTooLarge):
        codec.control_frame(messages.StatusIs(facts={"x": "y" * limits.CONTROL_BYTES_MAX}))


@given(st.lists(st.tuples(U32, U32, U64, U64, U64, U64, st.sampled_from(list(Outcome))), max_size=20))
@settings(deadline=None, max_examples=100)
def test_ack_round_trip(rows: list[Any]) -> None:
    """Acks survive the wire as an array."""
    sent = acks(*rows)
    frame = codec.ack_frame(sent)
    found = codec.parse_acks(frame[16:])
    assert found.dtype == ACK
    assert found.tolist() == sent.tolist()


def test_too_many_acks_are_not_sent() -> None:
    """An ack frame has a limit at its sender too."""
    with pytest.raises(FrameTooLarge):
        codec.ack_frame(np.zeros(limits.ACKS_PER_FRAME_MAX + 1, dtype=ACK))


@pytest.mark.parametrize("outcome", [0, 7, 255])
def test_ack_with_an_unknown_outcome(outcome: int) -> None:
    """An outcome without a meaning here is no ack."""
    wrong = acks((1, 1, 1, 1, 1, 0, Outcome.ORDERED), (1, 1, 2, 2, 2, 0, Outcome.ORDERED))
    wrong["outcome"][1] = outcome
    with pytest.raises(BadFrame, match=f"outcome {outcome}"):
        codec.parse_acks(wrong.tobytes())


gaps = st.none() | st.builds(
    lambda kind, start, size: Gap(kind, start, start + size),
    st.sampled_from([GapKind.TRIMMED, GapKind.LOST, GapKind.NEVER_DURABLE]),
    st.integers(0, 2**63), st.integers(1, 2**62),
) | st.builds(lambda end: Gap(GapKind.END_OF_LANE, end, end), st.integers(0, 2**63))  # fmt: skip


@given(st.lists(st.binary(max_size=40), max_size=8), U64, U64, U64, gaps)
@settings(deadline=None, max_examples=150)
def test_fetched_round_trip(payloads: list[bytes], request: int, following: int, tail: int, gap: Gap | None) -> None:
    """Entries and payloads of a fetched frame survive the wire, and payloads are read-only views of the body."""
    frame = fetched_frame(payloads, request=request, next_index=following, tail_index=tail, gap=gap)
    header = codec.parse_fetched_header(frame)
    assert header == (request, following, tail, len(payloads), len(frame) - 64, gap)
    row = np.frombuffer(frame[:64], dtype=FETCHED_HEADER)[0]
    assert [row[name] for name in header._fields[:4]] == list(header[:4])
    body = memoryview(bytearray(frame[64:]))
    entries, views = codec.parse_fetched_body(header, body)
    assert entries.tobytes() == entries_for(payloads).tobytes()
    assert [bytes(view) for view in views] == payloads
    assert all(view.readonly and view.obj is body.obj for view in views)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"count": limits.FETCH_ENTRIES_MAX + 1}, BadFrame),
        ({"count": 2}, BadFrame),
        ({"length": 63}, BadFrame),
        ({"length": limits.FETCH_BYTES_MAX + limits.FRAME_BYTES_MAX + 65}, FrameTooLarge),
        ({"count": 0}, FrameTooLarge),
        ({"gap": Gap(GapKind.SKIPPED, 1, 2)}, BadFrame),
        ({"gap": Gap(77, 1, 2)}, BadFrame),  # type: ignore[arg-type]
        ({"gap": Gap(GapKind.LOST, 2, 2)}, BadFrame),
        ({"gap": Gap(GapKind.END_OF_LANE, 1, 2)}, BadFrame),
    ],
)
def test_fetched_header_with_a_field_out_of_range(fields: dict[str, Any], error: type[Exception]) -> None:
    """Each field of a fetched header has its range, even under a fitting checksum."""
    with pytest.raises(error):
        codec.parse_fetched_header(fetched_frame([b"x"], **fields))


@given(st.integers(0, 64 * 8 - 1))
@settings(deadline=None, max_examples=200)
def test_fetched_header_shows_every_flipped_bit(bit: int) -> None:
    """No single flipped bit of a fetched header goes unnoticed."""
    header = bytearray(fetched_frame([b"x"])[:64])
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises((BadMagic, BadVersion, BadFrame, ChecksumMismatch)):
        codec.parse_fetched_header(header)


def parse_fetched(frame: bytes) -> list[memoryview]:
    return codec.parse_fetched_body(codec.parse_fetched_header(frame), memoryview(frame)[64:])[1]


def test_fetched_entry_that_is_damaged() -> None:
    """A flipped bit in an entry is a checksum error."""
    frame = bytearray(fetched_frame([b"x"]))
    frame[64 + 20] ^= 1
    with pytest.raises(ChecksumMismatch):
        parse_fetched(bytes(frame))


@pytest.mark.parametrize("size", [0, 1, 100, limits.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_fetched_entry_whose_size_is_wrong(size: int) -> None:
    """Entries that claim other sizes than the frame has are refused: 9 bytes take 16."""
    entries = entries_for([b"123456789"])
    entries["size"] = size
    with pytest.raises(BadFrame):
        parse_fetched(fetched_frame([b"123456789"], entries=seal(entries)))


def test_fetched_batch_without_bytes() -> None:
    """A batch has a payload, even when the frame's length agrees that there is none."""
    entries = entries_for([b""])
    entries["kind"] = EntryKind.BATCH
    with pytest.raises(BadFrame):
        assert parse_fetched(fetched_frame([b""], entries=seal(entries))) == [b""]


def test_fetched_batch_above_the_limit() -> None:
    """A payload above the size of a batch is refused, even when it is complete."""
    parse_fetched(fetched_frame([bytes(limits.FRAME_BYTES_MAX)]))
    with pytest.raises(BadFrame):
        parse_fetched(fetched_frame([bytes(limits.FRAME_BYTES_MAX + 1)]))


def test_fetched_control_entries_need_no_payload() -> None:
    """Only batches must have bytes."""
    entries = entries_for([b""])
    entries["kind"] = EntryKind.SKIP
    assert parse_fetched(fetched_frame([b""], entries=seal(entries))) == [b""]


def test_short_frames_have_their_bytes() -> None:
    """CREDIT carries its total in the header; FULL carries nothing."""
    assert codec.credit_frame(2**40) == b"EM\x01\x04" + bytes(4) + (2**40).to_bytes(8, "little")
    assert codec.full_frame() == b"EM\x01\x05" + bytes(12)
    assert codec.WORDS.keys() == set(FrameKind)


def test_later_fields_may_be_omitted() -> None:
    """A peer that does not know durability is understood: its reads are durable, and it reports no loss."""
    lean = {"type": "Fetch", "lane": 3, "max_bytes": 5}
    assert codec.decode_control(msgspec.msgpack.encode(lean)) == messages.Fetch(lane=3, max_bytes=5, read="durable")
    opened = {"type": "Opened", "lane": 3, "session": 4, "index": 5, "expected": 6, "low": 0}
    assert codec.decode_control(msgspec.msgpack.encode(opened)) == messages.Opened(
        lane=3, session=4, index=5, expected=6, low=0, lost_from=0, lost_to=0, lost_before=[]
    )
    assert NO_ACK & WANT_DURABLE == 0
