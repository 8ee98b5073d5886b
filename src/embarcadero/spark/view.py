"""What a driver asks the log: where its lanes start and end, where a place is, how large a span is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from embarcadero.client.sync import Log
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadValue, FuturePosition, Trimmed
from embarcadero.limits import SPARK_TASK_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.offsets import Place
from embarcadero.spark.options import GO_ON, ReadOptions, Where
from embarcadero.spark.planning import COARSE_ENOUGH, cut_places, finer, shares, task_bytes, tightened
from embarcadero.types import Cut, Order, Position, Tail

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LaneNow:
    """A lane as it is now: where its readable part starts, where it ends for this reader, whether that is for good."""

    lane: int
    start: Place
    end: Place
    ordered: Place  # where it ends for those who read what is not durable yet
    closed: bool


@dataclass(frozen=True, slots=True)
class TopicNow:
    """A topic and its lanes, looked at once."""

    about: TopicInfo
    lanes: dict[int, LaneNow]


class TopicView:
    """Questions about one topic, over the one client of this process."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    @property
    def log(self) -> Log:
        """The client."""
        return shared_log(self.options.brokers)

    def describe(self) -> TopicInfo:
        """The topic. Raises UnknownTopic."""
        return self.log.describe(self.options.topic)

    def now(self) -> TopicNow:
        """The topic and its lanes. Raises UnknownTopic."""
        about, tails = self.log.survey(self.options.topic)
        ended = {lane.lane for lane in about.lanes if not lane.open}
        return TopicNow(about, {tail.lane: self._lane(tail, tail.lane in ended) for tail in tails})

    def _lane(self, tail: Tail, ended: bool) -> LaneNow:
        durable = self.options.read == "durable"
        ordered = Place(tail.index, tail.seq)
        end = Place(tail.durable_index, tail.durable_seq) if durable else ordered
        start = Place(tail.start_index, tail.start_seq)
        return LaneNow(tail.lane, min(start, end), end, ordered, ended and end == ordered)

    # --- places -------------------------------------------------------------------------------------------------------
    def place_of(self, lane: int, seq: int) -> Place:
        """The place of a record: in its batch, or behind what is lost there. Raises Trimmed, FuturePosition."""
        return _place(self.log.position_of(self.options.topic, seq=seq, lane=lane), seq)

    def place_at_index(self, lane: int, index: int) -> Place:
        """The place of a batch, or behind what is lost there. Raises Trimmed, FuturePosition."""
        return _place(self.log.position_of(self.options.topic, index=index, lane=lane))

    def place_at(self, now: LaneNow, us: int) -> Place:
        """The first batch appended at or after a time; where the lane starts if that was trimmed."""
        try:
            found = self.log.position_at(self.options.topic, _EPOCH + timedelta(microseconds=us), lane=now.lane)
        except Trimmed:
            return now.start
        return min(max(_place(found), now.start), now.end)

    def resolve(self, where: Where, now: TopicNow, option: str, *, rest: Where) -> dict[int, Place]:
        """The places that an option names, by lane; lanes that it does not name are at `rest`."""
        if where.by == "lanes":
            named = dict(where.lanes)
            if unknown := named.keys() - now.lanes.keys():
                raise BadValue(
                    f"option {option!r} names lane {min(unknown)}, and topic {self.options.topic!r} has "
                    f"{', '.join(map(str, sorted(now.lanes))) or 'none yet'}",
                    "lanes of orders 0 and 1 come with brokers and go when nothing of them is left",
                )
            return {lane: self._resolved(named.get(lane, rest), each, option) for lane, each in now.lanes.items()}
        if where.by == "seq" and now.about.order <= Order.BROKER:
            raise BadValue(
                f"topic {self.options.topic!r} has order {now.about.order}: a seq names a place in one of its lanes",
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
    def measure(self, lane: int, start: Place, stop: Place, piece: int, most: int | None = None) -> list[Cut]:
        """Pieces of a span, of whole batches."""
        return self.log.measure(
            self.options.topic, start.index, stop.stop, piece, lane=lane, pieces_max=most
        )

    def cuts(self, ends: dict[int, tuple[Place, Place]]) -> dict[int, tuple[Place, ...]]:
        """Where to cut spans of lanes into tasks of about the same size: at least `minPartitions` in all."""
        coarse = {lane: self.measure(lane, *span, SPARK_TASK_BYTES) for lane, span in ends.items()}
        sizes = {lane: sum(cut.bytes for cut in cuts) for lane, cuts in coarse.items()}
        total, wanted = sum(sizes.values()), self.options.min_partitions
        piece = task_bytes(total, wanted)
        if sum(map(len, coarse.values())) < COARSE_ENOUGH and piece < max(sizes.values(), default=0):
            coarse = {lane: self.measure(lane, *span, piece) for lane, span in ends.items()}
        found = {lane: cut_places(*span, coarse[lane]) for lane, span in ends.items()}
        if wanted is None or (missing := wanted - sum(len(cuts) + 1 for cuts in found.values())) <= 0:
            return found
        extra = shares(missing, {lane: stop.seq - start.seq for lane, (start, stop) in ends.items()})
        for lane, cuts in found.items():
            low, high = ends[lane]
            tight = low if low.within else self.place_of(lane, low.seq)
            found[lane] = finer(tight, tightened(high, coarse[lane]), cuts, len(cuts) + 1 + extra[lane])
        return found


def _place(found: Position, seq: int | None = None) -> Place:
    """A batch's place, or that of a record in it; what is lost is passed over."""
    if seq is None or seq <= found.seq:
        return Place(found.index, found.seq)
    return Place(found.index, seq, seq - found.seq)
