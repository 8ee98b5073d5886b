"""The sessions of one lane as columns of numbers, and the reorder buffer, where batches of all lanes wait for a gap.

Theory of operation. A session's row is `handle & mask`. Handles grow and are never reused, and the allocator skips
handles whose row is taken. So a lookup is one comparison (`live[row] == handle`), without hashing in the hot path. A
round looks up thousands of sessions with a handful of array reads.

Each row has a window of W slots; sequence s is in slot s mod W. A slot belongs to s iff its `tag` is s + 1. For a
sequence in the log, the slot has index, seq and CRC. For a waiting sequence (strong: s > expected), `index` is its slot
of the reorder buffer. A sequence that enters the window displaces the one W before it, which the publisher settled long
ago. A window is W * 28 bytes; the operating system commits memory only for rows that were ever used.

Each session is strong or weak for life. A strong session's batches keep their submission order: batches after a gap
wait. A weak session never waits. Both kinds may share a lane. The window of a strong session covers the last W
sequences below `expected`. The window of a weak session covers W sequences from `low` on.

A session that continues another inherits its kind and its window, and continues in the same sequence space. The earlier
session is fenced and remembers its successor, so that its holder can ask again when an answer was lost. TAKEN means
that another publisher opened the name, so the earlier holder cannot continue.

Ordering is arithmetic on the columns: other modules read them. Only the classes of this module write them.

The reorder buffer has slots shared by all lanes, and a copy in the fabric. A slot is written before its pending slot is
freed, and zeroed only after its outcome is flushed. So after any crash a waiting batch is in the pending ring, or in
the copy, or has its outcome. A slot that was released in a round may be reused in the same round, because the fabric's
copy is written after the round's outcomes are flushed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from mmap import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from embarcadero.errors import invariant
from embarcadero.fabric.layout import PENDING, SLOTS_OFFSET, Entries, Flags, RegionKind, pick, seal, sealed
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.limits import CEILING_AHEAD_HANDLES, KIB, LINE_BYTES, REGION_HANDLES, SESSION_WINDOW
from embarcadero.types import NO_INDEX, NO_SESSION, EntryKind

FREE, OPEN, FENCED = 0, 1, 2
NEVER: Final = (1 << 63) - 1
"""A time that never comes."""

NO_SESSION_HERE: Final = 1 << 32
"""Value of a row without a session. No session has this handle."""

TAKEN: Final = NO_SESSION - 1
"""Value of `successor`: another publisher opened the session's name."""

LOST: Final = NO_INDEX - 1
"""Value of `index` in a window: the sequence was skipped."""

_LAZY_BYTES_MIN: Final = 64 * KIB
_LED_MAX: Final = 8
W: Final = SESSION_WINDOW
W_MASK: Final = W - 1

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def zeros(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an array of zeros whose memory is committed only when it is written.

    For `np.zeros` the C library may clear freed memory instead. Then all of it is committed, which delays a takeover.
    """
    size = count * np.dtype(dtype).itemsize
    if size < _LAZY_BYTES_MIN:
        return np.zeros(count, dtype)
    return np.frombuffer(mmap(-1, size), dtype)


# --- groups of columns ------------------------------------------------------------------------------------------------
class Windows:
    """Outcomes of the sequences in the windows of all rows, by slot."""

    def __init__(self, rows: int) -> None:
        slots = rows * W
        self.tag: I64 = zeros(slots, dtype=np.int64)
        self.index: U64 = zeros(slots, dtype=np.uint64)
        self.seq: U64 = zeros(slots, dtype=np.uint64)
        self.crc: U32 = zeros(slots, dtype=np.uint32)

    def claim(self, slots: I64) -> Flags:
        """Claim the slots of new batches. Returns which batches are the first with their sequence."""
        numbers = np.arange(len(slots), dtype=np.uint64)
        self.index[slots[::-1]] = numbers[::-1]  # of several stores to one slot the last one remains
        first: Flags = self.index.take(slots) == numbers
        return first

    def claim_all(self, slots: I64) -> U64 | None:
        """Claim the slots of batches that are all the first. Returns their numbers, now in their slots; None if not."""
        numbers = np.arange(len(slots), dtype=np.uint64)
        self.index[slots] = numbers
        return numbers if np.array_equal(self.index.take(slots), numbers) else None

    def store(self, slots: I64, seqs: I64, index: U64, seq: U64, crcs: U32) -> None:
        """Note the positions of these sequences."""
        self.tag[slots], self.index[slots], self.seq[slots], self.crc[slots] = seqs + 1, index, seq, crcs

    def learn(self, mine: Flags, slots: I64, batches: Entries) -> None:
        """Note the positions of ordered batches that the windows only know as stored."""
        stored = self.tag[slots] == batches["session_seq"].astype(np.int64) + 1
        known = mine & stored & (self.index[slots] == NO_INDEX)
        at = slots[known]
        self.index[at], self.seq[at], self.crc[at] = (batches[name][known] for name in ("index", "seq", "crc"))

    def restore(self, rows: I64, seqs: I64, stored: Flags, lost: Flags) -> None:
        """Fill whole windows. Positions of stored sequences are unknown."""
        self.tag.reshape(-1, W)[rows] = np.where(stored | lost, seqs + 1, 0)
        self.index.reshape(-1, W)[rows] = np.where(lost, np.uint64(LOST), np.uint64(NO_INDEX))

    def clear(self, slots: I64 | slice) -> None:
        """Clear these slots."""
        self.tag[slots] = 0

    def copy(self, source: int, target: int) -> None:
        """Give one row the window of another."""
        mine, theirs = self.of(target), self.of(source)
        for column in (self.tag, self.index, self.seq, self.crc):
            column[mine] = column[theirs]

    @staticmethod
    def of(row: int) -> slice:
        """The slots of a row."""
        return slice(row * W, row * W + W)


class WaitingSessions:
    """Which sessions have batches in the reorder buffer."""

    def __init__(self, rows: int) -> None:
        self.total = 0  # batches of all sessions
        self.count: I64 = zeros(rows, dtype=np.int64)
        self.gap_us: I64 = np.full(rows, NEVER, dtype=np.int64)  # since when a gap is open

    def begin(self, rows: I64, now_us: int) -> None:
        """Count one more waiting batch for each of these rows (a repeated row: several)."""
        np.add.at(self.count, rows, 1)
        self.total += len(rows)
        self.gap_us[rows] = np.minimum(self.gap_us[rows], now_us)

    def end(self, rows: I64) -> None:
        """Count one waiting batch less for each of these rows (a repeated row: several)."""
        np.subtract.at(self.count, rows, 1)
        self.total -= len(rows)

    def end_all(self, row: int) -> None:
        """Count no waiting batch of this session any more."""
        self.total -= int(self.count[row])
        self.count[row], self.gap_us[row] = 0, NEVER

    def restart_gaps(self, rows: I64, now_us: int) -> bool:
        """Restart the gaps of sessions in which batches still wait. True if there are any."""
        still = self.count.take(rows) > 0
        self.gap_us[rows] = np.where(still, now_us, NEVER)
        return bool(still.any())

    def oldest(self) -> int:
        """The row with the oldest gap."""
        return int(self.gap_us.argmin())

    @property
    def oldest_us(self) -> int:
        """When the oldest gap opened; NEVER without one."""
        return int(self.gap_us.min())


class Connections:
    """The brokers that have a connection of each session."""

    def __init__(self, rows: int) -> None:
        self.brokers: dict[int, set[int]] = {}  # row -> region handles
        self.departed_us: I64 = np.full(rows, NEVER, dtype=np.int64)  # since when no broker has a connection

    def attach(self, row: int, origin: int) -> None:
        """Note that a broker has a connection of this session."""
        self.brokers.setdefault(row, set()).add(origin)
        self.departed_us[row] = NEVER

    def detach(self, row: int, origin: int, now_us: int) -> bool:
        """Note that a broker has no connection of this session any more. True if no other broker has one."""
        brokers = self.brokers.get(row, set())
        brokers.discard(origin)
        if not brokers:
            self.departed_us[row] = now_us
        return not brokers

    def rows_of(self, origin: int) -> list[int]:
        """The sessions of which a broker has a connection."""
        return [row for row, brokers in self.brokers.items() if origin in brokers]

    def forget(self, row: int) -> None:
        """Forget a session that is gone."""
        self.departed_us[row] = NEVER
        self.brokers.pop(row, None)


class Peers:
    """The address that opened each session; 0: unknown, as after a takeover."""

    def __init__(self, rows: int) -> None:
        self.address: U32 = zeros(rows, dtype=np.uint32)
        self.counts: Counter[int] = Counter()  # number of rows of each address

    def note(self, row: int, address: int) -> None:
        """Note the address that opened a session."""
        self.address[row] = address
        if address:
            self.counts[address] += 1

    def forget(self, row: int) -> None:
        """Forget a session that is gone."""
        if address := int(self.address[row]):
            self.counts[address] -= 1
            if not self.counts[address]:
                del self.counts[address]
            self.address[row] = 0

    def are(self, rows: I64, address: int) -> Flags:
        """Flag the rows of an address; address 0 stands for all addresses."""
        found: Flags = (self.address[rows] == address) | (address == 0)
        return found


class SessionTable:
    """Rows of sessions."""

    def __init__(self, sessions: int, rows: int | None = None) -> None:
        """Make a table for at most `sessions` sessions. `rows` makes it as large as another table."""
        self.sessions_max = sessions
        self.mask = (1 << (sessions if rows is None else rows).bit_length()) - 1  # one row is always free
        count = self.capacity
        self.handle: I64 = np.full(count, NO_SESSION_HERE, dtype=np.int64)
        self.live: I64 = np.full(count, NO_SESSION_HERE, dtype=np.int64)  # the handle while the session is open
        self.state = zeros(count, dtype=np.uint8)
        self.expected: I64 = zeros(count, dtype=np.int64)
        self.low: I64 = zeros(count, dtype=np.int64)
        self.strong: Flags = zeros(count, dtype=np.bool_)  # its batches keep their submission order
        self.name: U64 = zeros(count, dtype=np.uint64)
        self.successor: U32 = np.full(count, NO_SESSION, dtype=np.uint32)
        self.active_us: I64 = zeros(count, dtype=np.int64)  # when the row last changed
        self.windows, self.waiting = Windows(count), WaitingSessions(count)
        self.connections, self.peers = Connections(count), Peers(count)
        self.by_name: dict[int, int] = {}  # hash of a name -> handle of its newest session
        self.next_handle = 0
        self.handles_reserved = TAKEN  # no handle from here on may be handed out; lanes without replicas have all
        self.used = 0

    @property
    def capacity(self) -> int:
        """Number of rows: more than the maximum number of sessions."""
        return self.mask + 1

    # --- handles ------------------------------------------------------------------------------------------------------
    def row_of(self, handle: int) -> int | None:
        """The row of a known session, open or fenced."""
        row = handle & self.mask
        return row if int(self.handle[row]) == handle else None

    def free_handle(self) -> int | None:
        """Find the next handle whose row is free; None when all handles are used up."""
        start = self.next_handle & self.mask
        free = np.flatnonzero(self.state == FREE)
        at = int(free[np.searchsorted(free, start) % len(free)])
        handle = self.next_handle + ((at - start) & self.mask)
        return handle if handle < TAKEN else None

    def reserve_handles(self, below: int) -> None:
        """Allow handles below this one: the store has reserved them."""
        self.handles_reserved = min(TAKEN, below)

    def count_on(self, handle: int) -> None:
        """Hand out no handle below this one, because a session had it."""
        self.next_handle = max(self.next_handle, handle)

    def pass_over(self, reserved: int) -> None:
        """Hand out no handle below `reserved`, because it may belong to a lost session.

        The rows continue in turn, for a table of any size. So the handles in the log take no more rows than without
        skipped handles, and a table can be made from the log alone.
        """
        if reserved > self.next_handle:
            span = max(self.capacity, CEILING_AHEAD_HANDLES)
            self.next_handle = reserved + (self.next_handle - reserved) % span

    # --- eviction -----------------------------------------------------------------------------------------------------
    def has_its_share(self, peer: int, share: float) -> bool:
        """Whether an address has its maximum of rows: a share of the rows that are not of unknown addresses.

        So one address never fills the table, not even together with its sessions from before a takeover.
        """
        counts = self.peers.counts
        return peer != 0 and counts[peer] >= max(1, int(share * (self.sessions_max - (self.used - counts.total()))))

    def oldest_fenced(self, but: Sequence[int], peer: int = 0) -> int | None:
        """Find the fenced session that was quiet for longest, except the rows in `but`. Returns its row.

        Sessions that can still be continued by their name are chosen last. A session that was already continued counts
        like any other: its publisher may not know that yet. With `peer`, only sessions of this address.
        """
        fenced = np.flatnonzero(self.state == FENCED)
        fenced = fenced[~np.isin(fenced, but) & self.peers.are(fenced, peer)]
        if not len(fenced):
            return None
        return int(fenced[np.lexsort((self.active_us[fenced], self.awaited(fenced)))[0]])

    def oldest_abandoned(self, before_us: int, peer: int = 0) -> int | None:
        """Find the session that has had no connection for longest, and since before a time. Returns its row.

        Sessions with a name stay, since their publishers may continue them much later. Sessions with waiting batches
        stay too. With `peer`, only sessions of this address.
        """
        departed_us = self.connections.departed_us
        gone = np.flatnonzero((departed_us <= before_us) & (self.state == OPEN) & (self.name == 0))
        gone = gone[(self.waiting.count[gone] == 0) & self.peers.are(gone, peer)]
        return int(gone[np.argmin(departed_us[gone])]) if len(gone) else None

    def awaited(self, rows: I64) -> Flags:
        """Flag the rows of sessions that can still be continued by their name."""
        named: Flags = (self.name[rows] != 0) & (self.successor[rows] == NO_SESSION)
        return named

    # --- the life of one session (control rate) -----------------------------------------------------------------------
    def open(
        self,
        handle: int,
        name: int,
        now_us: int,
        earlier: int | None,
        taken: bool,
        *,
        strong: bool = False,
        peer: int = 0,
    ) -> int:
        """Fill the row of a new session; `earlier` is the row that it continues. Returns its row."""
        row = handle & self.mask
        self.strong[row] = strong
        self.peers.note(row, peer)
        self.used += 1
        self.handle[row] = self.live[row] = handle
        self.state[row], self.active_us[row] = OPEN, now_us
        self.count_on(handle + 1)
        self.expected[row], self.low[row] = 0, 0
        self.windows.clear(self.windows.of(row))
        if earlier is not None:
            self._inherit(row, earlier)
            name = name or int(self.name[earlier])
            self.successor[earlier], self.active_us[earlier] = TAKEN if taken else handle, now_us
        self.name[row] = name
        if name:
            self.by_name[name] = handle
        return row

    def _inherit(self, row: int, earlier: int) -> None:
        self.expected[row], self.low[row] = self.expected[earlier], self.low[earlier]
        self.windows.copy(earlier, row)

    def advance(self, row: int, expected: int) -> None:
        """Move a session to the sequence at which it was opened. It never returns to earlier sequences."""
        if expected > self.expected[row]:
            self.expected[row] = self.low[row] = expected

    def mark_lost(self, row: int, start: int, stop: int) -> None:
        """Mark the sequences [start, stop) of a session as lost. The session continues after them."""
        lost = np.arange(start, stop)
        slots = row * W + (lost & W_MASK)
        self.windows.tag[slots], self.windows.index[slots] = lost + 1, LOST
        self.expected[row] = stop

    def fence(self, row: int, now_us: int) -> None:
        """Accept no more batches of this session. Its waiting batches must be removed before."""
        self.state[row], self.live[row], self.active_us[row] = FENCED, NO_SESSION_HERE, now_us

    def forget(self, row: int) -> None:
        """Forget a session and free its row."""
        name, handle = int(self.name[row]), int(self.handle[row])
        if self.by_name.get(name) == handle:
            del self.by_name[name]
        self.handle[row] = self.live[row] = NO_SESSION_HERE
        self.state[row], self.successor[row], self.name[row] = FREE, NO_SESSION, 0
        self.waiting.end_all(row)
        self.connections.forget(row)
        self.peers.forget(row)
        self.used -= 1

    def newest(self, row: int) -> int | None:
        """Find the last in the chain of sessions that continue this one; None when it is gone. Check it for TAKEN."""
        found: int | None = row
        while found is not None and int(self.successor[found]) < TAKEN:
            found = self.row_of(int(self.successor[found]))
        return found

    def before(self, row: int) -> list[int]:
        """Find the sessions before this one in its chain, oldest first, but only the last few.

        No caller needs more, and each step costs a pass over the table.
        """
        chain: list[int] = []
        while len(chain) < _LED_MAX and len(found := np.flatnonzero(self.successor == np.uint32(self.handle[row]))):
            row = int(found[0])
            chain.insert(0, row)
        return chain

    # --- many at once (each round) ------------------------------------------------------------------------------------
    def touch(self, rows: I64, now_us: int) -> None:
        """Note that these sessions are in use now."""
        self.active_us[rows] = now_us

    def raise_lows(self, rows: I64, lows: I64) -> None:
        """Move the windows of weak sessions up to these sequences."""
        np.maximum.at(self.low, rows, lows)

    def expect_after(self, rows: I64, seqs: I64) -> None:
        """Expect the sequence after the highest of these, which may be in any order."""
        np.maximum.at(self.expected, rows, seqs + 1)

    def expect_next(self, rows: I64, seqs: I64) -> None:
        """Expect the sequence after these, which ascend in each session: the last store remains."""
        self.expected[rows] = seqs + 1

    def append_one(self, row: int, low: int, sequence: int, index: int, seq: int, crc: int, now_us: int) -> None:
        """Note the position of one batch: the next of a strong session (`low` is -1), or a new one of a weak session.

        From now on the window of a weak session begins at `low`, which is not below its previous start.
        """
        windows, slot, after = self.windows, row * W + (sequence & W_MASK), sequence + 1
        if low < 0:
            self.expected[row] = after
        else:
            self.low[row], self.expected[row] = low, max(self.expected.item(row), after)
        self.active_us[row] = now_us
        windows.tag[slot], windows.index[slot], windows.seq[slot], windows.crc[slot] = after, index, seq, crc

    def waiting_of(self, rows: npt.NDArray[Any]) -> tuple[I64, I64, I64]:
        """Find all waiting batches of these (distinct) sessions: row, sequence, and slot of the reorder buffer."""
        tags = self.windows.tag.reshape(-1, W)[rows]
        at, slot = np.nonzero(tags > self.expected[rows][:, None])
        owner = rows[at]
        return owner, tags[at, slot] - 1, self.windows.index.take(owner * W + slot).astype(np.int64)

    def hold(self, rows: I64, seqs: I64, buffered: I64, crcs: U32, now_us: int) -> None:
        """Note that batches begin to wait in these slots of the reorder buffer."""
        slots = rows * W + (seqs & W_MASK)
        self.windows.tag[slots], self.windows.index[slots], self.windows.crc[slots] = seqs + 1, buffered, crcs
        self.waiting.begin(rows, now_us)

    def drop_waiting(self, row: int) -> I64:
        """Remove all waiting batches of a session. Returns their slots of the reorder buffer."""
        _, seqs, buffered = self.waiting_of(np.array([row]))
        self.windows.clear(row * W + (seqs & W_MASK))
        self.waiting.end_all(row)
        return buffered

    # --- restore and replay -------------------------------------------------------------------------------------------
    def restore(self, saved: Entries, strong: Flags, active_us: I64) -> I64:
        """Fill an empty table with the rows of a checkpoint, without their windows. Returns the row numbers."""
        rows = saved["handle"].astype(np.int64) & self.mask
        self.handle[rows], self.successor[rows], self.state[rows] = saved["handle"], saved["successor"], saved["state"]
        self.expected[rows], self.low[rows], self.name[rows] = saved["expected"], saved["low"], saved["name"]
        self.strong[rows], self.active_us[rows] = strong, active_us
        self.live[rows] = np.where(saved["state"] == OPEN, saved["handle"].astype(np.int64), NO_SESSION_HERE)
        self.used = len(rows)
        newest = saved["successor"] == NO_SESSION
        for name, handle in zip(saved["name"][newest].tolist(), saved["handle"][newest].tolist(), strict=True):
            if name:
                self.by_name[name] = handle
        return rows

    def replay(self, entries: Entries, now_us: int) -> None:
        """Apply ordered batches of the log."""
        rows, seqs = entries["session"].astype(np.int64) & self.mask, entries["session_seq"].astype(np.int64)
        slots = rows * W + (seqs & W_MASK)
        self.windows.store(slots, seqs, entries["index"], entries["seq"], entries["crc"])
        self.expect_after(rows, seqs)
        self.touch(rows, now_us)

    def follow_lows(self) -> None:
        """Move the windows of weak sessions up. `low` is at most a window behind, and order entries do not have it."""
        rows = np.flatnonzero(self.state)  # few of very many rows: the memory of the others is not touched
        rows = rows[~self.strong[rows]]
        if len(rows):
            self.low[rows] = np.maximum(self.low[rows], self.expected[rows] - W)

    def assume_connected(self, origin: int) -> None:
        """Consider all open sessions connected through `origin`: their real connections are unknown."""
        for row in np.flatnonzero(self.state == OPEN).tolist():
            self.connections.attach(row, origin)


# --- the reorder buffer -----------------------------------------------------------------------------------------------
Slots = npt.NDArray[np.int64]

_NONE: Final[Slots] = np.empty(0, dtype=np.int64)
_LINE = np.dtype(f"V{LINE_BYTES}")
_FEW = 256
_FIRST = 2_048
"""Free slots are searched here first. Usually few batches wait, so the used slots stay close together."""

_FLUSH_ACROSS = 16
"""Flushing up to this many untouched lines between two slots is cheaper than another call."""


class ReorderBuffer:
    """The sequencer's copy of the slots. Dirty slots differ from the fabric."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.entries: Entries = np.zeros(slots, dtype=PENDING)
        self._taken = np.zeros(slots, dtype=bool)
        self._dirty: list[Slots] = []
        self.used = 0
        self.by_origin = np.zeros(REGION_HANDLES + 1, dtype=np.int64)

    def resize(self, slots: int) -> None:
        """Change the number of slots, while no batch waits."""
        invariant(not self.used, "no batch waits while the reorder buffer is made larger")
        self.slots = slots
        self.entries = np.zeros(slots, dtype=PENDING)
        self._taken = np.zeros(slots, dtype=bool)
        self._dirty.clear()

    @property
    def free(self) -> int:
        """Slots that are free now."""
        return self.slots - self.used

    def hold(self, entries: Entries) -> Slots:
        """Put entries into free slots, of which there must be enough."""
        invariant(len(entries) <= self.free, "waiting batches fit their slots")
        slots = (~self._taken[:_FIRST]).nonzero()[0]
        if len(slots) < len(entries):
            slots = (~self._taken).nonzero()[0]
        slots = slots[: len(entries)]
        self.entries.view(_LINE)[slots] = entries.view(_LINE)
        self._taken[slots] = True
        self._dirty.append(slots)
        self.used += len(slots)
        np.add.at(self.by_origin, entries["origin"], 1)
        return slots

    def release(self, slots: Slots) -> None:
        """Free the slots of batches that have their outcome."""
        self._taken[slots] = False
        self._dirty.append(slots)
        self.used -= len(slots)
        np.subtract.at(self.by_origin, self.entries["origin"][slots], 1)

    def of_lane(self, lane: int) -> Slots:
        """Slots of all batches of a lane."""
        return np.flatnonzero(self._taken & (self.entries["lane"] == lane))

    def take_dirty(self) -> tuple[Slots, Slots]:
        """Return slots whose copy must be written, and slots whose copy must be zeroed, since the last call."""
        if not self._dirty:
            return _NONE, _NONE
        dirty = np.concatenate(self._dirty)
        self._dirty.clear()
        if len(dirty) < _FEW:
            dirty = np.unique(dirty)
        else:  # for many slots, flags are faster than sorting
            flags = np.zeros(self.slots, dtype=bool)
            flags[dirty] = True
            dirty = flags.nonzero()[0]
        taken = self._taken[dirty]
        return dirty[taken], dirty[~taken]


class ReorderRegion:
    """The fabric's copy: `epoch-<e>/held`."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lines = region.data[SLOTS_OFFSET : SLOTS_OFFSET + region.shape.slots * LINE_BYTES].view(_LINE)

    def write(self, slots: Slots, entries: Entries) -> None:
        """Copy these entries into these (ascending) slots, and flush."""
        if not len(slots):
            return
        self._lines[slots] = seal(entries).view(_LINE)
        self._flush(slots)

    def zero(self, slots: Slots) -> None:
        """Clear these (ascending) slots, and flush."""
        if not len(slots):
            return
        self._lines[slots] = np.zeros(1, dtype=_LINE)
        self._flush(slots)

    def _flush(self, slots: Slots) -> None:
        cuts = np.flatnonzero(np.diff(slots) > _FLUSH_ACROSS) + 1
        for run in np.split(slots, cuts):
            first, last = int(run[0]), int(run[-1])
            self._region.flush(SLOTS_OFFSET + first * LINE_BYTES, (last - first + 1) * LINE_BYTES)


def create_reorder_region(fabric: Fabric, name: str, slots: int) -> ReorderRegion:
    """Make the region of an epoch's waiting batches."""
    size = SLOTS_OFFSET + slots * LINE_BYTES
    return ReorderRegion(fabric.create(name, Shape(RegionKind.HELD, size, slots, LINE_BYTES)))


def read_waiting(fabric: Fabric, name: str) -> Entries:
    """Read the valid waiting batches of an earlier sequencer."""
    region = fabric.attach(name)
    stop = SLOTS_OFFSET + region.shape.slots * LINE_BYTES
    require_shape(region, stop <= region.shape.size)
    region.invalidate(SLOTS_OFFSET, region.shape.slots * LINE_BYTES)
    there = region.data[SLOTS_OFFSET:stop].view(PENDING)
    entries = pick(there, there["kind"] == EntryKind.BATCH)  # only these few are copied and checked
    return pick(entries, sealed(entries) & (entries["kind"] == EntryKind.BATCH))
