"""What an audit can find, which spans of a topic it looks at, and how all findings become one report."""

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
"""So many findings of a kind are reported with their index in each span; the others are counted."""


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as promised. `times` counts those of its kind that are not reported one by one."""

    kind: str
    lane: int
    index: int  # -1: of no batch
    detail: str
    times: int = 1

    @property
    def promise(self) -> str:
        """The promise that it breaks."""
        return KINDS[self.kind][0]


class SessionCounts(NamedTuple):
    """Sessions of a lane; of how many of them it is not known whether they are strong."""

    sessions: int
    unknown: int


class LaneAudit(msgspec.Struct, kw_only=True):
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
    lost: int = 0  # positions that a crash took, as the log reports them
    skipped: int = 0  # sequences that a topic of on_gap=skip gave up, as the log reports them
    in_table: int = 0  # entries that are in the table
    in_both: int = 0  # entries that are in the table and with the brokers, and were compared
    hash: str = ""  # of all entries in their order


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
        self._found: dict[str, list[AuditFinding]] = {}
        self._more: dict[str, int] = {}

    def add(self, kind: str, index: int, detail: str) -> None:
        """Note one."""
        kept = self._found.setdefault(kind, [])
        if len(kept) < KEPT_PER_KIND:
            kept.append(AuditFinding(kind=kind, lane=self.lane, index=index, detail=detail))
        else:
            self._more[kind] = self._more.get(kind, 0) + 1

    def take(self) -> list[AuditFinding]:
        """All of them, the counted ones last."""
        kept = [finding for kind in self._found.values() for finding in kind]
        more = [
            AuditFinding(kind=kind, lane=self.lane, index=-1, detail=f"{times:,} more of this kind", times=times)
            for kind, times in self._more.items()
        ]
        return kept + more


class LaneFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a lane before any of it is read."""

    lane: int
    start_index: int
    start_seq: int
    stop_index: int
    lost: list[Span]  # indices between its ranges
    frontier: int = 0  # everything below is in the table
    hot_index: int = 0  # everything from here on is with the brokers


class AuditSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One task: [start, stop) of a lane, from the table, from the brokers, or from both, to be compared."""

    topic: str
    lane: LaneFacts
    start: int
    stop: int
    table: bool = False
    log: bool = True
    properties: list[str] = []  # by which the table's files are reached
    file: str = ""  # of the table, if the span is one file's: what it has a hole for was lost when it was written


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a task says about its span, besides the runs of its sessions."""

    lane: int
    start: int
    stop: int
    first_seq: int  # -1: no entry was there
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
    """The lanes of a topic, each as far as it is durable."""
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
    """The indices between a range and the next one."""
    ordered = sorted(ranges, key=lambda one: one.number)
    pairs = pairwise(ordered)
    return [Span(one.end, after.start) for one, after in pairs if one.end is not None and one.end < after.start]


def spans_of(log: Log, about: TopicInfo, facts: LaneFacts, span_bytes: int) -> list[AuditSpan]:
    """Cut a lane: below `hot_index` only the table has it, up to the frontier both have it, then only the brokers."""
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
    """Where the spans of the table's files end, and the files: each is a span of its own.

    The footer of a file with records describes the control entries of its span, too, wherever those are.
    """
    if about.tier is None:
        return []
    from embarcadero.tier.columns import Layout
    from embarcadero.tier.parquet import span_of
    from embarcadero.tier.table_reads import TopicTable  # wants PyIceberg, which only tiered topics need

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
    """Bring all together: spans have to meet, too. `counts`: sessions by lane."""
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
    """Where one span ends the next begins, in indices and in record numbers."""
    found, at, seq = [], lane.start_index, -1
    for span in spans:
        if span.start != at:
            what = f"indices {at} to {span.start - 1} were not looked at"
            found.append(AuditFinding(kind="unread", lane=lane.lane, index=at, detail=what))
        elif seq >= 0 and 0 <= span.first_seq != seq and not span.lost:
            what = f"seq {span.first_seq} where {seq} comes next"
            found.append(AuditFinding(kind="seq-hole", lane=lane.lane, index=span.start, detail=what))
        at, seq = span.stop, span.next_seq
    if at != lane.stop_index:
        what = f"indices {at} to {lane.stop_index - 1} were not looked at"
        found.append(AuditFinding(kind="unread", lane=lane.lane, index=at, detail=what))
    return found
