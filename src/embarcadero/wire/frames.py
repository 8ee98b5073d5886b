"""The frames of the protocol, as tables. All numbers are little-endian.

Every frame starts with the same 8 bytes; `length` counts what follows the frame's header (16 or 64 bytes).

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
CONTROL  16      the message's number     one msgpack message (messages.py); an answer has its question's number
BATCH    64      -                        an Arrow IPC record batch message, `crc` is its CRC32C
ACK      16      0                        `length` / 48 acks
CREDIT   16      bytes granted in all     nothing; counts whole batch frames since the connection began
FULL     16      why (codec.full_frame)   nothing; for 10 s the broker was above its high mark, or a lane stood still
FETCHED  64      number of its Fetch      `count` order entries (64 bytes each), then payloads, each padded to 8 bytes

Bit 0 of a batch's `flags` (NO_ACK; orders 0 and 1): the publisher wants no ack, not even of a refusal.
Bit 1 (WANT_DURABLE): the ack that says stored is to come once the batch is durable, not when it is ordered.
Bit 2 (REFERENCE): the body is no payload, but a REFERENCE_BODY that names the staged batch whose payload it is.
`check` of a 64-byte header is the CRC32C of its first 60 bytes. A batch's `low` is
the publisher's lowest unsettled sequence.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from embarcadero.fabric.layout import table
from embarcadero.invariants import invariant

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
"""Flag of a batch frame: no ack is wanted."""
WANT_DURABLE: Final = 2
"""Flag of a batch frame: stored means durable. Refusals come at once."""

REFERENCE: Final = 4
"""Flag of a batch frame: the body names a staged batch. `crc`, `count`, `partition` and `schema` are of the payload."""

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
