"""Kinds of findings, the spans of a topic that an audit checks, and the report with all findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.config.secrets import parse_properties
from embarcadero.types import Range, Span, Tail

KINDS: Final = {
    "index-hole": ("P1", "a batch is missing without an explanation"),
    "index-twice": ("P2", "a position names two batches"),
    "seq-hole": ("P1", "record numbers do not continue at the end of the previous batch"),
    "rows": ("P1", "the table has fewer or more rows of a batch than the batch has records"),
    "row-order": ("P3", "the rows of a batch are not in the order of its records"),
    "lost": ("P1", "positions are reported as lost without a matching change of ranges"),
    "trimmed": ("P1", "positions are reported as trimmed above the start of the topic"),
    "session-twice": ("P2", "a sequence of a session has two positions"),
    "session-order": ("P3", "a session's batches are not in the order in which they were submitted"),
    "session-hole": ("P3", "a sequence of a session is missing, and no entry skips it"),
    "session-strange": ("P2", "a batch of a session that is not open"),
    "checksum": ("P7", "bytes do not match their checksum, or a file is missing"),
    "damage": ("P7", "a batch does not match the schema of its topic"),
    "table": ("P7", "the table and the log differ"),
    "unread": ("P1", "a part of the log could not be read"),
}
"""Kind of finding -> the broken promise, and the meaning"""

KEPT_PER_KIND: Final = 20
"""The number of findings of a kind that each span reports with their index; the others are only counted."""


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A broken promise. `times`: the number of findings of its kind in this entry; more than 1 in a summary."""

    kind: str
    lane: int
    index: int  # -1: not about one batch
    detail: str
    times: int = 1

    @property
    def promise(self) -> str:
        """The broken promise."""
        return KINDS[self.kind][0]


class SessionCounts(NamedTuple):
    """The number of sessions of a lane, and the number of sessions not known to be strong or weak."""

    sessions: int
    unknown: int


class LaneAudit(msgspec.Struct, kw_only=True):
    """The checked part of one lane."""

    lane: int
    start_index: int
    stop_index: int
    start_seq: int
    stop_seq: int
    batches: int = 0
    records: int = 0
    entries: int = 0
    sessions: int = 0
    sessions_unknown: int = 0  # order 2: not known to be strong or weak, so their order was not checked
    lost: int = 0  # positions lost in a crash, as reported by the log
    skipped: int = 0  # sequences skipped in a topic with on_gap=skip, as reported by the log
    in_table: int = 0  # entries in the table
    in_both: int = 0  # entries in the table and at the brokers, which were compared
    hash: str = ""  # of all entries in order


class AuditReport(msgspec.Struct, kw_only=True):
    """The outcome of an audit of one topic."""

    topic: str
    order: int
    lanes: list[LaneAudit]
    findings: list[AuditFinding]
    seconds: float
    spans: int

    @property
    def holds(self) -> bool:
        """Whether all promises hold in the checked part."""
        return not self.findings

    @property
    def broken(self) -> list[str]:
        """The broken promises."""
        return sorted({finding.promise for finding in self.findings})


class Collector:
    """The findings of one span, bounded: the first of each kind one by one, the others as a count."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self._found: dict[str, list[AuditFinding]] = {}
        self._more: dict[str, int] = {}

    def add(self, kind: str, index: int, detail: str) -> None:
        """Add a finding."""
        kept = self._found.setdefault(kind, [])
        if len(kept) < KEPT_PER_KIND:
            kept.append(AuditFinding(kind=kind, lane=self.lane, index=index, detail=detail))
        else:
            self._more[kind] = self._more.get(kind, 0) + 1

    def take(self) -> list[AuditFinding]:
        """Return all findings, with the counts last."""
        kept = [finding for kind in self._found.values() for finding in kind]
        more = [
            AuditFinding(kind=kind, lane=self.lane, index=-1, detail=f"{times:,} more of this kind", times=times)
            for kind, times in self._more.items()
        ]
        return kept + more


class LaneFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a lane before reading it."""

    lane: int
    start_index: int
    start_seq: int
    stop_index: int
    lost: list[Span]  # indices between its ranges
    frontier: int = 0  # the table has all entries below
    hot_index: int = 0  # the brokers have all entries from here on


class AuditSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One task: [start, stop) of a lane, from the table, from the brokers, or from both, with a comparison."""

    topic: str
    lane: LaneFacts
    start: int
    stop: int
    table: bool = False
    log: bool = True
    properties: list[str] = []  # for access to the table's files
    file: str = ""  # the table's file, if it has exactly the span: its holes were lost before it was written


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a task for its span, besides the runs of its sessions."""

    lane: int
    start: int
    stop: int
    first_seq: int  # -1: the span has no entries
    next_seq: int
    entries: int
    batches: int
    records: int
    lost: int
    skipped: int
    in_table: int
    in_both: int
    hash: str
    findings: list[AuditFinding]


def lane_facts(about: TopicInfo, tail: Tail) -> list[LaneFacts]:
    """The lanes of a topic, each up to its durable end."""
    facts = []
    for lane in tail.lanes or (tail,):
        frontier = 0 if about.tier is None else about.tier.frontier(lane.lane)[0]
        facts.append(
            LaneFacts(
                lane=lane.lane,
                start_index=lane.start_index,
                start_seq=lane.start_seq,
                stop_index=lane.durable_index,
                lost=lost_between([one for one in about.ranges if one.lane == lane.lane]),
                frontier=frontier,
                hot_index=lane.hot_index,
            )
        )
    return facts


def lost_between(ranges: Sequence[Range]) -> list[Span]:
    """The indices between consecutive ranges."""
    ordered = sorted(ranges, key=lambda one: one.number)
    pairs = pairwise(ordered)
    return [Span(one.end, after.start) for one, after in pairs if one.end is not None and one.end < after.start]


def spans_of(log: Log, about: TopicInfo, facts: LaneFacts, span_bytes: int) -> list[AuditSpan]:
    """Split a lane: below `hot_index` only the table has it, up to the frontier both, then only the brokers."""
    topic, properties = about.name, list(log.table_properties)
    edges = sorted({facts.start_index, min(facts.hot_index, facts.stop_index), facts.frontier, facts.stop_index})
    spans = []
    for first, last in pairwise(edges):
        if first < facts.start_index or last > facts.stop_index:
            continue
        table, held = last <= facts.frontier, first >= facts.hot_index
        pieces = (
            [(cut.index, "") for cut in log.measure(topic, first, last, span_bytes, lane=facts.lane)]
            if held
            else _file_ends(about, facts.lane, first, last, properties)
        ) or [(last, "")]
        starts = [first, *(stop for stop, _ in pieces[:-1])]
        for start, (stop, file) in zip(starts, pieces, strict=True):
            if start < stop:
                spans.append(
                    AuditSpan(
                        topic=topic,
                        lane=facts,
                        start=start,
                        stop=stop,
                        table=table,
                        log=held,
                        properties=properties,
                        file=file,
                    )
                )
    return spans


def _file_ends(about: TopicInfo, lane: int, first: int, last: int, properties: Sequence[str]) -> list[tuple[int, str]]:
    """The ends of the spans of the table's files, with the files: each file is a separate span.

    The footer of a file with records also describes the control entries of its span, even if another file has them.
    """
    if about.tier is None:
        return []
    from embarcadero.tier.columns import Layout
    from embarcadero.tier.parquet import span_of
    from embarcadero.tier.table_reads import TopicTable  # needs PyIceberg, and only tiered topics use it

    ends: list[tuple[int, str]] = []
    table = TopicTable(about.tier, parse_properties(properties))
    for file in table.parts(lane, first, last):
        span = span_of(file.path)
        start, stop = file.first_index, file.stop_index
        if span is not None and table.layout is Layout.WHOLE:
            start, stop = span.start, span.stop
        whole = span is not None and first <= start and stop <= last
        ends.append((min(stop, last), file.path if whole else ""))
    return ends if not ends or ends[-1][0] == last else [*ends, (last, "")]


def report_of(
    about: TopicInfo,
    facts: Iterable[LaneFacts],
    spans: Sequence[SpanReport],
    sessions: Sequence[AuditFinding],
    counts: Mapping[int, SessionCounts],
    seconds: float,
) -> AuditReport:
    """Combine the results of all spans, and check that spans meet. `counts`: sessions by lane."""
    findings = [finding for span in spans for finding in span.findings] + list(sessions)
    lanes = []
    for lane in facts:
        own = sorted((span for span in spans if span.lane == lane.lane), key=lambda span: span.start)
        findings += _seams(lane, own)
        digest, known = blake2b(digest_size=16), counts.get(lane.lane, SessionCounts(0, 0))
        for span in own:
            digest.update(bytes.fromhex(span.hash))
        total = {
            name: sum(getattr(span, name) for span in own)
            for name in ("batches", "records", "entries", "lost", "skipped", "in_table", "in_both")
        }
        lanes.append(
            LaneAudit(
                lane=lane.lane,
                start_index=lane.start_index,
                stop_index=lane.stop_index,
                start_seq=lane.start_seq,
                stop_seq=next((span.next_seq for span in reversed(own) if span.next_seq >= 0), lane.start_seq),
                sessions=known.sessions,
                sessions_unknown=known.unknown,
                hash=digest.hexdigest(),
                **total,
            )
        )
    return AuditReport(
        topic=about.name, order=int(about.order), lanes=lanes, findings=findings, seconds=seconds, spans=len(spans)
    )


def _seams(lane: LaneFacts, spans: Sequence[SpanReport]) -> list[AuditFinding]:
    """Check that each span begins at the end of the previous one, in indices and in record numbers."""
    found, at, seq = [], lane.start_index, -1
    for span in spans:
        if span.start != at:
            what = f"indices {at} to {span.start - 1} were not checked"
            found.append(AuditFinding(kind="unread", lane=lane.lane, index=at, detail=what))
        elif seq >= 0 and 0 <= span.first_seq != seq and not span.lost:
            what = f"seq {span.first_seq} follows, but {seq} is expected"
            found.append(AuditFinding(kind="seq-hole", lane=lane.lane, index=span.start, detail=what))
        at, seq = span.stop, span.next_seq
    if at != lane.stop_index:
        what = f"indices {at} to {lane.stop_index - 1} were not checked"
        found.append(AuditFinding(kind="unread", lane=lane.lane, index=at, detail=what))
    return found
