"""Which spans of a topic to look at, and how the findings of all spans become one report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise

import msgspec

from embarcadero.audit.findings import AuditReport, Finding, LaneReport
from embarcadero.client.sync import Log
from embarcadero.client.topics import TopicInfo
from embarcadero.tier.settings import parse_properties
from embarcadero.types import Range, Tail


class LaneFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a lane before any of it is read."""

    lane: int
    start_index: int
    start_seq: int
    stop_index: int
    lost: list[tuple[int, int]]  # positions between its ranges
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
    findings: list[Finding]


def lane_facts(about: TopicInfo, tail: Tail) -> list[LaneFacts]:
    """The lanes of a topic, each as far as it is durable."""
    facts = []
    for lane in tail.lanes or (tail,):
        frontier = 0 if about.tier is None else about.tier.frontier(lane.lane)[0]
        facts.append(
            LaneFacts(
                lane=lane.lane, start_index=lane.start_index, start_seq=lane.start_seq, stop_index=lane.durable_index,
                lost=lost_between([one for one in about.ranges if one.lane == lane.lane]), frontier=frontier,
                hot_index=lane.hot_index,
            )
        )  # fmt: skip
    return facts


def lost_between(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """The positions between a range and the next one."""
    ordered = sorted(ranges, key=lambda one: one.number)
    return [(one.end, after.start) for one, after in pairwise(ordered) if one.end is not None and one.end < after.start]


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
                        topic=topic, lane=facts, start=start, stop=stop, table=table, log=held, properties=properties,
                        file=file,
                    )
                )  # fmt: skip
    return spans


def _file_ends(about: TopicInfo, lane: int, first: int, last: int, properties: Sequence[str]) -> list[tuple[int, str]]:
    """Where the spans of the table's files end, and the files: each is a span of its own.

    The footer of a file with records tells of the control entries of its span, too, wherever those are.
    """
    if about.tier is None:
        return []
    from embarcadero.tier.cold import ColdTable  # wants PyIceberg, which only tiered topics need
    from embarcadero.tier.layouts import Layout
    from embarcadero.tier.parquet import span_of

    ends: list[tuple[int, str]] = []
    table = ColdTable(about.tier, parse_properties(properties))
    for file in table.parts(lane, first, last):
        span = span_of(file.path)
        start, stop = file.first_index, file.stop_index
        if span is not None and table.layout is Layout.WHOLE:
            start, stop = span.start, span.stop
        whole = span is not None and first <= start and stop <= last
        ends.append((min(stop, last), file.path if whole else ""))
    return ends if not ends or ends[-1][0] == last else [*ends, (last, "")]


def report_of(
    about: TopicInfo, facts: Iterable[LaneFacts], spans: Sequence[SpanReport], sessions: Sequence[Finding],
    counts: Mapping[int, tuple[int, int]], seconds: float,
) -> AuditReport:  # fmt: skip
    """Bring all together: spans have to meet, too. `counts`: sessions by lane, and how many are of unknown kind."""
    findings = [finding for span in spans for finding in span.findings] + list(sessions)
    lanes = []
    for lane in facts:
        own = sorted((span for span in spans if span.lane == lane.lane), key=lambda span: span.start)
        findings += _seams(lane, own)
        digest = blake2b(digest_size=16)
        for span in own:
            digest.update(bytes.fromhex(span.hash))
        total = {
            name: sum(getattr(span, name) for span in own)
            for name in ("batches", "records", "entries", "lost", "skipped", "in_table", "in_both")
        }
        lanes.append(
            LaneReport(
                lane=lane.lane, start_index=lane.start_index, stop_index=lane.stop_index, start_seq=lane.start_seq,
                stop_seq=next((span.next_seq for span in reversed(own) if span.next_seq >= 0), lane.start_seq),
                sessions=counts.get(lane.lane, (0, 0))[0], sessions_unknown=counts.get(lane.lane, (0, 0))[1],
                hash=digest.hexdigest(), **total,
            )
        )  # fmt: skip
    return AuditReport(
        topic=about.name, order=int(about.order), lanes=lanes, findings=findings, seconds=seconds, spans=len(spans)
    )


def _seams(lane: LaneFacts, spans: Sequence[SpanReport]) -> list[Finding]:
    """Where one span ends the next begins, in indices and in record numbers."""
    found, at, seq = [], lane.start_index, -1
    for span in spans:
        if span.start != at:
            what = f"indices {at} to {span.start - 1} were not looked at"
            found.append(Finding(kind="unread", lane=lane.lane, index=at, detail=what))
        elif seq >= 0 and 0 <= span.first_seq != seq and not span.lost:
            what = f"seq {span.first_seq} where {seq} comes next"
            found.append(Finding(kind="seq-hole", lane=lane.lane, index=span.start, detail=what))
        at, seq = span.stop, span.next_seq
    if at != lane.stop_index:
        what = f"indices {at} to {lane.stop_index - 1} were not looked at"
        found.append(Finding(kind="unread", lane=lane.lane, index=at, detail=what))
    return found
