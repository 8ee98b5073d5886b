"""What a driver asks the log: where its lanes start and end, where a place is, how large a span is."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from embarcadero.client.results import TopicInfo
from embarcadero.client.sync import Log
from embarcadero.errors import BadSchema, BadValue, FuturePosition, Trimmed, UnknownTopic
from embarcadero.limits import SPARK_TASK_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.interpreter import known_cores
from embarcadero.spark.offsets import Place
from embarcadero.spark.options import GO_ON, ReadOptions, Where
from embarcadero.spark.planning import LaneKey, cut_places, finer, shares, task_bytes, tightened
from embarcadero.types import Cut, Order, Position, Tail
from embarcadero.wire.schemas import RAW, TopicSchemas

_TRIES: Final = 4
"""So often pieces are halved to get as many tasks as asked for; then batches are."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


Ends = dict[LaneKey, tuple[Place, Place]]
"""By topic and lane: where a read, or a micro-batch, starts and ends."""
_Measured = dict[LaneKey, list[Cut]]
_Cuts = dict[LaneKey, tuple[Place, ...]]


@dataclass(frozen=True, slots=True)
class LaneNow:
    """A lane as it is now: where its readable part starts, where it ends for this reader, whether that is for good."""

    lane: int
    start: Place
    end: Place
    ordered: Place  # where it ends for those who read what is not durable yet
    closed: bool
    holes: tuple[tuple[int, int], ...] = ()  # seqs that restarts passed over


@dataclass(frozen=True, slots=True)
class TopicNow:
    """A topic and its lanes, looked at once."""

    about: TopicInfo
    lanes: dict[int, LaneNow]


Topics = dict[str, TopicNow]
"""The topics of a read by name, looked at at the same time."""


class ReadView:
    """Questions about all topics of one read, over the one client of this process."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    @property
    def log(self) -> Log:
        """The client."""
        return shared_log(self.options.brokers)

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How files of tables are reached, by the configuration of this process."""
        return self.log.table_properties

    def topic(self, name: str) -> TopicView:
        """Questions about one of the topics."""
        return TopicView(self.options, name)

    def schemas(self) -> TopicSchemas:
        """The schemas of the topic; of several, that of raw topics. Raises UnknownTopic, BadSchema."""
        if not self.options.several:
            return self.log.describe(self.options.topics[0]).versions
        topics = {topic.name: topic for topic in self.log.topics(hidden=self.options.pattern is None)}
        if missing := [name for name in self.options.topics if name not in topics]:
            raise UnknownTopic(f"there is no topic {missing[0]!r}", "see `embarcadero topic list`")
        for name in self.options.chosen(topics):
            self._check_raw(name, topics[name].schema_version > 0)
        return RAW

    def _check_raw(self, name: str, typed: bool) -> None:
        if typed:
            raise BadSchema(
                f"topic {name!r} has a schema, and a read of several topics takes raw topics only",
                "read topics with a schema one by one; with union() or unionByName() they become one frame",
            )

    def now(self, expected: Mapping[str, Collection[int]] | None = None) -> Topics:
        """The topics and their lanes: quicker if the lanes are those that are expected.

        Raises UnknownTopic if the only topic does not exist. Of several, those that do not exist are left out.
        """
        known, names, log = expected or {}, self.options.topics, self.log
        if self.options.pattern is not None:
            names = tuple(self.options.chosen(topic.name for topic in log.topics()))
        several = self.options.several
        found = log.survey({name: known.get(name, ()) for name in sorted(names)}, missing_ok=several)
        for name, (about, _) in found.items() if several else ():
            self._check_raw(name, about.versions.typed)
        return {name: self.topic(name).seen(about, tails) for name, (about, tails) in found.items()}

    def resolve(self, where: Where, now: Topics, option: str, *, rest: Where) -> dict[LaneKey, Place]:
        """The places that an option names, by topic and lane; those that it does not name are at `rest`."""
        named = dict(where.topics)
        if unknown := sorted(named.keys() - now.keys()):
            raise BadValue(
                f"option {option!r} names topic {unknown[0]!r}, and there are {', '.join(now) or 'none yet'}",
                "leave it out, or create the topic first",
            )
        found: dict[LaneKey, Place] = {}
        for name, topic in now.items():
            one = named.get(name, rest) if where.by == "topics" else where
            places = self.topic(name).resolve(one, topic, option, rest=rest)
            found |= {(name, lane): place for lane, place in places.items()}
        return found

    # --- tasks --------------------------------------------------------------------------------------------------------
    def cuts(self, now: Topics, ends: Ends) -> _Cuts:
        """Where to cut spans of lanes into tasks of about the same size: at least `minPartitions` in all."""
        wanted, piece = self.options.min_partitions or 1, SPARK_TASK_BYTES
        measured = self._all_pieces(now, ends, piece)
        sizes = [sum(cut.bytes for cut in pieces) for pieces in measured.values()]
        size = task_bytes(sum(sizes), self.options.min_partitions, known_cores(os.environ))
        if size < min(piece, max(sizes, default=0)):
            measured, piece = self._all_pieces(now, ends, size), size
        found = _cut(ends, measured)
        for _ in range(_TRIES):  # batches, files and row groups are not all of the same size
            if _tasks(found) >= wanted or piece == 1:
                break
            piece = max(1, piece // 2)
            measured = self._all_pieces(now, ends, piece)
            found = _cut(ends, measured)
        return self._finer(ends, measured, found, wanted - _tasks(found))

    def _all_pieces(self, now: Topics, ends: Ends, piece: int) -> _Measured:
        return {
            (topic, lane): self.topic(topic).pieces(now[topic], lane, *span, piece)
            for (topic, lane), span in ends.items()
        }

    def _finer(self, ends: Ends, measured: _Measured, found: _Cuts, missing: int) -> _Cuts:
        """More tasks than there are batches: batches are cut by seq."""
        if missing <= 0:
            return found
        extra = shares(missing, {key: high.seq - low.seq for key, (low, high) in ends.items()})
        finest: _Cuts = {}
        for key, cuts in found.items():
            low, high = ends[key]
            tight = low if low.within else self.topic(key[0]).place_of(key[1], low.seq)
            finest[key] = finer(tight, tightened(high, measured[key]), cuts, len(cuts) + 1 + extra[key])
        return finest


class TopicView:
    """Questions about one topic, over the one client of this process."""

    def __init__(self, options: ReadOptions, topic: str) -> None:
        self.options, self._topic = options, topic

    @property
    def log(self) -> Log:
        """The client."""
        return shared_log(self.options.brokers)

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How files of tables are reached, by the configuration of this process."""
        return self.log.table_properties

    def seen(self, about: TopicInfo, tails: Collection[Tail]) -> TopicNow:
        """The topic as brokers told it."""
        last = {lane.lane: lane.end for lane in about.lanes}
        return TopicNow(about, {tail.lane: self._lane(tail, last.get(tail.lane)) for tail in tails})

    def _lane(self, tail: Tail, last: int | None) -> LaneNow:
        durable = self.options.read == "durable"
        ordered = Place(tail.index, tail.seq)
        end = Place(tail.durable_index, tail.durable_seq) if durable else ordered
        start = Place(tail.start_index, tail.start_seq)
        closed = last is not None and end.index >= last
        return LaneNow(tail.lane, min(start, end), end, ordered, closed, tail.holes)

    # --- places -------------------------------------------------------------------------------------------------------
    def place_of(self, lane: int, seq: int) -> Place:
        """The place of a record: in its batch, or behind what is lost there. Raises Trimmed, FuturePosition."""
        return _place(self.log.position_of(self._topic, seq=seq, lane=lane), seq)

    def place_at_index(self, lane: int, index: int) -> Place:
        """The place of a batch, or behind what is lost there. Raises Trimmed, FuturePosition."""
        return _place(self.log.position_of(self._topic, index=index, lane=lane))

    def place_at(self, now: LaneNow, us: int) -> Place:
        """The first batch appended at or after a time; where the lane starts if that was trimmed."""
        try:
            found = self.log.position_at(self._topic, _EPOCH + timedelta(microseconds=us), lane=now.lane)
        except Trimmed:
            return now.start
        return min(max(_place(found), now.start), now.end)

    def resolve(self, where: Where, now: TopicNow, option: str, *, rest: Where) -> dict[int, Place]:
        """The places that an option names, by lane; lanes that it does not name are at `rest`."""
        if where.by == "lanes":
            named = dict(where.lanes)
            if unknown := named.keys() - now.lanes.keys():
                raise BadValue(
                    f"option {option!r} names lane {min(unknown)}, and topic {self._topic!r} has "
                    f"{', '.join(map(str, sorted(now.lanes))) or 'none yet'}",
                    "lanes of orders 0 and 1 come with brokers and go when nothing of them is left",
                )
            return {lane: self._resolved(named.get(lane, rest), each, option) for lane, each in now.lanes.items()}
        if where.by == "seq" and now.about.order <= Order.BROKER:
            raise BadValue(
                f"topic {self._topic!r} has order {now.about.order}: a seq names a place in one of its lanes",
                f'use JSON by lane: .option("{option}", \'{{"{min(now.lanes, default=4096)}": {{"seq": 1000}}}}\')',
            )
        return {lane: self._resolved(where, each, option) for lane, each in now.lanes.items()}

    def _resolved(self, where: Where, now: LaneNow, option: str) -> Place:
        if where.by in ("earliest", "latest"):
            return now.start if where.by == "earliest" else now.end
        if where.by == "time":
            return self.place_at(now, where.value)
        place, number = ("seq", 1) if where.by == "seq" else ("index", 0)
        first, last = now.start[number], now.end[number]
        if where.value > last:
            raise FuturePosition(
                f"option {option!r}: {place} {where.value} is beyond the end of lane {now.lane} ({last})",
                f'use at most {last}, or "latest"',
            )
        if where.value < first:
            if self.options.fail_on_data_loss:
                raise Trimmed(
                    f"option {option!r}: records before {place} {first} of lane {now.lane} are trimmed",
                    f'use at least {first}, or "earliest"; {GO_ON}',
                )
            return now.start
        if where.value == last:
            return now.end
        if where.by == "seq":
            return self.place_of(now.lane, where.value)
        return self.place_at_index(now.lane, where.value)

    # --- sizes --------------------------------------------------------------------------------------------------------
    def pieces(self, now: TopicNow, lane: int, start: Place, stop: Place, piece: int) -> list[Cut]:
        """Pieces of a span: of its table below the frontier, of brokers from there on."""
        tier, found = now.about.tier, []
        frontier = 0 if tier is None else min(tier.frontier(lane)[0], stop.stop)
        if tier is not None and start.index < frontier:
            from embarcadero.spark.cold import open_table, table_pieces, table_visible

            if table_visible(tier.id, tier.metadata, self._topic):
                table = open_table(tier, self.table_properties)
                found = table_pieces(table, lane, start.index, frontier, piece)
            else:
                found = self.log.measure(self._topic, start.index, frontier, piece, lane=lane)
        return found + self._measured(now, lane, max(start.index, frontier), stop, piece)

    def first_pieces(self, now: TopicNow, lane: int, start: Place, stop: Place, piece: int, most: int) -> list[Cut]:
        """The first pieces of a span, by payload bytes as they were published."""
        tier = now.about.tier
        frontier = 0 if tier is None else min(tier.frontier(lane)[0], stop.stop)
        if tier is None or start.index >= frontier:
            return self._measured(now, lane, start.index, stop, piece, most)
        from embarcadero.spark.cold import open_table, payload_pieces, table_visible

        if not table_visible(tier.id, tier.metadata, self._topic):
            return self.log.measure(self._topic, start.index, frontier, piece, lane=lane)[:most]
        table = open_table(tier, self.table_properties)
        return payload_pieces(table, lane, start.index, frontier, piece, most)

    def _measured(
        self, now: TopicNow, lane: int, start: int, stop: Place, piece: int, most: int | None = None
    ) -> list[Cut]:
        if start >= stop.stop:
            return []
        try:
            return self.log.measure(now.about, start, stop.stop, piece, lane=lane, pieces_max=most, table=False)
        except Trimmed:  # brokers have let go of it since we looked; tasks find it in the table, or say that it is gone
            return [Cut(stop.stop, stop.seq, 0)]


def _cut(ends: Ends, measured: _Measured) -> _Cuts:
    return {key: cut_places(*span, measured[key]) for key, span in ends.items()}


def _tasks(cuts: _Cuts) -> int:
    return sum(len(each) + 1 for each in cuts.values())


def _place(found: Position, seq: int | None = None) -> Place:
    """A batch's place, or that of a record in it; what is lost is passed over."""
    if seq is None or seq <= found.seq:
        return Place(found.index, found.seq)
    return Place(found.index, seq, seq - found.seq)
