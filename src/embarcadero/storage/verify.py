"""Offline verification of replicas' folders: every checksum, every index, every chain. Nothing is changed.

Give it the store's ranges and it also says where copies and ranges disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from embarcadero.env import Disk, File
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import INDEX_EVERY_BYTES, LINE_BYTES
from embarcadero.storage.checkpoints import checkpoints, read_checkpoint
from embarcadero.storage.disk import join
from embarcadero.storage.findings import FROM_PEERS, Copy, Report, Severity
from embarcadero.storage.identity import IDENTITY_FILE, Identity, read_identity
from embarcadero.storage.index import load_index
from embarcadero.storage.layout import (
    DAMAGED,
    FOOTER_BYTES,
    HEADER_BYTES,
    INDEX_FILE,
    MARK_FILE,
    START_FILE,
    TIME_INDEX_FILE,
    Footer,
    Header,
    Place,
    base_seqs,
    begun_range,
    damaged_span,
    decode_header,
    segment_name,
)  # fmt: skip
from embarcadero.storage.scan import Scan, scan_segment
from embarcadero.storage.segment import read_footer, read_place
from embarcadero.storage.verify_ranges import check_copies, check_ranges
from embarcadero.types import Range

_LANE = re.compile(r"lane-(\d{10})")
_RANGE = re.compile(r"range-(\d{10})")
_REPLICA = re.compile(r"replica-(\d+)")
_NEVER_INDEX = 1 << 63


def verify_data_dir(
    disk: Disk, ranges: Sequence[Range] | None = None, progress: Callable[[int], None] | None = None,
    trims: Mapping[int, int] | None = None, cluster: str = "",
) -> Report:  # fmt: skip
    """Verify all replicas' folders of a data directory. `progress` is told how many bytes were just read.

    `ranges`, `trims` (where lanes start) and `cluster` are what the store says; without them only files are checked.
    """
    report = Report()
    for name in replica_folders(disk):
        verify_folder(disk, name, None, report, progress, cluster)
    if ranges is not None:
        check_ranges(ranges, report, trims or {})
    return report


def replica_folders(disk: Disk) -> list[str]:
    """The replicas' folders of a data directory, by number."""
    found = [match for name in disk.list("") if (match := _REPLICA.fullmatch(name))]
    return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def verify_folder(
    disk: Disk, folder: str = "", ranges: Sequence[Range] | None = None, report: Report | None = None,
    progress: Callable[[int], None] | None = None, cluster: str = "",
) -> Report:  # fmt: skip
    """Verify one replica's folder."""
    report = report or Report()
    report.replicas += 1
    identity = _identity(disk, folder, report, cluster)
    report.begun |= {(folder, *begun) for name in disk.list(folder) if (begun := begun_range(name))}
    for name in disk.list(folder):
        if (lane := _LANE.fullmatch(name)) is None:
            continue
        path = join(folder, name)
        for inner in disk.list(path):
            if (number := _RANGE.fullmatch(inner)) is not None:
                before = report.errors
                copy = _Copy(disk, join(path, inner), int(lane[1]), int(number[1]), identity, report, progress)
                copy.verify()
                emptied = copy.empty and (folder, copy.lane, copy.number) in report.begun
                whole = report.errors == before and not emptied
                report.copies[folder, copy.lane, copy.number] = Copy(copy.first, copy.end, whole)
        _check_checkpoints(disk, path, report)
    if ranges is not None and identity is not None:
        check_copies(folder, identity.disk, ranges, report)
    return report


def _identity(disk: Disk, folder: str, report: Report, cluster: str) -> Identity | None:
    path = join(folder, IDENTITY_FILE)
    try:
        found = read_identity(disk, path)
    except EmbarcaderoError as error:
        report.add(Severity.ERROR, path, error.message, error.hint)
        return None
    if found is None:
        report.add(Severity.ERROR, path, "it is missing", "restore it, or empty the whole folder")
        return None
    named = _REPLICA.fullmatch(folder)
    if named and found.replica != int(named[1]):
        problem = f"it is that of replica {found.replica}"
        report.add(Severity.ERROR, path, problem, "folders are named for their replica: move it back")
    if cluster and found.cluster != cluster:
        problem = f"the folder belongs to cluster {found.cluster}, the store to cluster {cluster}"
        report.add(Severity.ERROR, path, problem, "give each cluster its own data_dir: move it back")
    elif (twin := next((other for other, disk_ in report.disks.items() if disk_ == found.disk), None)) is not None:
        advice = "remove the one that was copied: two replicas can't be one disk"
        report.add(Severity.ERROR, path, f"it is a copy of that of {twin}", advice)
    else:
        report.disks[folder] = found.disk
    return found


def _check_checkpoints(disk: Disk, path: str, report: Report) -> None:
    for index in checkpoints(disk, path):
        try:
            whole = read_checkpoint(disk, path, index, None) is not None
        except EmbarcaderoError:
            whole = False
        if not whole:
            advice = "remove it: an older one is used, or a peer's"
            report.add(Severity.WARNING, join(path, f"sessions-{index:020d}.checkpoint"), "it is damaged", advice)


class _Copy:
    """One range's copy."""

    def __init__(
        self, disk: Disk, folder: str, lane: int, number: int, identity: Identity | None, report: Report,
        progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self._disk, self._folder, self.lane, self.number = disk, folder, lane, number
        self._identity, self._report, self._progress = identity, report, progress
        self._mark = read_place(disk, folder, MARK_FILE, lane, number)
        self.first = self.end = 0
        self.empty = False

    def verify(self) -> None:
        """Look at all of it."""
        self._report.ranges += 1
        names = self._disk.list(self._folder)
        for name in names:
            if damaged_span(name) is not None:
                problem = "damage that was put aside and is not repaired yet"
                self._report.add(Severity.ERROR, join(self._folder, name), problem, FROM_PEERS)
            elif name.endswith(DAMAGED):  # what it should have been is looked for below
                problem = "a file that was not what its name says, put aside"
                self._report.add(Severity.NOTE, join(self._folder, name), problem, "remove it once you have seen it")
        bases = base_seqs(names)
        start = read_place(self._disk, self._folder, START_FILE, self.lane, self.number)
        self.empty = start is None and not bases
        if start is None and bases:
            advice = "start the replica: it makes it anew"
            self._report.add(Severity.WARNING, join(self._folder, START_FILE), "it is missing or damaged", advice)
        if start is not None:
            self.first = self.end = start.index
            bases = [base for base in bases if base >= start.seq]
        self._chain(bases, start)

    def _chain(self, bases: list[int], start: Place | None) -> None:
        expected = None if start is None else start.index
        follows = True
        for number, base in enumerate(bases):
            path = join(self._folder, segment_name(base))
            try:
                header, footer, scan = self._segment(path, base)
            except EmbarcaderoError as error:
                self._report.add(Severity.ERROR, path, error.message, error.hint or FROM_PEERS)
                expected = None
                continue
            if expected is not None and header.base_index != expected:
                problem = f"it begins at index {header.base_index}, the segment before ends at {expected}"
                self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
            if start is None and number == 0:
                self.first = header.base_index
            self.end = expected = scan.end if footer is None else footer.end_index
            follows = footer is not None and not footer.last
        if follows and (bases or start is not None):
            problem = f"the segment that begins at index {self.end} is missing"
            self._report.add(Severity.ERROR, self._folder, problem, FROM_PEERS)

    def _segment(self, path: str, base: int) -> tuple[Header, Footer | None, Scan]:
        file = self._disk.open(path)
        try:
            size = file.size()
            header = decode_header(file.pread(HEADER_BYTES, 0), path)
            if header is None:
                raise BadSegment("its header is damaged", "start the replica: it makes it anew from the first record")
            cluster = header.cluster if self._identity is None else self._identity.log or self._identity.cluster
            if header._replace(base_index=0) != Header(self.lane, self.number, 0, base, cluster):
                raise BadSegment(f"it is a segment of another place: {header}", FROM_PEERS)
            footer = read_footer(file.pread(FOOTER_BYTES, max(0, size - FOOTER_BYTES)), size, header)
            scan = self._scan(file, path, header, footer)
            if footer is not None:
                self._check_index(file, footer)
        finally:
            file.close()
        self._report.segments += 1
        self._report.batches += scan.end - header.base_index
        self._report.bytes += size
        if self._progress is not None:
            self._progress(size)
        return header, footer, scan

    def _scan(self, file: File, path: str, header: Header, footer: Footer | None) -> Scan:
        mark = self._mark
        known = mark.position if mark is not None and mark.seq == header.base_seq else 0
        synced, limit = (known, _NEVER_INDEX) if footer is None else (footer.bytes, footer.end_index)
        scan = scan_segment(file, header, INDEX_EVERY_BYTES, synced, limit)
        for wrong in scan.wrong:
            upto = "the end" if wrong.end is None else str(wrong.end)
            problem = f"records from index {wrong.first} to {upto}, at byte {wrong.position}, are damaged"
            self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
        if footer is not None and not scan.wrong and (scan.end, scan.end_seq) != (footer.end_index, footer.end_seq):
            problem = f"its records end at index {scan.end}, its footer says {footer.end_index}"
            self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
        if scan.cut:
            problem = f"{scan.cut} bytes after index {scan.end} are torn"
            self._report.add(Severity.NOTE, path, problem, "nothing to do: they were never synced, a start cuts them")
        return scan

    def _check_index(self, file: File, footer: Footer) -> None:
        for suffix in (INDEX_FILE, TIME_INDEX_FILE):
            if problem := index_problem(self._disk, self._folder, file, footer, suffix):
                name = join(self._folder, segment_name(footer.base_seq, suffix))
                advice = "nothing to do: readers do without, a scrub makes it anew"
                self._report.add(Severity.WARNING, name, problem, advice)


def index_problem(disk: Disk, folder: str, file: File, footer: Footer, suffix: str) -> str:
    """What is wrong with an index file of a finished segment; empty: all of its entries lead to their records."""
    index = load_index(disk, folder, footer, suffix)
    if index is None:
        return "it is missing, damaged, or of another segment"
    lines = b"".join(file.pread(LINE_BYTES, position) for position in index.positions.tolist())
    entries = np.frombuffer(lines, dtype=ORDER)
    key = "seq" if suffix == INDEX_FILE else "append_us"
    if len(entries) == len(index.keys) and bool((entries[key] == index.keys).all()):
        return ""
    return f"some of its entries do not lead to their records in {segment_name(footer.base_seq)}"
