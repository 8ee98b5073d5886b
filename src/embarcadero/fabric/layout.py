"""Byte layouts of the fabric, as tables. All numbers are little-endian; every entry is one 64-byte line.

An entry is valid iff its commit word equals its expected index and its check matches. The check is a multiply-fold of
the entry's eight words. It is salted, so a slot that was never written (all zero) fails. Numpy computes it for a whole
round.

    superblock (128)   pending entry (64)     order entry (64)        result (64)
    0  magic      u64  0  index      u64      0  index       u64      0  position    u64
    8  version    u32  8  session_seq u64     8  seq         u64      8  pending     u64
    12 kind       u32  16 low        u64      16 session_seq u64      16 index       u64
    16 generation u64  24 lane       u32      24 append_us   u64      24 seq         u64
    24 size       u64  28 session    u32      32 session     u32      32 session_seq u64
    32 slots      u64  32 location   u32      36 location    u32      40 extra       u64
    40 slot_bytes u64  36 size       u32      40 size        u32      48 session     u32
    48 owner      u64  40 count      u32      44 count       u32      52 outcome     u8
    56 incarnation u64 44 crc        u32      48 crc         u32      53 order       u8
    64 pad             48 origin     u16      52 origin      u16      60 check       u32
    124 check     u32  50 partition  u16      54 partition   u16
                       52 schema     u16      56 schema      u16
                       54 kind       u8       58 kind        u8
                       55 flags      u8       59 flags       u8
                       56 pad        u32      60 check       u32
                       60 check      u32

`origin` is the region handle of the broker incarnation whose log holds the payload. `location` is the payload's
location in that log (see log.py).

Control entries reuse fields. A SESSION_OPEN in a pending ring has
- `session_seq`: the hash of the session's name (0: no name);
- `session`: the session it continues;
- `low`: the sequence at which the session opens, plus one (0: none);
- `crc`: the session that must hold the name, plus one (0: any or none; all ones: none).

A SESSION_OPEN in an order ring has
- `session`: the new session; `session_seq`: its next sequence;
- `location` (low half) and `crc` (high half): the hash of its name;
- `partition` (low half) and `schema` (high half): the session it continues;
- `flags`: OPEN_TAKEN if another holder took the name.

OPEN_STRONG in `flags`, pending and ordered: the session is strong in a topic whose default is weak. Without it the
session has the order of its topic: strong in order 5, weak in order 2. The result of a SESSION_OPEN has the session's
order in `order` (0: not reported). A SKIP has its first sequence in `session_seq` and the number of sequences in
`location`. Ordered control entries have no payload: their `size` and `count` are 0.

An entry in the reorder buffer is a pending entry in a slot of the `held` region.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from operator import mul
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.errors import invariant
from embarcadero.limits import FRONTIER_BYTES, LANES_MAX, LINE_BYTES, REGION_HANDLES

Entries = npt.NDArray[np.void]
"""A structured array of one of the entry types below."""

Flags = npt.NDArray[np.bool_]
"""A boolean mask over entries or rows."""

Line = list[int]
"""One entry as eight plain numbers."""

LINE: Final = struct.Struct("<8Q")
"""Packs a line into its 64 bytes and unpacks it."""

MAGIC: Final = int.from_bytes(b"EMBARCAD", "little")
LAYOUT_VERSION: Final = 1


class RegionKind(IntEnum):
    """The content of a region; part of its superblock."""

    EPOCHS = 1
    ORDER = 2
    HELD = 3
    RESULTS = 4
    SEQUENCER_FRONTIERS = 5
    CHECKPOINT = 6
    PENDING = 7
    LOG = 8
    BROKER_FRONTIERS = 9
    DURABLE = 10
    RANGES = 11


def table(entry_bytes: int, /, **fields: tuple[str, int]) -> np.dtype[np.void]:
    """Make a packed dtype of `entry_bytes` from `name=(format, offset)`.

    Gaps become fields too. Numpy copies only fields, so a gap would keep garbage and its check would fail.
    """
    packed: list[tuple[str, str]] = []
    end = 0
    for name, (fmt, offset) in sorted(fields.items(), key=lambda field: field[1][1]):
        invariant(end <= offset, "fields do not overlap")
        if end < offset:
            packed.append((f"pad{end}", f"V{offset - end}"))
        packed.append((name, fmt))
        end = offset + np.dtype(fmt).itemsize
    invariant(end <= entry_bytes, "fields fit the entry")
    if end < entry_bytes:
        packed.append((f"pad{end}", f"V{entry_bytes - end}"))
    return np.dtype(packed)


SUPERBLOCK: Final = table(
    128,
    magic=("<u8", 0), version=("<u4", 8), kind=("<u4", 12), generation=("<u8", 16), size=("<u8", 24),
    slots=("<u8", 32), slot_bytes=("<u8", 40), owner=("<u8", 48), incarnation=("<u8", 56), check=("<u4", 124),
)  # fmt: skip

PENDING: Final = table(
    64,
    index=("<u8", 0), session_seq=("<u8", 8), low=("<u8", 16), lane=("<u4", 24), session=("<u4", 28),
    location=("<u4", 32), size=("<u4", 36), count=("<u4", 40), crc=("<u4", 44), origin=("<u2", 48),
    partition=("<u2", 50), schema=("<u2", 52), kind=("u1", 54), flags=("u1", 55), waits=("u1", 56), check=("<u4", 60),
)  # fmt: skip
"""`waits`: the answer alone need not wake the broker, because its ack waits for disks too."""

ORDER: Final = table(
    64,
    index=("<u8", 0), seq=("<u8", 8), session_seq=("<u8", 16), append_us=("<u8", 24), session=("<u4", 32),
    location=("<u4", 36), size=("<u4", 40), count=("<u4", 44), crc=("<u4", 48), origin=("<u2", 52),
    partition=("<u2", 54), schema=("<u2", 56), kind=("u1", 58), flags=("u1", 59), check=("<u4", 60),
)  # fmt: skip

OPEN_TAKEN: Final = 1
OPEN_STRONG: Final = 2
"""Flags of a SESSION_OPEN."""

RESULT: Final = table(
    64,
    position=("<u8", 0), pending=("<u8", 8), index=("<u8", 16), seq=("<u8", 24), session_seq=("<u8", 32),
    extra=("<u8", 40), session=("<u4", 48), outcome=("u1", 52), order=("u1", 53), check=("<u4", 60),
)  # fmt: skip

EPOCH_LINE: Final = table(
    128,
    epoch=("<u8", 0),  # written first: the epoch is open
    started=("<u8", 64),  # written once its start is in the store: the epoch + 1
)  # fmt: skip

for _name, _dtype, _size in (
    ("superblock", SUPERBLOCK, 128),
    ("pending", PENDING, LINE_BYTES),
    ("order", ORDER, LINE_BYTES),
    ("result", RESULT, LINE_BYTES),
    ("epoch line", EPOCH_LINE, FRONTIER_BYTES),
):
    invariant(_dtype.itemsize == _size, f"a {_name} has {_size} bytes")

SLOTS_OFFSET: Final = SUPERBLOCK.itemsize + FRONTIER_BYTES
"""Byte offset of a ring's slots: after the superblock and one frontier line."""

RING_FRONTIER_OFFSET: Final = SUPERBLOCK.itemsize
"""Byte offset of a ring's own frontier: entries below it are published."""


class BrokerLine(IntEnum):
    """Lines of `broker-<b>.<inc>/frontiers`; chunk lines follow from CHUNKS on."""

    RESULTS_READ = 0  # (epoch's) results below are read
    RESULTS_EPOCH = 1  # the epoch that RESULTS_READ refers to
    READS_WAITING = 2  # number of reads that wait for new entries: a hint to the sequencer whether to ring
    HEARTBEAT = 3
    DURABLE_WAITING = 4  # number of acks and reads that wait for durable lines: a hint to replicas
    CHUNKS = 8


class SequencerLine(IntEnum):
    """Lines of `epoch-<e>/frontiers`: heartbeat, awake (needs no ring), a line per lane, a line per region handle."""

    HEARTBEAT = 0
    AWAKE = 1
    LANES = 8
    BROKERS = 8 + LANES_MAX


SEQUENCER_FRONTIERS_BYTES: Final = SUPERBLOCK.itemsize + (SequencerLine.BROKERS + REGION_HANDLES + 1) * FRONTIER_BYTES
STANDING_WORD: Final = 1
"""Second word of a broker's line in the sequencer's frontiers: the standing of that incarnation."""


class Standing(IntEnum):
    """State of a broker incarnation in the view of one epoch's sequencer.

    An incarnation that was closed in an earlier epoch is not listed.
    """

    UNLISTED = 0
    OPEN = 1
    CLOSING = 2


def frontier_offset(line: int) -> int:
    """Byte offset of a frontier line in a frontiers region."""
    return SUPERBLOCK.itemsize + line * FRONTIER_BYTES


_LINE = np.dtype(f"V{LINE_BYTES}")
_MULTIPLIERS = np.array(
    [
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93,
        0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    ],
    dtype=np.uint64,
)  # fmt: skip
_SALT = np.uint64(0x2545F4914F6CDD1D)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
_MIX = np.uint64(0xD1342543DE82EF95)


_FEW = 4
"""Up to this number of entries, plain numbers are faster than arrays."""
_COUNT_MAX = 1 << 62
"""No ring reaches this index. Below it, 64-bit sums do not wrap."""

_PLAIN_MULTIPLIERS = tuple(int(number) for number in _MULTIPLIERS)
_PLAIN_SALT, _PLAIN_MIX = int(_SALT), int(_MIX)
_ALL_ONES = (1 << 64) - 1


def fold_line(line: Line) -> int:
    """Compute the check of one entry, over all its bytes except the check itself."""
    last = line[7]
    total: int = sum(map(mul, line, _PLAIN_MULTIPLIERS)) + ((last & 0xFFFF_FFFF) - last) * _PLAIN_MULTIPLIERS[7]
    total = (total + _PLAIN_SALT) & _ALL_ONES
    return ((total ^ total >> 29) * _PLAIN_MIX & _ALL_ONES) >> 32


def _lines(entries: Entries) -> npt.NDArray[np.uint64]:
    """View each entry as eight words."""
    return entries.view(np.uint64).reshape(-1, 8)


def _fold(entries: Entries) -> npt.NDArray[np.uint32]:
    """Compute the check of each entry, over all its bytes except the check (the high half of the last word)."""
    words = _lines(entries)
    if len(words) <= _FEW:
        return np.array([fold_line(line) for line in words.tolist()], dtype=np.uint32)
    last = words[:, 7]
    total = words @ _MULTIPLIERS  # whole rows are much faster than seven of eight columns
    total += ((last & _LOW_HALF) - last) * _MULTIPLIERS[7] + _SALT
    total ^= total >> np.uint64(29)
    total *= _MIX
    return (total >> np.uint64(32)).astype(np.uint32)


def seal(entries: Entries) -> Entries:
    """Write the check into each entry (contiguous array of a 64-byte entry type)."""
    entries["check"] = _fold(entries)
    return entries


def sealed(entries: Entries) -> Flags:
    """Flag the entries whose check matches."""
    fits: Flags = np.equal(_fold(entries), entries["check"])
    return fits


def valid_prefix(entries: Entries, first: int, word: str) -> int:
    """Count the valid entries from the start: commit word `word` counts up from `first`, and the check matches."""
    if first > _COUNT_MAX:
        return 0  # the frontier that gave `first` is damaged
    if len(entries) <= _FEW:
        for at, (number, line) in enumerate(zip(entries[word].tolist(), _lines(entries).tolist(), strict=True)):
            if number != first + at or line[7] >> 32 != fold_line(line):
                return at
        return len(entries)
    counted = _true_prefix(entries[word] == np.arange(first, first + len(entries), dtype=np.uint64))
    return _true_prefix(sealed(entries[:counted]))  # the entries after it are often old


def _true_prefix(flags: Flags) -> int:
    """Count the leading true flags."""
    return flags.size if every(flags) else int(flags.argmin())


def every(flags: Flags) -> bool:
    """Whether all flags are true. For the few entries of a small round this is ten times faster than numpy's `all`."""
    return int(np.count_nonzero(flags)) == flags.size


def pick(entries: Entries, where: Flags | npt.NDArray[np.integer[Any]]) -> Entries:
    """Copy the chosen entries as whole lines. Numpy would copy field by field, which takes 20 times as long."""
    return entries.view(_LINE)[where].view(entries.dtype)


def join(parts: Sequence[Entries]) -> Entries:
    """Concatenate parts (at least one) into a new array, copying whole lines."""
    return np.concatenate([part.view(_LINE) for part in parts]).view(parts[0].dtype)


def superblock_check(block: Entries) -> int:
    """Compute the check of a superblock: fold its first 64 bytes, then its second 64 without the check."""
    halves = np.frombuffer(block.tobytes(), dtype=np.uint64).reshape(2, 8).copy()
    halves[1, 7] &= _LOW_HALF
    mixed: Any = halves @ _MULTIPLIERS + _SALT
    total = int(mixed[0]) * 31 + int(mixed[1])
    return (total ^ (total >> 32)) & 0xFFFF_FFFF


class RangeWord(NamedTuple):
    """The number of a lane's open range, and whether it is closing, in one word. The sequencer publishes it."""

    number: int
    closing: bool

    def encode(self) -> int:
        return self.number << 1 | self.closing

    @staticmethod
    def decode(word: int) -> RangeWord:
        return RangeWord(word >> 1, bool(word & 1))
