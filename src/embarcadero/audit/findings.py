"""What an audit can find, and its report."""

from __future__ import annotations

from typing import Final

import msgspec

KINDS: Final = {
    "index-hole": ("P1", "a batch is missing, and nothing says why"),
    "index-twice": ("P2", "a position names two batches"),
    "seq-hole": ("P1", "record numbers do not go on where the batch before ended"),
    "rows": ("P1", "the table has fewer or more rows of a batch than it has records"),
    "row-order": ("P3", "the rows of a batch are not in the order of its records"),
    "lost": ("P1", "positions are told as lost that no change of ranges explains"),
    "trimmed": ("P1", "positions are told as trimmed above the start of the topic"),
    "session-twice": ("P2", "a sequence of a session has two positions"),
    "session-order": ("P3", "a session's batches are not in the order in which they were submitted"),
    "session-hole": ("P3", "a sequence of a session is missing, and no entry says that it was skipped"),
    "session-strange": ("P2", "a batch of a session that is not open"),
    "checksum": ("P7", "bytes are not what their checksum says, or a file is gone"),
    "damage": ("P7", "a batch is not what its topic's schema says"),
    "table": ("P7", "the table and the log differ"),
    "unread": ("P1", "a part of the log could not be read"),
}
"""Kind of finding -> the promise that it breaks, and what it means."""

KEPT_PER_KIND: Final = 20
"""So many findings of a kind are told with their place in each span; the others are counted."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as promised. `times` counts those of its kind that are not told one by one."""

    kind: str
    lane: int
    index: int  # -1: of no batch
    detail: str
    times: int = 1

    @property
    def promise(self) -> str:
        """The promise that it breaks."""
        return KINDS[self.kind][0]


class LaneReport(msgspec.Struct, kw_only=True):
    """What was looked at in one lane."""

    lane: int
    start_index: int
    stop_index: int
    start_seq: int
    stop_seq: int
    batches: int = 0
    records: int = 0
    entries: int = 0
    sessions: int = 0
    sessions_unknown: int = 0  # order 2: whether they are strong is not known, so their order was not checked
    lost: int = 0  # positions that a crash took, as told
    skipped: int = 0  # sequences that a topic of on_gap=skip gave up, as told
    in_table: int = 0  # entries that are in the table
    in_both: int = 0  # entries that are in the table and with the brokers, and were compared
    hash: str = ""  # of all entries in their order


class AuditReport(msgspec.Struct, kw_only=True):
    """The outcome of an audit of one topic."""

    topic: str
    order: int
    lanes: list[LaneReport]
    findings: list[Finding]
    seconds: float
    spans: int

    @property
    def holds(self) -> bool:
        """Whether all that was looked at is as promised."""
        return not self.findings

    @property
    def broken(self) -> list[str]:
        """The promises that do not hold."""
        return sorted({finding.promise for finding in self.findings})


class Collector:
    """Findings of one span, bounded: the first of each kind one by one, the others as a number."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self._found: dict[str, list[Finding]] = {}
        self._more: dict[str, int] = {}

    def add(self, kind: str, index: int, detail: str) -> None:
        """Note one."""
        told = self._found.setdefault(kind, [])
        if len(told) < KEPT_PER_KIND:
            told.append(Finding(kind=kind, lane=self.lane, index=index, detail=detail))
        else:
            self._more[kind] = self._more.get(kind, 0) + 1

    def take(self) -> list[Finding]:
        """All of them, the counted ones last."""
        told = [finding for kind in self._found.values() for finding in kind]
        more = [
            Finding(kind=kind, lane=self.lane, index=-1, detail=f"{times:,} more of this kind", times=times)
            for kind, times in self._more.items()
        ]
        return told + more
