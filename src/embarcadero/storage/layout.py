"""Byte layouts on disk. Headers, entries and footers are little-endian, indexes big-endian.

A segment is a header, then records (the 64-byte order entry exactly as it was ordered, then its payload, padded with
zeros to 64 bytes), then, once the next segment is on disk, a footer. A footer means that the segment is complete and
synced, so recovery only scans segments without one. It also means that another segment follows, unless it is the last
one of a sealed range. So a deleted segment is detected. A footer has 72 bytes: records have multiples of 64, so no
payload at the end of a file can be mistaken for one.

    segment header (128)     segment footer (72)    start file, mark (64)   index entry (12), big-endian
    0  magic      u64        0  magic      u64      0  magic     u64        0 seq or append_us u64
    8  version    u32        8  base_index u64      8  index     u64        8 position         u32
    16 lane       u64        16 base_seq   u64      16 seq       u64
    24 range      u64        24 end_index  u64      24 position  u64        checkpoint header (64)
    32 base_index u64        32 end_seq    u64      60 check     u32        0  magic   u64
    40 base_seq   u64        40 bytes      u64                              8  version u32
    48 cluster    32 bytes   48 last_us    u64                              12 crc     u32
    124 check     u32        56 last       u32                              16 index   u64
                             68 check      u32                              24 bytes   u64
                                                                            32 topic   u64 (id; 0: unknown)
                                                                            60 check   u32

Checks of these are CRC32C of everything before them. A newer version has its check in the same place, so "newer" can be
distinguished from "damaged".
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

import numpy as np

from embarcadero.errors import BadSegment, invariant
from embarcadero.fabric.layout import Entries, table
from embarcadero.limits import LINE_BYTES
from embarcadero.types import RangeKey
from embarcadero.wire.codec import payload_crc

FORMAT_VERSION: Final = 1

_SEGMENT: Final = int.from_bytes(b"EMBSEGMT", "little")
_FOOTER: Final = int.from_bytes(b"EMBSEALD", "little")
_POSITION: Final = int.from_bytes(b"EMBPLACE", "little")
_CHECKPOINT: Final = int.from_bytes(b"EMBSESSN", "little")

HEADER: Final = table(
    128,
    magic=("<u8", 0), version=("<u4", 8), lane=("<u8", 16), range=("<u8", 24), base_index=("<u8", 32),
    base_seq=("<u8", 40), cluster=("S32", 48), check=("<u4", 124),
)  # fmt: skip
FOOTER: Final = table(
    72,
    magic=("<u8", 0), base_index=("<u8", 8), base_seq=("<u8", 16), end_index=("<u8", 24), end_seq=("<u8", 32),
    bytes=("<u8", 40), last_us=("<u8", 48), last=("<u4", 56), check=("<u4", 68),
)  # fmt: skip
POSITION: Final = table(
    64, magic=("<u8", 0), index=("<u8", 8), seq=("<u8", 16), position=("<u8", 24), lane=("<u8", 32), range=("<u8", 40),
    kind=("<u4", 48), check=("<u4", 60),
)  # fmt: skip
CHECKPOINT: Final = table(
    64, magic=("<u8", 0), version=("<u4", 8), crc=("<u4", 12), index=("<u8", 16), bytes=("<u8", 24),
    topic=("<u8", 32), check=("<u4", 60),
)  # fmt: skip
_POSITION_ROW: Final = struct.Struct("<6QI8x")
"""All of a position except its check: a mark is written for every sync."""
INDEX: Final = np.dtype([("key", ">u8"), ("position", ">u4")])

HEADER_BYTES: Final = HEADER.itemsize
FOOTER_BYTES: Final = FOOTER.itemsize

for _name, _dtype, _size in (
    ("segment header", HEADER, 128),
    ("segment footer", FOOTER, 72),
    ("position", POSITION, LINE_BYTES),
    ("checkpoint header", CHECKPOINT, LINE_BYTES),
    ("index entry", INDEX, 12),
):
    invariant(_dtype.itemsize == _size, f"a {_name} has {_size} bytes")
invariant(_POSITION_ROW.size == POSITION.itemsize - 4, "a position ends with its check")

LOG, INDEX_FILE, TIME_INDEX_FILE, DAMAGED, MENDED = ".log", ".index", ".timeindex", ".damaged", ".mended"
_BEGUN: Final = ".begun"
START_FILE: Final = "start"
"""Where a range's copy starts. Files that are missing above were not dropped by the replica."""
MARK_FILE: Final = "synced"
"""How far the copy was synced, as of the last time there was time to record it."""
_POSITION_KINDS: Final = {START_FILE: 1, MARK_FILE: 2}
"""Prevents confusion of the two; 0: unspecified, as in files of earlier versions."""
_BEGUN_NAME = re.compile(r"lane-(\d{10})-range-(\d{10})\.begun")
_LOG_NAME = re.compile(r"(\d{20})\.log")
_DAMAGED_NAME = re.compile(r"(\d{20})-(\d{20})-(span|file|tail)\.damaged")


class Header(NamedTuple):
    """The identity of a segment, in its header."""

    lane: int
    range_number: int
    base_index: int
    base_seq: int
    cluster: str


class Footer(NamedTuple):
    """The summary of a finished segment. `last`: no other segment follows."""

    base_index: int
    base_seq: int
    end_index: int
    end_seq: int
    bytes: int
    last_us: int
    last: bool


class FilePosition(NamedTuple):
    """A position in a copy: a segment by its base seq, or an index with its seq; and a position in that segment."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    position: int
    lane: int = 0
    range: int = 0  # the range's number; 0: unspecified, as in files of earlier versions

    def belongs_to(self, lane: int, number: int) -> bool:
        """Return whether it may be a position of this range."""
        return not self.range or (self.lane, self.range) == (lane, number)


def _sealed(row: Entries) -> bytes:
    row["check"] = payload_crc(row.tobytes()[: row.dtype.itemsize - 4])
    return row.tobytes()


def _open(data: bytes, dtype: np.dtype[np.void], magic: int) -> np.void | None:
    """Return one row if its length, magic and check are right; otherwise None."""
    if len(data) != dtype.itemsize:
        return None
    row: np.void = np.frombuffer(data, dtype=dtype)[0]
    if int(row["magic"]) != magic or int(row["check"]) != payload_crc(data[:-4]):
        return None
    return row


def encode_header(header: Header) -> bytes:
    """Encode a segment's header, its first bytes."""
    row = np.zeros(1, dtype=HEADER)
    row["magic"], row["version"] = _SEGMENT, FORMAT_VERSION
    row["lane"], row["range"], row["cluster"] = header.lane, header.range_number, header.cluster.encode()
    row["base_index"], row["base_seq"] = header.base_index, header.base_seq
    return _sealed(row)


def decode_header(data: bytes, name: str) -> Header | None:
    """Decode a segment's header. None if it is damaged. Raises BadSegment if a newer version wrote it."""
    row = _open(data, HEADER, _SEGMENT)
    if row is None:
        return None
    if int(row["version"]) != FORMAT_VERSION:
        refuse_newer(name, int(row["version"]))
    return Header(
        int(row["lane"]),
        int(row["range"]),
        int(row["base_index"]),
        int(row["base_seq"]),
        bytes(row["cluster"]).decode(errors="replace"),
    )


def was_header(data: bytes, header: Header) -> bool:
    """Return whether damaged bytes were this header: either their check, or everything except the check, matches.

    Records do not name their lane. A file of another lane with an unreadable header must not be accepted here.
    """
    whole, end = encode_header(header), HEADER_BYTES - HEADER["check"].itemsize
    return data[end:] == whole[end:] or data[:end] == whole[:end]


def refuse_newer(name: str, version: int) -> None:
    """Raise BadSegment for a file of another format version."""
    hint = "start the version of Embarcadero that wrote it, or a newer one"
    raise BadSegment(f"{name} has format version {version}; this version reads {FORMAT_VERSION}", hint)


def encode_footer(footer: Footer) -> bytes:
    """Encode a segment's footer, its last bytes."""
    row = np.zeros(1, dtype=FOOTER)
    row["magic"] = _FOOTER
    for name, value in footer._asdict().items():
        row[name] = value
    return _sealed(row)


def decode_footer(data: bytes) -> Footer | None:
    """Decode a segment's footer; None if the bytes are not one."""
    row = _open(data, FOOTER, _FOOTER)
    if row is None:
        return None
    base_index, base_seq, end_index, end_seq, size, last_us = (int(row[name]) for name in Footer._fields[:-1])
    return Footer(base_index, base_seq, end_index, end_seq, size, last_us, bool(row["last"]))


def encode_position(position: FilePosition, name: str) -> bytes:
    """Encode the content of a start file or a mark; `name` is the file's name."""
    data = _POSITION_ROW.pack(_POSITION, *position, _POSITION_KINDS[name])
    return data + payload_crc(data).to_bytes(4, "little")


def decode_position(data: bytes, name: str) -> FilePosition | None:
    """Decode a position; None if the bytes are damaged, or of the other file."""
    row = _open(data, POSITION, _POSITION)
    if row is None or int(row["kind"]) not in (0, _POSITION_KINDS[name]):
        return None
    return FilePosition(int(row["index"]), int(row["seq"]), int(row["position"]), int(row["lane"]), int(row["range"]))


class CheckpointHeader(NamedTuple):
    """The header of an on-disk session checkpoint: its index, length and topic."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    bytes: int
    crc: int
    topic_id: int  # 0: unknown, as in files of earlier versions


def encode_checkpoint(index: int, data: bytes, topic_id: int = 0) -> bytes:
    """Encode the header of an on-disk checkpoint."""
    row = np.zeros(1, dtype=CHECKPOINT)
    row["magic"], row["version"], row["crc"] = _CHECKPOINT, FORMAT_VERSION, payload_crc(data)
    row["index"], row["bytes"], row["topic"] = index, len(data), topic_id
    return _sealed(row)


def decode_checkpoint(data: bytes, name: str) -> CheckpointHeader | None:
    """Decode the header of an on-disk checkpoint. None if damaged. Raises BadSegment if a newer version wrote it."""
    row = _open(data, CHECKPOINT, _CHECKPOINT)
    if row is None:
        return None
    if int(row["version"]) != FORMAT_VERSION:
        refuse_newer(name, int(row["version"]))
    return CheckpointHeader(int(row["index"]), int(row["bytes"]), int(row["crc"]), int(row["topic"]))


def record_bytes(size: int) -> int:
    """Return the size of a record with a payload of this size: entry, payload, padding."""
    return LINE_BYTES + -(-size // LINE_BYTES) * LINE_BYTES


def segment_name(base_seq: int, suffix: str = LOG) -> str:
    """Return the name of one of a segment's files."""
    return f"{base_seq:020d}{suffix}"


def base_seqs(names: list[str]) -> list[int]:
    """Return the base seqs of the segments among a folder's names, oldest first."""
    return sorted(int(match[1]) for name in names if (match := _LOG_NAME.fullmatch(name)))


def lane_folder(lane: int) -> str:
    """Return the folder of a lane in a replica's folder."""
    return f"lane-{lane:010d}"


def range_folder(lane: int, number: int) -> str:
    """Return the folder of a range's copy in a replica's folder."""
    return f"{lane_folder(lane)}/range-{number:010d}"


def repair_folder(folder: str) -> str:
    """Return the folder in which missing segments of a range's copy are rebuilt."""
    return f"{folder}.repair"


def begun_name(folder: str) -> str:
    """Return the name of an empty file in the replica's folder that records that this copy existed.

    Without this file, a missing folder means that there was no copy.
    """
    return folder.replace("/", "-") + _BEGUN


def begun_range(name: str) -> RangeKey | None:
    """Return the range of such a file name; None for other files."""
    match = _BEGUN_NAME.fullmatch(name)
    return RangeKey(int(match[1]), int(match[2])) if match else None


def damaged_name(first: int, end: int, kind: str) -> str:
    """Return the name of the file that records damage at the indices [first, end)."""
    return f"{first:020d}-{end:020d}-{kind}{DAMAGED}"


def damaged_span(name: str) -> tuple[int, int, str] | None:
    """Return (first, end, kind) of such a file name; None for other files."""
    match = _DAMAGED_NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None
