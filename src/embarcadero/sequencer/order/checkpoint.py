"""Session checkpoints: two slots per lane, so that a takeover reads a bounded part of the order ring.

A checkpoint is the session table as of an index: entries below it may leave the ring. The slots alternate. Rows are
flushed before the header that covers them (their count and CRC32C), so a torn checkpoint is detected and the other slot
is valid. A row has the stored and the skipped sequences of the window, but not their positions. Positions come from the
entries that are still in the ring. `strong` of a row is 1 for a strong session. 0 means the order of the topic: weak in
order 2, strong in order 5.

    header (128)                                             row (128)
    0 magic u64, 8 version u32, 12 count u32, 16 number u64  0 handle u32, 4 successor u32, 8 state u8, 9 strong u8
    24 index u64, 32 seq u64, 40 append_us u64               16 expected u64, 24 low u64, 32 name u64
    48 next_handle u64, 56 now_us u64                        40 active_us u64
    64 rows_crc u32, 68 capacity u32, 124 check u32          48 stored 32 bytes, 80 lost 32 bytes: a bit per slot

`replay` applies order entries to the session table. A takeover replays the entries after a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import Corrupt, invariant
from embarcadero.fabric.layout import SUPERBLOCK, Entries, Flags, RegionKind, pick, table
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.limits import SESSION_SEQUENCE_MAX
from embarcadero.sequencer.order.batches import LaneOrder, opened_facts
from embarcadero.sequencer.order.sessions import I64, LOST, NEVER, W_MASK, W, zeros
from embarcadero.steps import Step
from embarcadero.types import EntryKind, LanePosition
from embarcadero.wire.codec import payload_crc

_MAGIC: Final = int.from_bytes(b"EMBCHECK", "little")
_VERSION: Final = 1
_HEADER: Final = table(
    128,
    magic=("<u8", 0),
    version=("<u4", 8),
    count=("<u4", 12),
    number=("<u8", 16),
    index=("<u8", 24),
    seq=("<u8", 32),
    append_us=("<u8", 40),
    next_handle=("<u8", 48),
    now_us=("<u8", 56),
    rows_crc=("<u4", 64),
    capacity=("<u4", 68),
    check=("<u4", 124),
)
_ROW: Final = table(
    128,
    handle=("<u4", 0),
    successor=("<u4", 4),
    state=("u1", 8),
    strong=("u1", 9),
    expected=("<u8", 16),
    low=("<u8", 24),
    name=("<u8", 32),
    active_us=("<u8", 40),
    stored=("V32", 48),
    lost=("V32", 80),
)
_BYTES: Final = 128
_ROWS_RESERVED: Final = 511  # with the header, 64 KiB
_NUMBER_MAX: Final = 1 << 62
_DO: Final = "report it: this is a bug; an older checkpoint, or one of another replica, may work"
_RAW: Final = np.dtype(f"V{_BYTES}")
invariant(_HEADER.itemsize == _BYTES and _ROW.itemsize == _BYTES, "headers and rows have 128 bytes")


def _slot_offset(slot: int, rows: int) -> int:
    return SUPERBLOCK.itemsize + slot * (rows + 1) * _BYTES


def _crc(entries: Entries) -> int:
    return payload_crc(entries.view(np.uint8)) if len(entries) else 0


class CheckpointWriter:
    """Writes the checkpoints of one lane. `index` is that of the newest one: order slots below it may be reused."""

    def __init__(self, fabric: Fabric, name: str, rows: int, steps: Steps = NO_STEPS) -> None:
        self._steps = steps
        self._region = fabric.create(name, Shape(RegionKind.CHECKPOINT, _slot_offset(2, rows), rows, _BYTES))
        self._image = zeros(rows, _ROW)  # the rows last written; most do not change between checkpoints
        self._image_us = -NEVER
        self._number = 0
        self._reserved_rows = [0, 0]
        self.index = 0
        for slot in (0, 1):
            self._reserve(slot, 1)

    def write(self, order: LaneOrder, now_us: int) -> None:
        """Write the current table. All entries below `order.next_index` must be in the ring, flushed."""
        used = np.flatnonzero(order.table.state)
        changed = used[order.table.active_us[used] >= self._image_us]
        self._image.view(_RAW)[changed] = _rows(order, changed).view(_RAW)
        rows = self._image.view(_RAW)[used].view(_ROW)
        self._number, self._image_us = self._number + 1, now_us
        header = np.zeros(1, dtype=_HEADER)
        header["magic"], header["version"], header["number"] = _MAGIC, _VERSION, self._number
        header["index"], header["seq"], header["append_us"] = order.next_index, order.next_seq, order.append_us
        header["next_handle"], header["now_us"] = order.table.next_handle, now_us
        header["count"], header["rows_crc"], header["capacity"] = len(rows), _crc(rows), order.table.capacity
        header["check"] = payload_crc(header.view(np.uint8)[:124])
        offset = _slot_offset(self._number % 2, len(self._image))
        self._reserve(self._number % 2, len(rows))
        self._store(offset + _BYTES, rows)
        self._steps.at(Step.CHECKPOINT_ROWS)
        self._store(offset, header)
        self.index = order.next_index
        self._steps.at(Step.CHECKPOINT_WRITTEN)

    def _reserve(self, slot: int, rows: int) -> None:
        """Reserve memory for this many rows of a slot, and for some more, since the region is sparse."""
        if rows > self._reserved_rows[slot]:
            most = min(len(self._image), max(_ROWS_RESERVED, 2 * rows))
            self._region.reserve(_slot_offset(slot, len(self._image)), (most + 1) * _BYTES)
            self._reserved_rows[slot] = most

    def _store(self, offset: int, entries: Entries) -> None:
        raw = entries.view(np.uint8)
        self._region.data[offset : offset + len(raw)] = raw
        self._region.flush(offset, len(raw))


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint that was read."""

    header: np.void
    rows: Entries

    @property
    def index(self) -> int:
        """The index as of which the table is."""
        return int(self.header["index"])

    @property
    def capacity(self) -> int:
        """Number of rows of the original table, which determines the row of each session."""
        return int(self.header["capacity"])

    def data(self) -> bytes:
        """The bytes on disk: the header, then the rows."""
        return self.header.tobytes() + self.rows.tobytes()


def parse_checkpoint(data: bytes) -> Checkpoint | None:
    """Parse a checkpoint; None when it is not whole."""
    header = np.frombuffer(data[:_BYTES], dtype=_HEADER) if len(data) >= _BYTES else np.zeros(1, dtype=_HEADER)
    known = int(header["magic"][0]) == _MAGIC and int(header["version"][0]) == _VERSION
    if not known or int(header["check"][0]) != payload_crc(data[:124]):
        return None
    if len(data) != (int(header["count"][0]) + 1) * _BYTES:
        return None
    rows = np.frombuffer(data[_BYTES:], dtype=_ROW)
    return Checkpoint(header[0], rows) if _crc(rows) == int(header["rows_crc"][0]) else None


def read_checkpoint(fabric: Fabric, name: str) -> Checkpoint | None:
    """Read the newest whole checkpoint in a region; None when there is none yet."""
    region = fabric.attach(name)
    require_shape(region, _slot_offset(2, region.shape.slots) <= region.shape.size)
    found = [checkpoint for slot in (0, 1) if (checkpoint := _read_slot(region, slot)) is not None]
    return max(found, key=lambda checkpoint: int(checkpoint.header["number"]), default=None)


def newest_index(region: Region) -> int | None:
    """Read the index of the newest checkpoint in a region, from its header alone; None when there is none yet."""
    headers = [_read_header(region, slot) for slot in (0, 1)]
    newest = max((h for h in headers if h is not None), key=lambda h: int(h["number"][0]), default=None)
    return None if newest is None else int(newest["index"][0])


def _read_header(region: Region, slot: int) -> Entries | None:
    header = _load(region, _slot_offset(slot, region.shape.slots), 1).view(_HEADER)
    known = int(header["magic"][0]) == _MAGIC and int(header["version"][0]) == _VERSION
    if not known or int(header["count"][0]) > region.shape.slots:
        return None
    return header if int(header["check"][0]) == payload_crc(header.view(np.uint8)[:124]) else None


def _read_slot(region: Region, slot: int) -> Checkpoint | None:
    header = _read_header(region, slot)
    if header is None:
        return None
    offset, count = _slot_offset(slot, region.shape.slots), int(header["count"][0])
    found = _load(region, offset + _BYTES, count).view(_ROW)
    return Checkpoint(header[0], found) if _crc(found) == int(header["rows_crc"][0]) else None


def _load(region: Region, offset: int, count: int) -> Entries:
    length = count * _BYTES
    if length:
        region.invalidate(offset, length)
    return region.data[offset : offset + length].copy().view(_RAW)


# --- rows and windows -------------------------------------------------------------------------------------------------
def _window_seqs(order: LaneOrder, rows: I64) -> I64:
    """Compute the sequence of each slot of these windows: strong: the last W below `expected`; weak: W from `low`."""
    sessions, slots = order.table, np.arange(W)
    first = np.where(sessions.strong[rows], sessions.expected[rows] - W, sessions.low[rows])[:, None]
    seqs: I64 = first + ((slots - first) & (W - 1))
    return seqs


def _rows(order: LaneOrder, rows: I64) -> Entries:
    sessions = order.table
    made = np.zeros(len(rows), dtype=_ROW)
    for name in ("handle", "successor", "state", "strong", "expected", "low", "name", "active_us"):
        made[name] = getattr(sessions, name)[rows]
    seqs = _window_seqs(order, rows)
    windows = sessions.windows
    known = (windows.tag.reshape(-1, W)[rows] == seqs + 1) & (seqs >= 0)
    lost = known & (windows.index.reshape(-1, W)[rows] == LOST)
    made["stored"], made["lost"] = _pack(known & ~lost), _pack(lost)
    return made


def _pack(bits: Flags) -> Entries:
    return np.packbits(bits, axis=1).view("V32")[:, 0] if len(bits) else np.zeros(0, dtype="V32")


def _unpack(packed: Entries) -> Flags:
    plain = np.frombuffer(packed.tobytes(), dtype=np.uint8).reshape(-1, W // 8)
    return np.unpackbits(plain, axis=1).astype(bool)


def restore(order: LaneOrder, checkpoint: Checkpoint, now_us: int) -> None:
    """Fill an empty lane from a checkpoint. Idle times continue as if no time had passed since."""
    header, saved, sessions = checkpoint.header, checkpoint.rows, order.table
    if max(int(header[name]) for name in ("index", "seq", "append_us", "next_handle", "now_us")) >= _NUMBER_MAX:
        raise Corrupt(f"the checkpoint at index {int(header['index'])} has a number above {_NUMBER_MAX - 1}", _DO)
    if len(np.unique(saved["handle"].astype(np.int64) & sessions.mask)) != len(saved):
        raise Corrupt(f"in a checkpoint of {len(saved)} sessions, two need the same row", _DO)
    order.resume(LanePosition(int(header["index"]), int(header["seq"])), int(header["append_us"]))
    strong = order.all_strong | (saved["strong"] != 0)
    active_us = now_us - (int(header["now_us"]) - saved["active_us"].astype(np.int64))
    rows = sessions.restore(saved, strong, active_us)
    sessions.count_on(int(header["next_handle"]))
    _restore_windows(order, rows, saved)


def _restore_windows(order: LaneOrder, rows: I64, saved: Entries) -> None:
    stored, lost, seqs = _unpack(saved["stored"]), _unpack(saved["lost"]), _window_seqs(order, rows)
    order.table.windows.restore(rows, seqs, stored, lost)


def replay(order: LaneOrder, entries: Entries, now_us: int) -> None:
    """Apply ordered entries to the table, in their order."""
    if not len(entries):
        return
    controls = np.flatnonzero(entries["kind"] != EntryKind.BATCH)
    done = 0
    for at in controls.tolist():
        _replay_batches(order, entries[done:at], now_us)
        _replay_control(order, entries[at], now_us)
        done = at + 1
    _replay_batches(order, entries[done:], now_us)
    order.table.follow_lows()
    last = entries[-1]
    after = LanePosition(int(last["index"]) + 1, int(last["seq"]) + int(last["count"]))
    order.resume(after, int(last["append_us"]))


def _replay_batches(order: LaneOrder, entries: Entries, now_us: int) -> None:
    if len(entries):
        _possible(order, int(entries["session_seq"].max()))
        order.table.replay(entries, now_us)


def _replay_control(order: LaneOrder, entry: np.void, now_us: int) -> None:
    table, kind, session = order.table, int(entry["kind"]), int(entry["session"])
    if kind == EntryKind.SESSION_OPEN:
        name, continued, taken, strong = opened_facts(entry)
        strong = order.all_strong or strong
        earlier = table.row_of(continued) if continued is not None else None
        if earlier is not None:
            table.fence(earlier, now_us)  # usually an earlier entry fenced it; after a restart that may be missing
        opened = table.open(session, name, now_us, earlier, taken, strong=strong)
        table.advance(opened, _possible(order, int(entry["session_seq"])))
        return
    row = table.row_of(session)
    if row is None:
        return
    if kind == EntryKind.SESSION_FENCE:
        table.fence(row, now_us)
    elif kind == EntryKind.SESSION_CLOSE:
        table.forget(row)
    elif kind == EntryKind.SKIP:
        first = int(entry["session_seq"])
        table.mark_lost(row, first, first + int(entry["location"]))


def _possible(order: LaneOrder, sequence: int) -> int:
    if sequence > SESSION_SEQUENCE_MAX + 1:
        ring = f"the order ring of topic {order.topic.name} is corrupt"
        raise Corrupt(
            f"{ring}: session sequence {sequence} exceeds the maximum of {SESSION_SEQUENCE_MAX + 1}",
            "restart the cluster",
        )
    return sequence


def learn_positions(order: LaneOrder, entries: Entries) -> None:
    """Learn positions of sequences that the table only knows as stored, from ring entries below the checkpoint.

    A session knows the positions of the sessions that it continues, so each entry also counts for the successors of its
    session.
    """
    successors = {
        continued: int(entry["session"])
        for entry in entries[entries["kind"] == EntryKind.SESSION_OPEN]
        if (continued := opened_facts(entry).continued) is not None
    }
    batches = pick(entries, entries["kind"] == EntryKind.BATCH)
    sessions = batches["session"].astype(np.int64)
    table = order.table
    while len(batches):
        rows = sessions & table.mask
        slots = rows * W + (batches["session_seq"].astype(np.int64) & W_MASK)
        table.windows.learn(table.handle[rows] == sessions, slots, batches)
        if not successors:
            return
        heirs, which = np.unique(sessions, return_inverse=True)
        sessions = np.array([successors.get(heir, -1) for heir in heirs.tolist()], dtype=np.int64)[which]
        batches, sessions = pick(batches, sessions >= 0), sessions[sessions >= 0]
