"""Replicas' copies against the ranges of the store: enough whole copies of each, and ranges that form a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from embarcadero.storage.findings import FROM_PEERS, Copy, Report, Severity
from embarcadero.types import Range

_NOTHING: Mapping[int, int] = {}
_RECOVER = "bring the missing disks back; or give up what only they have: `embarcadero topic recover --accept-loss`"


def check_copies(
    folder: str, disk: str, ranges: Sequence[Range], report: Report, elsewhere: bool = False,
    trims: Mapping[int, int] = _NOTHING,
) -> None:  # fmt: skip
    """Whether a folder has what the store says its disk has. With `elsewhere`, peers are known to make up for it."""
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
            report.add(Severity.NOTE, where, problem, "nothing to do: the next start cuts it")


def _problem(range_: Range, copy: Copy | None, trim: int) -> str:
    """What a copy of a sealed range lacks; empty: nothing."""
    start, end = max(range_.start, trim), range_.end or 0
    if start >= end:
        return ""  # an empty range, or all of it was trimmed
    if copy is None:
        return "there is no copy of this sealed range"
    if copy.end < end:
        return f"the copy ends at index {copy.end}, the range was sealed at {end}"
    if copy.first > start:
        return f"the copy begins at index {copy.first}, records from {start} on should be there"
    return ""


def _whole_copies(range_: Range, report: Report, trims: Mapping[int, int]) -> int:
    """How many copies of a range are here, on the very disks that it names, and lack nothing."""
    disks, trim = {ref.disk for ref in range_.replicas}, trims.get(range_.lane, 0)
    found = 0
    for folder, disk in report.disks.items():
        if disk not in disks:
            continue
        copy = report.copies.get((folder, range_.lane, range_.number))
        never = copy is None and (folder, range_.lane, range_.number) not in report.begun
        whole = never or (copy is not None and copy.whole)  # one that never began is honest: it has nothing
        found += whole and (range_.end is None or not _problem(range_, copy, trim))
    return found


def check_ranges(ranges: Sequence[Range], report: Report, trims: Mapping[int, int] = _NOTHING) -> None:
    """All folders are known: does every range have enough whole copies, and are there folders that no range names?"""
    for folder, disk in report.disks.items():
        check_copies(folder, disk, ranges, report, elsewhere=True, trims=trims)
    for range_ in ranges:
        _check_enough(range_, report, trims)
    known = {(range_.lane, range_.number) for range_ in ranges}
    for folder, lane, number in report.copies:
        if (lane, number) not in known:
            where = f"{folder}/lane {lane} range {number}".lstrip("/")
            problem = "no topic has this range any more: it was trimmed, or its topic was deleted"
            report.add(Severity.NOTE, where, problem, "nothing to do: the replica removes it")
    check_chain(ranges, report)


def _check_enough(range_: Range, report: Report, trims: Mapping[int, int]) -> None:
    where = f"lane {range_.lane} range {range_.number}"
    copies, whole = len(range_.replicas), _whole_copies(range_, report, trims)
    missing = [ref.replica for ref in range_.replicas if ref.disk not in report.disks.values()]
    gone = f"; the disks of replicas {missing} that it names are not here" if missing else ""
    needed = copies - range_.durable_on + 1
    if range_.end is None and whole < needed:
        problem = f"{whole} of {copies} copies of this open range are here and whole, recovery needs {needed}{gone}"
        report.add(Severity.ERROR, where, problem, _RECOVER)
    elif range_.end is not None and not whole and max(range_.start, trims.get(range_.lane, 0)) < range_.end:
        problem = f"no whole copy of this sealed range is here{gone}"
        report.add(Severity.ERROR, where, problem, "bring a disk back that has one; what no copy has is lost")
    elif missing:
        problem = f"{whole} of {copies} copies are here and whole{gone}"
        report.add(Severity.WARNING, where, problem, "start the cluster: new copies are made of those that are whole")


def check_chain(ranges: Sequence[Range], report: Report) -> None:
    """Whether the store's ranges of each lane follow each other."""
    for lane in sorted({range_.lane for range_ in ranges}):
        chain = sorted((one for one in ranges if one.lane == lane), key=lambda one: one.number)
        for before, after in pairwise(chain):
            where = f"lane {lane} range {after.number}"
            if before.end is None or after.number != before.number + 1 or after.start < before.end:
                problem = f"it does not follow range {before.number}, which ends at {before.end}"
                report.add(Severity.ERROR, where, problem, "restore the store from a backup")
            elif after.start > before.end:
                problem = f"positions {before.end} to {after.start} were lost with the fabric, or never used"
                report.add(Severity.NOTE, where, problem, "nothing to do: readers see a LOST gap")
