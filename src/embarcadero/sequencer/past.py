"""What replicas have on disk, read through their folders: only for lanes that come back after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from embarcadero.env import Disk
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import Entries
from embarcadero.storage.checkpoints import newest_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.types import Range, ReplicaMember, ReplicaState, Topic

_DO = "start the replicas that are missing"


class DiskPast:
    """Reads from whichever replica has a good copy; entries also from folders of replicas that are down.

    Workers call it: it gets the members from memory, never from the store.
    """

    def __init__(
        self, members: Callable[[], list[ReplicaMember]], disks: Callable[[ReplicaMember], Disk] | None
    ) -> None:
        self._members, self._disks = members, disks
        self._opened: dict[tuple[int, int], Disk] = {}

    def _all(self, first: list[int], live: bool = False) -> Iterator[Disk]:
        """The disks of these replicas, then all others, as far as they can be opened."""
        newest = {member.replica: member for member in self._members()}
        numbers = [*first, *(number for number in newest if number not in first)]
        for member in (newest[number] for number in numbers if number in newest):
            if live and member.state is ReplicaState.DEAD:
                continue
            key = (member.replica, member.incarnation)
            if self._disks is not None and key not in self._opened:
                try:
                    self._opened[key] = self._disks(member)
                except (EmbarcaderoError, OSError):
                    continue
            if key in self._opened:
                yield self._opened[key]

    def checkpoint(self, topic: Topic, at_most: int) -> tuple[int, bytes] | None:
        """The newest session checkpoint of a topic at or below an index.

        Only of replicas that are up: of the others it is not known whether their folders are the topic's.
        """
        best: tuple[int, bytes] | None = None
        for disk in self._all([], live=True):
            try:
                found = newest_checkpoint(disk, lane_folder(topic.lane), at_most, topic.checkpoint_ids)
            except EmbarcaderoError:
                continue
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        return best

    def entries(self, range_: Range, start: int, stop: int) -> Entries:
        """The entries [start, stop) of a range: all of them, from one good copy."""
        for disk in self._all([ref.replica for ref in range_.replicas]):
            lane, number = range_.lane, range_.number
            reader = RangeReader(disk, range_folder(lane, number), lane, number, range_.start)
            try:
                found = reader.entries(start, stop)
            except EmbarcaderoError:
                continue
            finally:
                reader.close()
            if len(found) == stop - start and int(found["index"][0]) == start:
                return found
        raise BadSegment(f"no replica within reach has records {start} to {stop} of lane {range_.lane}", _DO)
