"""The tables in which roles keep objects of lanes. No role may keep an object of a deleted topic (P9).

Removed regions and deleted files live as long as a process has them open, and objects are memory, too. Tables are named
here as attributes of the role; `*` stands for each value of a table. Two kinds are left out, since the next change of
the store refreshes them: readers of tagged lines, and a broker's cache of chains of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from embarcadero.types import Range, TopicLane

if TYPE_CHECKING:
    from embarcadero.broker.broker import Broker
    from embarcadero.replica.replica import Replica
    from embarcadero.sequencer.leader.sequencer import Sequencer

_BROKER: Final = (
    "peers.*.lanes", "peers.*.reading", "peers.*.sessions", "peers.*.turns", "sessions.attached", "store.broker_lanes",
    "store.lanes", "store.trims", "counters.came_in", "counters.went_out",
    "durable._durability._known", "durable._durability._open", "epoch._orders", "awaiting._lanes",
    "lanes._maker._without_memory", "lanes._writers", "readers._readers", "readers.disks.copies._good",
    "readers.disks.copies._idle", "admission.references._queues.*",
)  # fmt: skip

_REPLICA: Final = (
    "_stock.following", "_stock.lacking", "_stock.open", "_ranges", "brokers._lanes", "brokers._rings",
    "commits._unmarked", "commits._lone", "health._ill", "lines._values", "moving._bereft", "moving._failures",
    "moving._sealed", "moving._stalled", "moving._unrecorded", "ranges._doubts", "ranges._leaving", "ranges._surplus",
    "ranges._trims", "ranges._wanted", "ranges.adopted", "ranges.copies", "ranges.refilled", "leader._orders",
    "repair._gave_up_us", "repair._readers", "repair._tried", "retention._chains", "retention._topics",
    "retention._trims", "sessions._known", "sessions._regions", "topics",
)  # fmt: skip

_SEQUENCER: Final = (
    "_takeover._prefetched_lanes", "_upkeep._broker_ranges._over", "_upkeep._cleanups.*", "lanes", "ranges._changing",
    "ranges._moved", "ranges._unsaved", "ranges._unsettled", "ranges._words._values", "ranges.grown",
    "ranges.lanes", "recovery.lanes", "without_memory",
)  # fmt: skip


def tables_of_broker(broker: Broker) -> Iterator[tuple[str, int]]:
    """Yield the tables of a broker, each with a lane in it."""
    return _in_tables(broker, _BROKER)


def tables_of_replica(replica: Replica) -> Iterator[tuple[str, int]]:
    """Yield the tables of a replica, each with a lane in it."""
    return _in_tables(replica, _REPLICA)


def tables_of_sequencer(sequencer: Sequencer) -> Iterator[tuple[str, int]]:
    """Yield the tables of a sequencer that has begun, each with a lane in it."""
    return _in_tables(sequencer, _SEQUENCER)


def _in_tables(role: object, tables: Iterable[str]) -> Iterator[tuple[str, int]]:
    for name in tables:
        for table in _reached(role, name.split(".")):
            for item in table:
                yield name, _lane(item)


def _reached(role: object, path: list[str]) -> list[Any]:
    """Follow a path of attributes to its values. A missing object on the way holds nothing."""
    found: list[Any] = [role]
    for name in path:
        if name == "*":
            found = [value for table in found for value in (table.values() if isinstance(table, Mapping) else table)]
        else:
            found = [getattr(one, name) for one in found]
        found = [one for one in found if one is not None]
    return found


def _lane(item: Any) -> int:
    """Return the lane of a table's item: a lane, a tuple that begins with a lane or names it, or an object."""
    if isinstance(item, int):
        return item
    if isinstance(item, tuple):
        return _lane(getattr(item, "tags", item)[0])
    if isinstance(item, Range | TopicLane):
        return item.lane
    return int(item.range_.lane)  # copies of ranges, and a sequencer's view of them
