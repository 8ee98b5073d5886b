"""The sessions of one lane, as columns of numbers: a round looks up thousands of them with a handful of array reads.

Theory of operation. A session's row is `handle & mask`: handles grow and are never reused, and the allocator skips
those whose row is taken, so a lookup is one comparison (`live[row] == handle`), without hashing in the hot path.

Each row has a window of W slots; sequence s lives in slot s mod W. A slot belongs to s iff its `tag` is s + 1. For a
sequence in the log, the slot has index, seq and CRC; for one that waits (strong: s > expected), `index` is its
held slot. A sequence that enters the window displaces the one W before it, which the publisher settled long ago.
A window is W * 28 bytes; the operating system commits memory only for rows that were ever used.

Each session is strong or weak for life. A strong session's batches keep their submission order: those behind a gap
wait. A weak session never waits. Both kinds may share a lane. A window covers the last W sequences below `expected`
of a strong session, and W sequences from `low` on of a weak one.

A session that continues another inherits its kind and its window and counts on in the same sequence space. The earlier
one is fenced and remembers its successor, so that its holder can ask again when an answer was lost; TAKEN means that
another publisher opened the name, and the earlier holder is out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from mmap import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from embarcadero.limits import CEILING_AHEAD_HANDLES, KIB, SESSION_WINDOW
from embarcadero.types import NO_INDEX, NO_SESSION

FREE, OPEN, FENCED = 0, 1, 2
NEVER: Final = (1 << 63) - 1
"""A time that does not come."""

NOBODY: Final = 1 << 32
"""A handle that no session has."""

TAKEN: Final = NO_SESSION - 1
"""As a successor: somebody else opened the session's name."""

LOST: Final = NO_INDEX - 1
"""As an index in a window: the sequence was skipped."""

_LAZY_BYTES_MIN: Final = 64 * KIB
_LED_MAX: Final = 8
W: Final = SESSION_WINDOW
W_MASK: Final = W - 1

Ints = npt.NDArray[np.int64]


def zeros(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros for which memory is committed when it is written to, and not before, however large the array is.

    The C library may clear freed memory instead, and the system gives memory for all of it: a takeover waits for that.
    """
    size = count * np.dtype(dtype).itemsize
    if size < _LAZY_BYTES_MIN:
        return np.zeros(count, dtype)
    return np.frombuffer(mmap(-1, size), dtype)


class SessionTable:
    """Rows of sessions. Columns are public: ordering is arithmetic on them."""

    def __init__(self, sessions: int) -> None:
        self.sessions_max = sessions
        self.capacity = 1 << sessions.bit_length()  # more than there may be sessions: one row is always free
        self.mask = self.capacity - 1
        rows, slots = self.capacity, self.capacity * W
        self.handle = np.full(rows, NOBODY, dtype=np.int64)
        self.live = np.full(rows, NOBODY, dtype=np.int64)  # the handle while the session is open
        self.state = zeros(rows, dtype=np.uint8)
        self.expected: Ints = zeros(rows, dtype=np.int64)
        self.low: Ints = zeros(rows, dtype=np.int64)
        self.strong = zeros(rows, dtype=np.bool_)  # its batches keep their submission order
        self.name = zeros(rows, dtype=np.uint64)
        self.successor = np.full(rows, NO_SESSION, dtype=np.uint32)
        self.active_us = zeros(rows, dtype=np.int64)  # when the row last changed
        self.gap_us = np.full(rows, NEVER, dtype=np.int64)  # since when a gap is open
        self.departed_us = np.full(rows, NEVER, dtype=np.int64)  # since when no broker has a connection of it
        self.held = zeros(rows, dtype=np.int64)  # how many of its batches wait
        self.peer = zeros(rows, dtype=np.uint32)  # the address that opened it; 0: unknown, as after a takeover
        self.by_peer: Counter[int] = Counter()  # how many rows each address has
        self.tag = zeros(slots, dtype=np.int64)
        self.index = zeros(slots, dtype=np.uint64)
        self.seq = zeros(slots, dtype=np.uint64)
        self.crc = zeros(slots, dtype=np.uint32)
        self.attached: dict[int, set[int]] = {}  # row -> region handles of brokers that have a connection of it
        self.by_name: dict[int, int] = {}  # hash of a name -> handle of its newest session
        self.next_handle = 0
        self.handles_reserved = TAKEN  # no handle from here on may be handed out; lanes without replicas have all
        self.used = 0
        self.waiting = 0  # batches of all sessions that wait

    # --- one session (control rate) -----------------------------------------------------------------------------------
    def row_of(self, handle: int) -> int | None:
        """The row of a known session, open or fenced."""
        row = handle & self.mask
        return row if int(self.handle[row]) == handle else None

    def free_handle(self) -> int | None:
        """The next handle whose row is free; None when all handles are used up."""
        start = self.next_handle & self.mask
        free = np.flatnonzero(self.state == FREE)
        at = int(free[np.searchsorted(free, start) % len(free)])
        handle = self.next_handle + ((at - start) & self.mask)
        return handle if handle < TAKEN else None

    def pass_over(self, reserved: int) -> None:
        """Handles below `reserved` may belong to sessions that are lost: they are never handed out again.

        The rows go on in turn, in a table of any size: the handles of the log take no more room than if none were left
        out, so that a table can be made of the log alone.
        """
        if reserved > self.next_handle:
            span = max(self.capacity, CEILING_AHEAD_HANDLES)
            self.next_handle = reserved + (self.next_handle - reserved) % span

    def has_its_share(self, peer: int, share: float) -> bool:
        """Whether an address has as many rows as it may have: a share of those that are not of unknown addresses.

        So one address never fills the table, not even with what it left behind before a takeover.
        """
        known = self.by_peer.total()
        return peer != 0 and self.by_peer[peer] >= max(1, int(share * (self.sessions_max - (self.used - known))))

    def oldest_fenced(self, but: Sequence[int], peer: int = 0) -> int | None:
        """The row of the fenced session that was quiet for longest, one to come back only at last; none of `but`.

        One that was continued is as good as any other: its publisher may not have heard of it yet. `peer`: only of
        this address.
        """
        fenced = np.flatnonzero(self.state == FENCED)
        fenced = fenced[~np.isin(fenced, but) & self._are_of(fenced, peer)]
        if not len(fenced):
            return None
        return int(fenced[np.lexsort((self.active_us[fenced], self.awaited(fenced)))[0]])

    def oldest_abandoned(self, before_us: int, peer: int = 0) -> int | None:
        """The row of the session that has had no connection for longest, and since before a time.

        Sessions with a name stay: their publishers may continue them much later. So do sessions with batches that wait.
        `peer`: only of this address.
        """
        gone = np.flatnonzero((self.departed_us <= before_us) & (self.state == OPEN) & (self.name == 0))
        gone = gone[(self.held[gone] == 0) & self._are_of(gone, peer)]
        return int(gone[np.argmin(self.departed_us[gone])]) if len(gone) else None

    def _are_of(self, rows: Ints, peer: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self.peer[rows] == peer) | (peer == 0)
        return found

    def awaited(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which of these may still be continued by their name."""
        named: npt.NDArray[np.bool_] = (self.name[rows] != 0) & (self.successor[rows] == NO_SESSION)
        return named

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
        self.strong[row], self.peer[row] = strong, peer
        if peer:
            self.by_peer[peer] += 1
        self.used += 1
        self.handle[row] = self.live[row] = handle
        self.state[row], self.active_us[row] = OPEN, now_us
        self.next_handle = max(self.next_handle, handle + 1)
        window, self.expected[row], self.low[row] = self.window(row), 0, 0
        self.tag[window] = 0
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
        mine, theirs = self.window(row), self.window(earlier)
        for column in (self.tag, self.index, self.seq, self.crc):
            column[mine] = column[theirs]

    def advance(self, row: int, expected: int) -> None:
        """A session that was opened at a sequence goes on there, and never comes back to those before it."""
        if expected > self.expected[row]:
            self.expected[row] = self.low[row] = expected

    def fence(self, row: int, now_us: int) -> None:
        """No more batches of this session. What waited was taken out before."""
        self.state[row], self.live[row], self.active_us[row] = FENCED, NOBODY, now_us

    def forget(self, row: int) -> None:
        """The session is gone; its row is free."""
        name, handle = int(self.name[row]), int(self.handle[row])
        if self.by_name.get(name) == handle:
            del self.by_name[name]
        self.handle[row] = self.live[row] = NOBODY
        self.state[row], self.successor[row], self.name[row] = FREE, NO_SESSION, 0
        self.gap_us[row] = self.departed_us[row] = NEVER
        self.attached.pop(row, None)
        self.used -= 1
        if peer := int(self.peer[row]):
            self.by_peer[peer] -= 1
            if not self.by_peer[peer]:
                del self.by_peer[peer]
            self.peer[row] = 0

    def newest(self, row: int) -> int | None:
        """The last in the chain of sessions that continue this one; None when that one is gone. Check for TAKEN."""
        found: int | None = row
        while found is not None and int(self.successor[found]) < TAKEN:
            found = self.row_of(int(self.successor[found]))
        return found

    def before(self, row: int) -> list[int]:
        """The rows of those that led to this session, each continued by the next one, the oldest first; of many, a few.

        Nobody looks for more: each look costs a pass over the table.
        """
        chain: list[int] = []
        while len(chain) < _LED_MAX and len(found := np.flatnonzero(self.successor == np.uint32(self.handle[row]))):
            row = int(found[0])
            chain.insert(0, row)
        return chain

    def window(self, row: int) -> slice:
        """The window's slots of a row."""
        return slice(row * W, row * W + W)

    # --- many at once -------------------------------------------------------------------------------------------------
    def held_of(self, rows: npt.NDArray[Any]) -> tuple[Ints, Ints, Ints]:
        """All batches of these (distinct) sessions that wait: (row, sequence, held slot) of each."""
        tags = self.tag.reshape(-1, W)[rows]
        at, slot = np.nonzero(tags > self.expected[rows][:, None])
        owner = rows[at]
        return owner, tags[at, slot] - 1, self.index.take(owner * W + slot).astype(np.int64)

    def hold(self, rows: Ints, seqs: Ints, held_slots: Ints, crcs: npt.NDArray[np.uint32]) -> None:
        """Batches begin to wait in these held slots."""
        slots = rows * W + (seqs & W_MASK)
        self.tag[slots], self.index[slots], self.crc[slots] = seqs + 1, held_slots, crcs
        np.add.at(self.held, rows, 1)
        self.waiting += len(rows)

    def release(self, rows: Ints) -> None:
        """One batch of each of these sessions (repeated rows: several) waits no longer."""
        np.subtract.at(self.held, rows, 1)
        self.waiting -= len(rows)

    def drop_held(self, row: int) -> Ints:
        """Take out everything that waits in a session. Returns the held slots."""
        _, seqs, slots = self.held_of(np.array([row]))
        self.tag[row * W + (seqs & W_MASK)] = 0
        self.waiting -= int(self.held[row])
        self.held[row], self.gap_us[row] = 0, NEVER
        return slots
