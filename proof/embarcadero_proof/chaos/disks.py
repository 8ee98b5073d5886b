"""What real disks and the real store hold, read from their files once the cluster is stopped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero.storage.layout import range_folder
from embarcadero.types import Ack, EntryKind, Range, TopicLane
from embarcadero_proof.sim.checkers.ledger import Span
from embarcadero_proof.sim.history import (
    Copies,
    Event,
    FabricLost,
    History,
    LostSpan,
    OnDisk,
    Settled,
    Stopped,
    Verdict,
)
from embarcadero_proof.sim.tables import digest_of
from embarcadero_proof.sim.truth import owner_of, records

_FOR_EVER = 1 << 62

Stored = dict[tuple[int, int, int], int]
"""(lane, index, digest) -> on how many disks that batch is, as a part of the range that owns it"""


class Books(NamedTuple):
    """What the store says about lanes and ranges."""

    ranges: list[Range]
    lanes: list[TopicLane]


def books(store: Path) -> Books:
    """Read the store of a cluster."""
    with closing(SqliteStore(store)) as opened:
        directory = Directory(opened)
        return Books(directory.ranges.all(), directory.lanes.all())


def stored(data_dir: Path, ranges: list[Range], starts: Mapping[int, int]) -> Stored:
    """What is on the disks of all replicas. `starts`: lanes to look for, each from an index on."""
    found = defaultdict[tuple[int, int, int], int](int)
    for disk in sorted(data_dir.glob("replica-*")):
        seen: set[tuple[int, int, int]] = set()
        for range_ in ranges:
            if range_.lane in starts:
                folder = disk / range_folder(range_.lane, range_.number)
                seen |= _of_range(folder, range_, starts[range_.lane])
        for place in seen:
            found[place] += 1
    return dict(sorted(found.items()))


def _of_range(folder: Path, range_: Range, start: int) -> set[tuple[int, int, int]]:
    start, end = max(start, range_.start), _FOR_EVER if range_.end is None else range_.end
    return {
        (range_.lane, record.at_index, digest_of(record.payload))
        for path in sorted(folder.glob("*.log"))
        for record in records(path.read_bytes())
        if record.kind == EntryKind.BATCH and start <= record.at_index < end
    }


def lost_spans(after: Books, cut_short: Iterable[int]) -> list[Span]:
    """All that went with the fabric. `cut_short`: lanes of brokers that were open then."""
    cut = set(cut_short)
    spans = [(lane.lane, lane.end, _FOR_EVER) for lane in after.lanes if lane.lane in cut and lane.end is not None]
    for old, new in pairwise(after.ranges):
        if old.lane == new.lane and old.end is not None and old.end < new.start:
            spans.append((old.lane, old.end, new.start))
    last = {range_.lane: range_ for range_ in after.ranges}
    for lane in after.lanes:
        sealed = last[lane.lane].end if lane.lane in last else None
        if lane.end is not None and sealed is not None and sealed < lane.end:
            spans.append((lane.lane, sealed, lane.end))
    return spans


def with_losses(events: list[Event], in_the_end: list[Span]) -> list[Event]:
    """Put lost spans behind the loss of the fabric with which they went: all are known when the next one comes.

    What went with none comes last.
    """
    stops = [event for event in events if isinstance(event, Stopped)]
    known_later = iter([*(stop.lost for stop in stops[1:]), in_the_end])
    placed: list[Event] = []
    told: set[Span] = set()

    def tell(spans: list[Span], at: int) -> None:
        new = [span for span in spans if span not in told]
        told.update(new)
        placed.extend(LostSpan(at=at, lane=lane, start=start, stop=stop) for lane, start, stop in new)

    for event in events:
        placed.append(event)
        if isinstance(event, FabricLost):
            tell(next(known_later), event.at)
    tell(in_the_end, events[-1].at)
    return placed


def disk_events(history: History, found: Stored, ranges: list[Range], at_us: int) -> list[Event]:
    """What is on disks, and for each batch that was acked as durable whether enough disks have it."""
    events: list[Event] = [
        OnDisk(at=at_us, lane=lane, index=index, digest=digest, copies=copies)
        for (lane, index, digest), copies in found.items()
    ]
    copies_at = defaultdict[tuple[int, int], int](int)
    for (lane, index, _), copies in found.items():
        copies_at[lane, index] += copies
    by_lane = defaultdict[int, list[Range]](list)
    for range_ in ranges:
        by_lane[range_.lane].append(range_)
    for ack in history.of(Settled):
        if ack.verdict is Verdict.STORED and ack.ack == Ack.DURABLE and ack.index is not None:
            owner = owner_of(by_lane[ack.lane], ack.index)
            copies, needed = (0, 1) if owner is None else (copies_at[ack.lane, ack.index], owner.durable_on)
            events.append(
                Copies(at=at_us, who=f"the ack to {ack.process}", lane=ack.lane, index=ack.index, copies=copies,
                       needed=needed)
            )  # fmt: skip
    return events
