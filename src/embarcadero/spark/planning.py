"""Arithmetic of plans: how a limit is shared among lanes, how a lane is cut into tasks. Nothing here asks the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from embarcadero.limits import SPARK_TASK_BYTES, SPARK_TASK_BYTES_MIN, SPARK_TASKS_MAX, SPARK_TASKS_USUAL
from embarcadero.spark.offsets import Place
from embarcadero.types import Cut

LaneKey = tuple[str, int]
"""A lane of a read: the name of its topic, and its number."""
Key = TypeVar("Key", int, LaneKey)
Value = TypeVar("Value")


def fair_shares(limit: int, waiting: Mapping[str, int]) -> dict[str, int]:
    """A limit shared among topics evenly: what one does not need goes to the others, so a backlog delays itself only.

    If there is less than one for each, those have it where most waits. Shares add up to the limit, or to all there is.
    """
    given: dict[str, int] = {}
    left = limit
    for number, topic in enumerate(sorted(waiting, key=lambda topic: (waiting[topic], topic))):
        given[topic] = min(waiting[topic], left // (len(waiting) - number))
        left -= given[topic]
    return given


def shares(limit: int, waiting: Mapping[Key, int]) -> dict[Key, int]:
    """A limit shared among lanes in proportion to what waits there. Shares add up to the limit, or to all there is."""
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    exact = {lane: limit * amount for lane, amount in waiting.items()}
    given = {lane: amount // total for lane, amount in exact.items()}
    left = limit - sum(given.values())
    for lane in sorted(exact, key=lambda lane: (-(exact[lane] % total), lane))[:left]:
        given[lane] += 1
    return given


def lane_shares(limit: int, waiting: Mapping[LaneKey, int]) -> dict[LaneKey, int]:
    """A limit shared evenly among topics, and a topic's share among its lanes in proportion to what waits there."""
    found: dict[LaneKey, int] = {}
    topics = by_topic(waiting)
    fair = fair_shares(limit, {topic: sum(lanes.values()) for topic, lanes in topics.items()})
    for topic, lanes in topics.items():
        found |= {(topic, lane): share for lane, share in shares(fair[topic], lanes).items()}
    return found


def by_topic(values: Mapping[LaneKey, Value]) -> dict[str, dict[int, Value]]:
    """What is known of lanes, by topic and then by lane."""
    found: dict[str, dict[int, Value]] = {}
    for (topic, lane), value in values.items():
        found.setdefault(topic, {})[lane] = value
    return found


def task_bytes(total: int, tasks_min: int | None, cores: int | None = None) -> int:
    """How much one task is to read, if so much is read in all: all cores are busy until the end, if they are known."""
    together = cores or 1
    usual = -(-SPARK_TASKS_USUAL // together) * together
    tasks = max(-(-total // SPARK_TASK_BYTES), min(usual, total // SPARK_TASK_BYTES_MIN), 1)
    if tasks > together:
        tasks = min(-(-tasks // together) * together, SPARK_TASKS_MAX)
    bounded = max(SPARK_TASK_BYTES_MIN, -(-total // min(tasks, SPARK_TASKS_MAX)))
    return bounded if tasks_min is None else max(1, min(bounded, total // tasks_min))


def within_bytes(pieces: Sequence[Cut], limit: int) -> Cut:
    """Where to stop so that no more than `limit` bytes are read, and how many are; at least the first piece is."""
    end, total = pieces[0], pieces[0].bytes
    for piece in pieces[1:]:
        if total + piece.bytes > limit:
            break
        end, total = piece, total + piece.bytes
    return Cut(end.index, end.seq, total)


def cut_places(start: Place, stop: Place, pieces: Sequence[Cut]) -> tuple[Place, ...]:
    """Places strictly between start and stop at which to cut, from measured pieces; thinned out if too many."""
    by_seq = {cut.seq: cut for cut in reversed(pieces) if start.seq < cut.seq < stop.seq}  # not where no record is
    inner = [Place(cut.index, cut.seq) for _, cut in sorted(by_seq.items())]
    every = -(-(len(inner) + 1) // SPARK_TASKS_MAX)
    return tuple(inner[every - 1 :: every])


def tightened(stop: Place, pieces: Sequence[Cut]) -> Place:
    """The same place without entries before it that have no records."""
    return next((Place(cut.index, cut.seq) for cut in pieces if cut.seq == stop.seq), stop)


def finer(start: Place, stop: Place, cuts: Sequence[Place], tasks_min: int) -> tuple[Place, ...]:
    """More cuts, inside of batches, if there are fewer tasks than asked for: pieces of one batch are cut by seq."""
    places = [start, *cuts, stop]
    single = [number for number in range(len(places) - 1) if places[number].index == places[number + 1].stop - 1]
    missing = tasks_min - (len(places) - 1)
    if missing <= 0 or not single:
        return tuple(cuts)
    extra = shares(missing, {number: places[number + 1].seq - places[number].seq - 1 for number in single})
    found: list[Place] = []
    for number, (low, high) in enumerate(pairwise(places)):
        parts = extra.get(number, 0) + 1
        base = low.seq - low.within
        steps = {low.seq + (high.seq - low.seq) * part // parts for part in range(1, parts)}
        found += [Place(low.index, seq, seq - base) for seq in sorted(steps)]
        found += [high]
    return tuple(found[:-1])
