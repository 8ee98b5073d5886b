"""Offline verification of replicas' folders: every checksum, every index, every chain. Nothing is changed.

With the store's ranges, it also reports where copies and ranges disagree: each range needs enough complete copies, and
the ranges of a lane must form a chain. Each finding has advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from embarcadero.env import Disk, File
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import INDEX_EVERY_BYTES, LINE_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.folder import IDENTITY_FILE, Identity, checkpoints, read_checkpoint, read_identity
from embarcadero.storage.layout import (
    DAMAGED,
    FOOTER_BYTES,
    HEADER_BYTES,
    INDEX_FILE,
    MARK_FILE,
    START_FILE,
    TIME_INDEX_FILE,
    FilePosition,
    Footer,
    Header,
    base_seqs,
    begun_range,
    damaged_span,
    decode_header,
    segment_name,
)  # fmt: skip
from embarcadero.storage.scan import SegmentScan, load_index, scan_segment
from embarcadero.storage.segment import read_footer, read_position
from embarcadero.types import Range

FROM_PEERS: Final = "start the replica: it gets these records from its peers"


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"  # records are missing or wrong
    WARNING = "warning"  # a cache or a spare is wrong, or other copies have the records; no record is missing
    NOTE = "note"  # normal after a crash; the next start handles it


class Finding(NamedTuple):
    """A problem, and the advice for it."""

    severity: Severity
    file: str
    problem: str
    advice: str


class VerifiedCopy(NamedTuple):
    """A range's copy: indices [first, end), and whether all of it is undamaged."""

    first: int
    end: int
    whole: bool


@dataclass(slots=True)
class Report:
    """Totals and findings of a verification."""

    findings: list[Finding] = field(default_factory=list)
    replicas: int = 0
    ranges: int = 0
    segments: int = 0
    batches: int = 0
    bytes: int = 0
    disks: dict[str, str] = field(default_factory=dict)
    """Replica's folder -> the id of its disk."""
    copies: dict[tuple[str, int, int], VerifiedCopy] = field(default_factory=dict)
    """(replica's folder, lane, range) -> its copy."""
    begun: set[tuple[str, int, int]] = field(default_factory=set)
    """Keys of copies that once existed, whether they still do or not."""

    @property
    def errors(self) -> int:
        """Number of findings about records."""
        return sum(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether no record is missing or wrong."""
        return self.errors == 0

    def add(self, severity: Severity, file: str, problem: str, advice: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(severity, file, problem, advice))


_NOTHING: Mapping[int, int] = {}
_RECOVER = "bring the missing disks back, or give up their records: `embarcadero topic recover --accept-loss`"


def check_copies(
    folder: str,
    disk: str,
    ranges: Sequence[Range],
    report: Report,
    elsewhere: bool = False,
    trims: Mapping[int, int] = _NOTHING,
) -> None:
    """Check that a folder has the copies that the store lists for its disk. With `elsewhere`, peers may have them."""
    for range_ in ranges:
        if range_.end is None or not any(ref.disk == disk for ref in range_.replicas):
            continue
        where = f"{folder}/lane {range_.lane} range {range_.number}".lstrip("/")
        copy = report.copies.get((folder, range_.lane, range_.number))
        problem = _problem(range_, copy, trims.get(range_.lane, 0))
        if problem:
            covered = elsewhere and _whole_copies(range_, report, trims)
            report.add(Severity.WARNING if covered else Severity.ERROR, where, problem, FROM_PEERS)
        elif copy is not None and copy.end > range_.end:
            problem = f"the copy ends at index {copy.end}, above the range's end {range_.end}"
            report.add(Severity.NOTE, where, problem, "nothing to do: the next start cuts the copy")


def _problem(range_: Range, copy: VerifiedCopy | None, trim: int) -> str:
    """Return the problem of a copy of a sealed range, or an empty string."""
    start, end = max(range_.start, trim), range_.end or 0
    if start >= end:
        return ""  # the range is empty, or completely trimmed
    if copy is None:
        return "this sealed range has no copy"
    if copy.end < end:
        return f"the copy ends at index {copy.end}, but the range was sealed at {end}"
    if copy.first > start:
        return f"the copy starts at index {copy.first}, but should have records from {start} on"
    return ""


def _whole_copies(range_: Range, report: Report, trims: Mapping[int, int]) -> int:
    """Count the complete copies of a range on the disks that it names."""
    disks, trim = {ref.disk for ref in range_.replicas}, trims.get(range_.lane, 0)
    found = 0
    for folder, disk in report.disks.items():
        if disk not in disks:
            continue
        copy = report.copies.get((folder, range_.lane, range_.number))
        never = copy is None and (folder, range_.lane, range_.number) not in report.begun
        whole = never or (copy is not None and copy.whole)  # a copy that was never begun counts: it has lost no records
        found += whole and (range_.end is None or not _problem(range_, copy, trim))
    return found


def check_ranges(ranges: Sequence[Range], report: Report, trims: Mapping[int, int] = _NOTHING) -> None:
    """Check with all folders whether every range has enough complete copies, and report folders without a range."""
    for folder, disk in report.disks.items():
        check_copies(folder, disk, ranges, report, elsewhere=True, trims=trims)
    for range_ in ranges:
        _check_enough(range_, report, trims)
    known = {(range_.lane, range_.number) for range_ in ranges}
    for folder, lane, number in report.copies:
        if (lane, number) not in known:
            where = f"{folder}/lane {lane} range {number}".lstrip("/")
            problem = "the range is no longer in the store: it was trimmed, or its topic was deleted"
            report.add(Severity.NOTE, where, problem, "nothing to do: the replica removes the copy")
    check_chain(ranges, report)


def _check_enough(range_: Range, report: Report, trims: Mapping[int, int]) -> None:
    where = f"lane {range_.lane} range {range_.number}"
    copies, whole = len(range_.replicas), _whole_copies(range_, report, trims)
    missing = [ref.replica for ref in range_.replicas if ref.disk not in report.disks.values()]
    gone = f"; its disks on replicas {missing} are missing" if missing else ""
    needed = copies - range_.durable_on + 1
    if range_.end is None and whole < needed:
        problem = f"{whole} of {copies} copies of this open range are complete, but recovery needs {needed}{gone}"
        report.add(Severity.ERROR, where, problem, _RECOVER)
    elif range_.end is not None and not whole and max(range_.start, trims.get(range_.lane, 0)) < range_.end:
        problem = f"this sealed range has no complete copy{gone}"
        report.add(Severity.ERROR, where, problem, "bring back a disk with a complete copy; other records are lost")
    elif missing:
        problem = f"{whole} of {copies} copies are complete{gone}"
        report.add(Severity.WARNING, where, problem, "start the cluster: it makes new copies from the complete ones")


def check_chain(ranges: Sequence[Range], report: Report) -> None:
    """Check that the store's ranges of each lane follow each other."""
    for lane in sorted({range_.lane for range_ in ranges}):
        chain = sorted((one for one in ranges if one.lane == lane), key=lambda one: one.number)
        for before, after in pairwise(chain):
            where = f"lane {lane} range {after.number}"
            if before.end is None or after.number != before.number + 1 or after.start < before.end:
                problem = f"the range does not follow range {before.number}, which ends at {before.end}"
                report.add(Severity.ERROR, where, problem, "restore the store from a backup")
            elif after.start > before.end:
                problem = f"positions {before.end} to {after.start} were lost with the fabric, or never used"
                report.add(Severity.NOTE, where, problem, "nothing to do: readers get a LOST gap")


_LANE = re.compile(r"lane-(\d{10})")
_RANGE = re.compile(r"range-(\d{10})")
_REPLICA = re.compile(r"replica-(\d+)")
_NEVER_INDEX = 1 << 63


def verify_data_dir(
    disk: Disk,
    ranges: Sequence[Range] | None = None,
    progress: Callable[[int], None] | None = None,
    trims: Mapping[int, int] | None = None,
    cluster: str = "",
) -> Report:
    """Verify all replicas' folders of a data directory. `progress` is called with the bytes of each read.

    `ranges`, `trims` (starts of lanes) and `cluster` come from the store. Without them only files are checked.
    """
    report = Report()
    for name in replica_folders(disk):
        verify_folder(disk, name, None, report, progress, cluster)
    if ranges is not None:
        check_ranges(ranges, report, trims or {})
    return report


def replica_folders(disk: Disk) -> list[str]:
    """Return the replicas' folders of a data directory, by number."""
    found = [match for name in disk.list("") if (match := _REPLICA.fullmatch(name))]
    return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def verify_folder(
    disk: Disk,
    folder: str = "",
    ranges: Sequence[Range] | None = None,
    report: Report | None = None,
    progress: Callable[[int], None] | None = None,
    cluster: str = "",
) -> Report:
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
                report.copies[folder, copy.lane, copy.number] = VerifiedCopy(copy.first, copy.end, whole)
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
        report.add(Severity.ERROR, path, "the file is missing", "restore it, or empty the whole folder")
        return None
    named = _REPLICA.fullmatch(folder)
    if named and found.replica != int(named[1]):
        problem = f"the file belongs to replica {found.replica}"
        report.add(Severity.ERROR, path, problem, "a folder is named after its replica: move it back")
    if cluster and found.cluster != cluster:
        problem = f"the folder belongs to cluster {found.cluster}, but the store to cluster {cluster}"
        report.add(Severity.ERROR, path, problem, "give each cluster its own data_dir: move it back")
    elif (twin := next((other for other, disk_ in report.disks.items() if disk_ == found.disk), None)) is not None:
        advice = "remove the copied folder: two replicas can't have the same disk"
        report.add(Severity.ERROR, path, f"the file is a copy of the one in {twin}", advice)
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
            advice = "remove it: recovery uses an older checkpoint, or a peer's"
            report.add(Severity.WARNING, join(path, f"sessions-{index:020d}.checkpoint"), "it is damaged", advice)


class _Copy:
    """Verification of one range's copy."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        lane: int,
        number: int,
        identity: Identity | None,
        report: Report,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._disk, self._folder, self.lane, self.number = disk, folder, lane, number
        self._identity, self._report, self._progress = identity, report, progress
        self._mark = read_position(disk, folder, MARK_FILE, lane, number)
        self.first = self.end = 0
        self.empty = False

    def verify(self) -> None:
        """Check the whole copy."""
        self._report.ranges += 1
        names = self._disk.list(self._folder)
        for name in names:
            if damaged_span(name) is not None:
                problem = "damaged records were put aside and are not repaired yet"
                self._report.add(Severity.ERROR, join(self._folder, name), problem, FROM_PEERS)
            elif name.endswith(DAMAGED):  # the missing part is reported below
                problem = "the file did not match its name and was put aside"
                self._report.add(Severity.NOTE, join(self._folder, name), problem, "remove it after inspecting it")
        bases = base_seqs(names)
        start = read_position(self._disk, self._folder, START_FILE, self.lane, self.number)
        self.empty = start is None and not bases
        if start is None and bases:
            advice = "start the replica: it writes a new one"
            self._report.add(Severity.WARNING, join(self._folder, START_FILE), "the file is missing or damaged", advice)
        if start is not None:
            self.first = self.end = start.index
            bases = [base for base in bases if base >= start.seq]
        self._chain(bases, start)

    def _chain(self, bases: list[int], start: FilePosition | None) -> None:
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
                problem = f"the segment starts at index {header.base_index}, but the one before ends at {expected}"
                self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
            if start is None and number == 0:
                self.first = header.base_index
            self.end = expected = scan.end if footer is None else footer.end_index
            follows = footer is not None and not footer.last
        if follows and (bases or start is not None):
            problem = f"the segment that starts at index {self.end} is missing"
            self._report.add(Severity.ERROR, self._folder, problem, FROM_PEERS)

    def _segment(self, path: str, base: int) -> tuple[Header, Footer | None, SegmentScan]:
        file = self._disk.open(path)
        try:
            size = file.size()
            header = decode_header(file.pread(HEADER_BYTES, 0), path)
            if header is None:
                raise BadSegment("the header is damaged", "start the replica: it rewrites it from the first record")
            cluster = header.cluster if self._identity is None else self._identity.log or self._identity.cluster
            if header._replace(base_index=0) != Header(self.lane, self.number, 0, base, cluster):
                raise BadSegment(f"the segment belongs to another range: {header}", FROM_PEERS)
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

    def _scan(self, file: File, path: str, header: Header, footer: Footer | None) -> SegmentScan:
        mark = self._mark
        known = mark.position if mark is not None and mark.seq == header.base_seq else 0
        synced, limit = (known, _NEVER_INDEX) if footer is None else (footer.bytes, footer.end_index)
        scan = scan_segment(file, header, INDEX_EVERY_BYTES, synced, limit)
        for wrong in scan.wrong:
            upto = "the end" if wrong.end is None else str(wrong.end)
            problem = f"records from index {wrong.first} to {upto}, at byte {wrong.position}, are damaged"
            self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
        if footer is not None and not scan.wrong and (scan.end, scan.end_seq) != (footer.end_index, footer.end_seq):
            problem = f"the records end at index {scan.end}, but the footer has {footer.end_index}"
            self._report.add(Severity.ERROR, path, problem, FROM_PEERS)
        if scan.cut:
            problem = f"{scan.cut} bytes after index {scan.end} are torn"
            self._report.add(Severity.NOTE, path, problem, "nothing to do: they were never synced, a start cuts them")
        return scan

    def _check_index(self, file: File, footer: Footer) -> None:
        for suffix in (INDEX_FILE, TIME_INDEX_FILE):
            if problem := index_problem(self._disk, self._folder, file, footer, suffix):
                name = join(self._folder, segment_name(footer.base_seq, suffix))
                advice = "nothing to do: readers do not need it, and a scrub rewrites it"
                self._report.add(Severity.WARNING, name, problem, advice)


def index_problem(disk: Disk, folder: str, file: File, footer: Footer, suffix: str) -> str:
    """Return the problem of a finished segment's index file; an empty string if all entries lead to records."""
    index = load_index(disk, folder, footer, suffix)
    if index is None:
        return "the index is missing, damaged, or of another segment"
    lines = b"".join(file.pread(LINE_BYTES, position) for position in index.positions.tolist())
    entries = np.frombuffer(lines, dtype=ORDER)
    key = "seq" if suffix == INDEX_FILE else "append_us"
    if len(entries) == len(index.keys) and bool((entries[key] == index.keys).all()):
        return ""
    return f"some entries do not lead to their records in {segment_name(footer.base_seq)}"
