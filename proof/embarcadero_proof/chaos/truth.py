"""Compare, as columns, the records that a reader must find after faults with those that it did find.

- Every acked record is at the position in its ack, or anywhere if the ack had none.
- No record is there twice (orders 2 and 5).
- Each strong stream's records are in the order of sending, without a hole below the last one (orders 2 and 5).
- Records that were read before are still there, at the same positions: no prefix changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.types import Order, Position
from embarcadero_proof.chaos.streams import RECORD

_WORDS = np.dtype([("stream", "<u4"), ("number", "<u8")])

Acked = Mapping[int, Mapping[int, Position | None]]
"""Acks: stream -> record -> position."""


@dataclass(slots=True)
class Seen:
    """A topic as read: lane, seq, and the publisher of each record, with the record's number."""

    lane: npt.NDArray[np.uint64]
    seq: npt.NDArray[np.uint64]
    stream: npt.NDArray[np.uint64]
    number: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """One number for each record's position: there are few lanes, and seqs are far below 2^48."""
        return self.lane << np.uint64(48) | self.seq

    @property
    def names(self) -> npt.NDArray[np.uint64]:
        """One number for each record's sender and number."""
        return self.stream << np.uint64(48) | self.number


def seen(table: pa.Table, lane: int) -> Seen:
    """Return the columns of a table from `log.read`; `lane` is for a topic with one lane."""
    words = np.concatenate([np.zeros(0, dtype=_WORDS), *map(_heads, table.column("value").chunks)])
    lanes = table.column("_lane").to_numpy() if "_lane" in table.column_names else np.full(len(table), lane)
    return Seen(
        lanes.astype(np.uint64), table.column("_seq").to_numpy().astype(np.uint64),
        words["stream"].astype(np.uint64), words["number"].astype(np.uint64),
    )  # fmt: skip


def _heads(values: pa.BinaryArray) -> npt.NDArray[np.void]:
    """Return the first bytes of each value: its publisher, and its number there."""
    _, ends, data = values.buffers()
    starts = np.frombuffer(ends, dtype=np.int32)[values.offset : values.offset + len(values)]
    heads = np.frombuffer(data, dtype=np.uint8)[starts[:, None] + np.arange(RECORD.size)]
    return np.ascontiguousarray(heads).view(_WORDS)[:, 0]


@dataclass(slots=True)
class Truth:
    """The truth about one topic: its acks, and the records of the last read.

    `weak`: streams of publishers that were opened with `order="total"`; in orders 2 and 5 all others are strong.
    """

    topic: str
    order: int
    weak: frozenset[int] = frozenset()
    before: Seen | None = None
    checked: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, acked: Acked, now: Seen) -> None:
        """Check the records read now against the acks from before the read."""
        self._check_named(acked, now)
        self._check_unnamed(acked, now)
        if self.order >= Order.TOTAL:
            self._check_once(now)
            self._check_order(now)
        self._check_prefix(now)
        self.before = now

    def _complain(self, text: str) -> None:
        self.problems.append(f"{self.topic}: {text}")

    def _check_named(self, acked: Acked, now: Seen) -> None:
        order = np.argsort(now.keys)
        keys, names = now.keys[order], now.names[order]
        for stream, answers in acked.items():
            positions = {number: position for number, position in answers.items() if position is not None}
            wanted_keys = np.array([p.lane << 48 | p.seq for p in positions.values()], dtype=np.uint64)
            wanted = np.array([stream << 48 | number for number in positions], dtype=np.uint64)
            at = np.searchsorted(keys, wanted_keys)
            there = at < len(keys)
            there[there] = (keys[at[there]] == wanted_keys[there]) & (names[at[there]] == wanted[there])
            self.checked += len(wanted_keys)
            for missing in np.flatnonzero(~there)[:3].tolist():
                number = list(positions)[missing]
                self._complain(f"stream {stream}, record {number}, acked at {positions[number]}, is not there")

    def _check_unnamed(self, acked: Acked, now: Seen) -> None:
        for stream, answers in acked.items():
            numbers = [number for number, position in answers.items() if position is None]
            wanted = np.array([stream << 48 | number for number in numbers], dtype=np.uint64)
            self.checked += len(wanted)
            for missing in np.flatnonzero(~np.isin(wanted, now.names))[:3].tolist():
                self._complain(f"stream {stream}, record {numbers[missing]}, acked without a position, is not there")

    def _check_once(self, now: Seen) -> None:
        names, counts = np.unique(now.names, return_counts=True)
        for name in names[counts > 1][:3].tolist():
            self._complain(f"stream {name >> 48}, record {name & (1 << 48) - 1} is there more than once")

    def _check_order(self, now: Seen) -> None:
        for stream in sorted({*np.unique(now.stream).tolist()} - self.weak):
            numbers = now.number[now.stream == stream]
            wrong = np.flatnonzero(numbers != np.arange(len(numbers), dtype=np.uint64))
            if len(wrong):
                self._complain(f"stream {stream}: record {numbers[wrong[0]]} came where {wrong[0]} was due")

    def _check_prefix(self, now: Seen) -> None:
        if self.before is None:
            return
        for lane in np.unique(self.before.lane).tolist():
            then, here = self.before.lane == lane, now.lane == lane
            old = np.stack([self.before.seq[then], self.before.names[then]])
            new = np.stack([now.seq[here], now.names[here]])[:, : old.shape[1]]
            if old.shape != new.shape or not np.array_equal(old, new):
                self._complain(f"lane {lane}: the records read before are not the beginning of those read now")
