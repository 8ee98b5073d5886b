"""Records for tests: entries as a sequencer would order them, with payloads that fit."""

from __future__ import annotations

import random

import numpy as np

from embarcadero.fabric.layout import ORDER, Entries, seal
from embarcadero.storage.layout import range_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.segment import RangeSettings
from embarcadero.types import EntryKind
from embarcadero.wire.codec import payload_crc

LANE, RANGE = 7, 2
FOLDER = range_folder(LANE, RANGE)
START, START_SEQ = 100, 1_000
SMALL = RangeSettings(cluster="0badcafe", segment_bytes=8_192, index_every_bytes=512)


class Source:
    """The one order: record n is the same for every caller, however often it is requested."""

    def __init__(self, seed: int = 1, start: int = START, start_seq: int = START_SEQ, size_max: int = 700) -> None:
        self._random = random.Random(seed)
        self._size_max = size_max
        self.start, self._next_seq, self._us = start, start_seq, 1_000_000
        self._entries: list[Entries] = []
        self._payloads: list[bytes] = []

    def _make(self) -> None:
        control = self._random.random() < 0.2
        size = 0 if control else self._random.randrange(1, self._size_max)
        payload = self._random.randbytes(size)
        entry = np.zeros(1, dtype=ORDER)
        entry["index"], entry["seq"] = self.start + len(self._entries), self._next_seq
        entry["append_us"], entry["size"] = self._us, size
        entry["kind"] = EntryKind.SESSION_OPEN if control else EntryKind.BATCH
        entry["count"] = 0 if control else self._random.randrange(1, 9)
        entry["crc"] = self._random.getrandbits(32) if control else payload_crc(payload)
        self._entries.append(seal(entry))
        self._payloads.append(payload)
        self._next_seq += int(entry["count"][0])
        self._us += self._random.randrange(3)

    def span(self, first: int, end: int) -> tuple[Entries, list[bytes]]:
        """Records [first, end)."""
        while len(self._entries) < end - self.start:
            self._make()
        some = slice(first - self.start, end - self.start)
        entries = np.concatenate([np.zeros(0, dtype=ORDER), *self._entries[some]])
        return entries, self._payloads[some]

    def seq(self, index: int) -> int:
        """The seq at which a record starts."""
        entries, _ = self.span(index, index + 1)
        return int(entries["seq"][0])


def open_log(disk, settings: RangeSettings = SMALL) -> RangeLog:
    """The range of these tests on a disk."""
    return RangeLog.recover(disk, FOLDER, LANE, RANGE, START, START_SEQ, settings)


def open_reader(disk) -> RangeReader:
    """A reader of the range of these tests."""
    return RangeReader(disk, FOLDER, LANE, RANGE, START)


def fill(log: RangeLog, source: Source, count: int, sync: bool = True, group: int = 7) -> None:
    """Append this many records, some at a time."""
    end = log.end + count
    while log.end < end:
        log.append(*source.span(log.end, min(end, log.end + group)))
    if sync:
        log.sync_job()()


def read_all(reader: RangeReader, first: int, end: int, max_bytes: int = 3_000) -> tuple[bytes, list[bytes]]:
    """All entries (as bytes) and payloads that a reader returns from an index on."""
    entries, payloads = b"", []
    while first < end:
        some, found = reader.read(first, end, max_bytes)
        if not len(some):
            break
        entries += some.tobytes()
        payloads += [bytes(payload) for payload in found]
        first += len(some)
    return entries, payloads


def matches(reader: RangeReader, source: Source, first: int, end: int) -> bool:
    """Whether a reader returns exactly these records of the one order."""
    entries, payloads = source.span(first, end)
    return read_all(reader, first, end) == (entries.tobytes(), payloads)
