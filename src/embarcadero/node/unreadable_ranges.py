"""Sealed ranges whose records no replica's files have any more: they can't be copied, wherever they shall go.

Found by names, headers and footers of segments; damage inside them is not looked for. A folder that can't be looked at
counts as readable: this process may lack the right to do so, and replicas have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from embarcadero.env import Disk
from embarcadero.errors import EmbarcaderoError
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.placement.directory import Directory
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.real import RealDisk
from embarcadero.types import Range, ReplicaMember

_SPANS_MAX = 3
"""Spans of batches that a sentence names."""


def disk_of(member: ReplicaMember) -> Disk:
    """A replica's folder on this machine."""
    return RealDisk(member.folder)


def unreadable_ranges(
    ranges: Iterable[Range], members: Mapping[int, ReplicaMember], trims: Mapping[int, int],
    disk_of: Callable[[ReplicaMember], Disk] = disk_of,
) -> list[Range]:  # fmt: skip
    """Those of the sealed ranges that the files of their replicas do not have from end to end, even all together.

    `members`: the newest incarnation of each replica. `trims`: where lanes start; what is below is not missed.
    """
    return [
        range_
        for range_ in ranges
        if range_.end is not None and range_.replicas and not _is_readable(range_, range_.end, members, trims, disk_of)
    ]


def _is_readable(
    range_: Range, end: int, members: Mapping[int, ReplicaMember], trims: Mapping[int, int],
    disk_of: Callable[[ReplicaMember], Disk],
) -> bool:  # fmt: skip
    """Whether copies have all records between them: a replica takes each piece from whichever peer has it."""
    folder, index = range_folder(range_.lane, range_.number), max(range_.start, trims.get(range_.lane, 0))
    named = [members[ref.replica] for ref in range_.replicas if ref.replica in members]
    try:
        readers = [RangeReader(disk_of(one), folder, range_.lane, range_.number, range_.start) for one in named]
    except EmbarcaderoError:
        return True
    try:
        while index < end:
            reached = max((reader.covered(index, end) for reader in readers), default=index)
            if reached <= index:
                return False
            index = reached
    except EmbarcaderoError:
        return True
    finally:
        for reader in readers:
            reader.close()
    return True


def topics_by_lane(directory: Directory) -> dict[int, str]:
    """The name of each lane's topic; lanes of brokers have that of their topic."""
    names = {topic.lane: topic.name for topic in directory.topics()}
    return names | {lane.lane: names[lane.topic] for lane in directory.lanes() if lane.topic in names}


def in_words(unreadable: Sequence[Range], topics: Mapping[int, str]) -> list[str]:
    """A sentence for each lane: which batches no copy has, and what an operator can do."""
    lanes: dict[int, list[Range]] = {}
    for range_ in unreadable:
        lanes.setdefault(range_.lane, []).append(range_)
    return [_lane_in_words(lane, topics.get(lane, ""), ranges) for lane, ranges in sorted(lanes.items())]


def _lane_in_words(lane: int, topic: str, ranges: Sequence[Range]) -> str:
    ends = [range_.end or 0 for range_ in ranges]
    spans = [f"{range_.start} to {end - 1}" for range_, end in zip(ranges, ends, strict=True)]
    more = ", ..." if len(spans) > _SPANS_MAX else ""
    which = "1 sealed range" if len(ranges) == 1 else f"{len(ranges)} sealed ranges"
    replicas = sorted({ref.replica for range_ in ranges for ref in range_.replicas})
    option = f" --lane {lane}" if lane >= BROKER_LANES_FIRST else ""
    return (
        f"topic {topic}, lane {lane}: no copy of {which} (batches {', '.join(spans[:_SPANS_MAX])}{more}) is complete: "
        f"bring back the files of replica {' or '.join(map(str, replicas))}; if they are gone for good, give up all "
        f"batches below {max(ends)}: `embarcadero topic trim {topic} --before-index {max(ends)}{option}`"
    )
