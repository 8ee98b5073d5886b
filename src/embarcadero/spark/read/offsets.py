"""Offsets of a stream: how far each lane is read. Of one topic:

    {"topic": "orders", "id": "5c07e6a91b2f43d8", "reader": "spark-5f0c",
     "0": {"index": 120, "seq": 48000}}

Of several topics, by their ids:

    {"reader": "spark-5f0c", "topics": {
      "5c07e6a91b2f43d8": {"topic": "clicks", "3": {"index": 7, "seq": 70, "first": [2, 20]}},
      "01d27aa0f1e1b3c4": {"topic": "orders", "0": {"index": 120, "seq": 48000}}}}

A place may be inside a batch (`within` says how many of its records are below), so limits on records are exact. Lanes
of topics of orders 0 and 1 come and go: one that was read to its end is kept, with `ended`, until the topic does not
know it any more. `id` is that of the topic: a topic that was deleted and created again has another one. `first` is
where a topic was begun that came after the query had started. Earlier versions also told where a micro-batch was cut
into tasks (`cuts`), and the first ones told no `id`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from embarcadero.errors import BadValue
from embarcadero.types import Span, id_text

_TOPIC: Final = "topic"
_READER: Final = "reader"
_ID: Final = "id"
_TOPICS: Final = "topics"
_HINT: Final = "this checkpoint was not made by this source; start with a new checkpointLocation"


class RecordPosition(NamedTuple):
    """Between two records of a lane: `seq` is the next one, `index` its batch, `within` how many of it are below."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    within: int = 0

    @property
    def stop(self) -> int:
        """The index at which a scan of everything below this place stops."""
        return self.index + (self.within > 0)


BEGINNING: Final = RecordPosition(0, 0)


class TaskSpan(NamedTuple):
    """What one task reads: the records from `start` up to `stop` of a lane."""

    lane: int
    start: RecordPosition
    stop: RecordPosition
    topic: str


@dataclass(frozen=True, slots=True)
class LaneOffset:
    """How far a lane is read. `cuts` are the places at which the last micro-batch was cut into tasks.

    `first`, only in the end of the micro-batch that begins with it: where the lane of a new topic was begun.
    `holes`, only in the offset that reports where a topic ends: seqs that restarts passed over, for counting records.
    """

    place: RecordPosition
    cuts: tuple[RecordPosition, ...] = ()
    ended: bool = False
    holes: tuple[Span, ...] = ()
    first: RecordPosition | None = None

    def told(self) -> dict[str, Any]:
        """As Spark keeps it."""
        told: dict[str, Any] = {"index": self.place.index, "seq": self.place.seq}
        if self.place.within:
            told["within"] = self.place.within
        if self.cuts:
            told["cuts"] = [list(cut if cut.within else cut[:2]) for cut in self.cuts]
        if self.first is not None:
            told["first"] = list(self.first if self.first.within else self.first[:2])
        if self.holes:
            told["holes"] = [list(hole) for hole in self.holes]
        return told | ({"ended": True} if self.ended else {})


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a stream has read one topic. `reader` is a name made when the query first started; it stays with it."""

    topic: str
    reader: str
    lanes: Mapping[int, LaneOffset] = field(default_factory=dict)
    topic_id: int = 0  # 0: not known, as in offsets of earlier versions

    def told(self) -> dict[str, Any]:
        """As Spark keeps it: a JSON object."""
        identity = {_ID: id_text(self.topic_id)} if self.topic_id else {}
        return {_TOPIC: self.topic, _READER: self.reader, **identity} | self.told_lanes()

    def told_lanes(self) -> dict[str, Any]:
        """The lanes as Spark keeps them."""
        return {str(lane): offset.told() for lane, offset in sorted(self.lanes.items())}

    def of(self, lane: int) -> RecordPosition:
        """How far a lane is read; one that came since then is not."""
        known = self.lanes.get(lane)
        return BEGINNING if known is None else known.place

    def places(self) -> dict[int, tuple[int, int]]:
        """Index and seq by lane."""
        return {lane: (offset.place.index, offset.place.seq) for lane, offset in self.lanes.items()}

    def without_cuts(self) -> Offset:
        """The same place, whatever the last micro-batch was."""
        lanes = {lane: replace(offset, cuts=(), first=None) for lane, offset in self.lanes.items()}
        return replace(self, lanes=lanes)

    def firsts(self) -> dict[int, LaneOffset]:
        """Where the lanes of a new topic were begun."""
        return {lane: LaneOffset(offset.first) for lane, offset in self.lanes.items() if offset.first is not None}


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """How far a stream has read its topics, by name. `several` is the format: one topic is told as it always was."""

    reader: str
    topics: Mapping[str, Offset] = field(default_factory=dict)
    several: bool = False

    def told(self) -> dict[str, Any]:
        """As Spark keeps it: a JSON object."""
        if not self.several:
            return next(iter(self.topics.values())).told()
        topics = sorted(self.topics.items())
        told = {id_text(each.topic_id): {_TOPIC: name} | each.told_lanes() for name, each in topics}
        return {_READER: self.reader, _TOPICS: told}

    def lanes(self) -> dict[str, Collection[int]]:
        """The lanes of each topic."""
        return {name: each.lanes.keys() for name, each in self.topics.items()}


def parse_stream_offset(told: Any) -> StreamOffset:
    """An offset of one topic or of several that Spark kept for us. BadValue, if it is of another source."""
    if not isinstance(told, dict) or not isinstance(told.get(_TOPICS), dict):
        one = parse_offset(told)
        return StreamOffset(one.reader, {one.topic: one})
    reader = told.get(_READER)
    topics: dict[str, Offset] = {}
    for identity, each in told[_TOPICS].items():
        if not isinstance(each, dict) or _ID in each or _READER in each:
            raise BadValue(f"{str(told)[:200]} is no offset of this source", _HINT)
        one = parse_offset({**each, _READER: reader, _ID: identity})
        if one.topic in topics or one.topic_id in {known.topic_id for known in topics.values()}:
            raise BadValue(f"{str(told)[:200]} has topic {one.topic!r} twice", _HINT)
        topics[one.topic] = one
    if not isinstance(reader, str):
        raise BadValue(f"{str(told)[:200]} is no offset of this source", _HINT)
    return StreamOffset(reader, topics, several=True)


def parse_offset(told: Any, topic: str | None = None) -> Offset:
    """An offset of one topic. BadValue, if it is of another source or topic."""
    if not isinstance(told, dict) or not isinstance(told.get(_TOPIC), str) or not isinstance(told.get(_READER), str):
        raise BadValue(f"{str(told)[:200]} is no offset of this source", _HINT)
    if topic is not None and told[_TOPIC] != topic:
        raise BadValue(
            f"the checkpoint is of a query that reads topic {told[_TOPIC]!r}, and this one reads {topic!r}",
            "use one checkpointLocation per query",
        )
    lanes = {key: value for key, value in told.items() if key not in (_TOPIC, _READER, _ID)}
    try:
        parsed, topic_id = {int(key): _parse_lane(value) for key, value in lanes.items()}, int(told.get(_ID, "0"), 16)
    except (TypeError, ValueError, KeyError) as error:
        raise BadValue(f"{str(told)[:200]} is no offset of this source ({error!r})", _HINT) from None
    return Offset(told[_TOPIC], told[_READER], parsed, topic_id)


def _parse_lane(told: Mapping[str, Any]) -> LaneOffset:
    place = RecordPosition(int(told["index"]), int(told["seq"]), int(told.get("within", 0)))
    cuts = tuple(RecordPosition(*(int(number) for number in cut)) for cut in told.get("cuts", ()))
    holes = tuple((int(start), int(stop)) for start, stop in told.get("holes", ()))
    first = None if "first" not in told else RecordPosition(*(int(number) for number in told["first"]))
    return LaneOffset(place, cuts, told.get("ended") is True, holes, first)


def spans(start: Offset, end: Offset) -> list[TaskSpan]:
    """The tasks between two offsets, in order of lane and place. Nothing but the offsets decides."""
    found: list[TaskSpan] = []
    for lane, until in sorted(end.lanes.items()):
        at = start.of(lane)
        for place in (*until.cuts, until.place):
            if at.seq < place.seq:  # entries without records are no reason for a task
                found.append(TaskSpan(lane, at, place, end.topic))
                at = place
    return found
