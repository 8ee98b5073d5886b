"""Reads of segment files beside everything else a broker does: few at once, fair over clients, one span ahead.

Jobs run on workers, so that a disk never holds up a publisher; a client with many of them waits for its turn, as does
one with a single one. Who reads on gets the next span read while it takes this one, if there is room for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from embarcadero.broker.found import Found
from embarcadero.broker.segments import RangeFiles, Segments
from embarcadero.env import Disk, Workers
from embarcadero.errors import DiskFailed, TooMany
from embarcadero.limits import WARM_AHEAD_BYTES_MAX, WARM_JOBS_MAX, WARM_JOBS_QUEUED_MAX, WARM_READERS_MAX
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.types import Range, ReplicaMember, ReplicaRef
from embarcadero.wire.messages import Fetch

if TYPE_CHECKING:
    from embarcadero.broker.connection import Connection

Done = Callable[[Any], None]
"""Told the result of a job, or the error that it raised."""

_AHEAD_KEPT_US = 2_000_000


class DiskCopies:
    """Copies of ranges in replicas' folders. Readers are kept for the next job; each has one user at a time."""

    def __init__(self, disks: Callable[[ReplicaMember], Disk]) -> None:
        self._disks = disks
        self.members: dict[int, ReplicaMember] = {}  # the newest incarnation of each replica; swapped as a whole
        self._open: dict[tuple[str, int], Disk] = {}
        self._idle: dict[tuple[int, int, int, str], list[RangeReader]] = {}
        self._good: dict[tuple[int, int], int] = {}  # (lane, range) -> the replica that answered last
        self._lanes: AbstractSet[int] | None = None  # those that there are; None: not known yet

    def keep(self, lanes: AbstractSet[int], members: dict[int, ReplicaMember]) -> None:
        """Take note of all lanes and replicas, and close the files of lanes that are gone.

        Workers may be about to borrow a reader: whoever takes it out of its list has it alone. One that is in use is
        closed when it is given back.
        """
        self._lanes, self.members = lanes, members
        for key in [key for key in list(self._idle) if key[0] not in lanes]:
            self._close_all(self._idle.pop(key, []))
        self._good = {key: replica for key, replica in list(self._good.items()) if key[0] in lanes}
        live = {(member.folder, member.incarnation) for member in members.values()}
        self._open = {key: disk for key, disk in list(self._open.items()) if key in live}

    def replicas(self, range_: Range) -> list[ReplicaRef]:
        """Who may have a copy: the one that answered last, then the others as the range names them."""
        best = self._good.get((range_.lane, range_.number))
        return sorted(range_.replicas, key=lambda ref: ref.replica != best)

    def borrow(self, range_: Range, ref: ReplicaRef) -> RangeReader:
        """A reader of one copy. DiskFailed if nobody knows where that replica's folder is."""
        member = self.members.get(ref.replica)
        if member is None:
            raise DiskFailed(f"replica {ref.replica} is not known", "start it with its folder")
        try:
            files = self._idle[self._key(range_, member)].pop()
        except (KeyError, IndexError):
            folder = range_folder(range_.lane, range_.number)
            return RangeReader(self._disk(member), folder, range_.lane, range_.number, range_.start)
        files.refresh()
        return files

    def give_back(self, range_: Range, ref: ReplicaRef, files: RangeFiles, good: bool) -> None:
        """Keep a reader that did its work; one that met trouble is opened anew next time."""
        member = self.members.get(ref.replica)
        if not isinstance(files, RangeReader):
            return
        if not good or member is None or (self._lanes is not None and range_.lane not in self._lanes):
            files.close()
            return
        self._good[range_.lane, range_.number] = ref.replica
        self._idle.setdefault(self._key(range_, member), []).append(files)
        if sum(map(len, list(self._idle.values()))) > WARM_READERS_MAX:
            self._let_go()

    @staticmethod
    def _key(range_: Range, member: ReplicaMember) -> tuple[int, int, int, str]:
        return range_.lane, range_.number, member.replica, member.disk

    def _disk(self, member: ReplicaMember) -> Disk:
        key = (member.folder, member.incarnation)
        if key not in self._open:
            self._open[key] = self._disks(member)
        return self._open[key]

    def _let_go(self) -> None:
        """Close the readers of the copy that was opened first, and forget who answered for what nobody reads.

        Another worker may be about to borrow one of them: whoever takes it out of the list has it alone.
        """
        for oldest in list(self._idle)[:1]:
            self._close_all(self._idle.pop(oldest, []))
        if len(self._good) > 16 * WARM_READERS_MAX:
            self._good.clear()

    @staticmethod
    def _close_all(idle: list[RangeReader]) -> None:
        with suppress(IndexError):
            while True:
                idle.pop().close()


@dataclass(slots=True, eq=False)
class _Span:
    """What was read ahead for one client: the next span of one lane."""

    key: tuple[object, ...]
    reserved: int
    at_us: int
    result: Found | Exception | None = None
    done: Done | None = None  # the client asked for it before it was there
    dropped: bool = False


def _what(ask: Fetch) -> tuple[object, ...]:
    """Fetches that agree in this have the same answer."""
    partitions = None if ask.partitions is None else tuple(ask.partitions)
    return ask.by, ask.start, ask.max_bytes, partitions, ask.control, ask.stop


class _Job(NamedTuple):
    job: Callable[[], Any]
    done: Done
    may_start: Callable[[], bool]


def _always() -> bool:
    """A job that does not wait for memory."""
    return True


class PlannedRead(Protocol):
    """A fetch from a file or a table. When it starts it gets room for its result, and asks for as much."""

    ask: Fetch

    def may_start(self) -> bool: ...


class FairJobs:
    """Jobs on workers for all clients of one broker: a few run at once, and clients take turns."""

    def __init__(self, workers: Workers, running_max: int) -> None:
        self._workers, self._running_max = workers, running_max
        self._queues: dict[int, deque[_Job]] = {}  # by connection; the next one's turn first
        self.running = 0
        self.jobs = 0  # all that ever were

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return sum(map(len, self._queues.values()))

    def run(
        self, connection: Connection, job: Callable[[], Any], done: Done, may_start: Callable[[], bool] = _always
    ) -> None:
        """Run a job when it is this client's turn; `done` gets its result or its error. Raises TooMany.

        `may_start` is asked before that, and again later if it says no: there is no room for the result yet.
        """
        if len(self._queues.get(connection.number, ())) >= WARM_JOBS_QUEUED_MAX:
            problem = f"{WARM_JOBS_QUEUED_MAX} reads of this connection wait for their turn"
            raise TooMany(problem, "wait for their answers")
        self._queues.setdefault(connection.number, deque()).append(_Job(job, done, may_start))
        self.start()

    def disconnected(self, connection: Connection) -> None:
        """Drop the jobs of a client that is gone; the result of one that runs is ignored."""
        self._queues.pop(connection.number, None)

    def start(self) -> None:
        """Start the jobs whose turn it is."""
        while self.running < self._running_max and (number := self._next()) is not None:
            queue = self._queues.pop(number)
            job, done, _ = queue.popleft()
            if queue:
                self._queues[number] = queue  # behind the others
            self.running += 1
            self.jobs += 1
            self._workers.run(job, lambda result, done=done: self._ended(result, done))  # type: ignore[misc]

    def _next(self) -> int | None:
        return next((number for number, queue in self._queues.items() if queue[0].may_start()), None)

    def _ended(self, result: Any, done: Done) -> None:
        self.running -= 1
        try:
            done(result)
        finally:
            self.start()


class Warm(FairJobs):
    """Jobs on segment files, for all clients of one broker."""

    def __init__(self, workers: Workers, copies: DiskCopies) -> None:
        super().__init__(workers, WARM_JOBS_MAX)
        self.copies = copies
        self._ahead: dict[tuple[int, int], _Span] = {}  # by connection and lane
        self._ahead_bytes = 0
        self.ahead_used = 0  # reads whose answer was there already, or on its way

    def fetch(self, connection: Connection, read: PlannedRead, segments: Segments, done: Done) -> None:
        """Read from segment files, unless that was done ahead."""
        ask = read.ask
        span = self._ahead.pop((connection.number, ask.lane), None)
        if span is not None and span.key == _what(ask) and not isinstance(span.result, Exception):
            self.ahead_used += 1
            self._ahead_bytes -= span.reserved
            read.may_start()  # from now on it is a read like others
            if span.result is None:
                span.done = done
            else:
                done(span.result)
            return
        if span is not None:
            self._drop(span)
        self.run(connection, lambda: segments.fetch(read.ask), done, read.may_start)

    def read_ahead(self, connection: Connection, ask: Fetch, segments: Segments, now_us: int, most: int) -> None:
        """A client is about to ask for this, it seems. The result has at most `most` bytes."""
        key = (connection.number, ask.lane)
        if key in self._ahead or self._ahead_bytes + most > WARM_AHEAD_BYTES_MAX:
            return
        if connection.number in self._queues:
            return  # it has enough under way
        span = self._ahead[key] = _Span(_what(ask), most, now_us)
        self._ahead_bytes += span.reserved
        self.run(
            connection, lambda: None if span.dropped else segments.fetch(ask), lambda result: self._came(span, result)
        )

    def poll(self, now_us: int) -> None:
        """Drop what nobody asked for in time."""
        for key, span in list(self._ahead.items()):
            if now_us - span.at_us > _AHEAD_KEPT_US:
                self._drop(self._ahead.pop(key))

    def disconnected(self, connection: Connection) -> None:
        """Drop the jobs of a client that is gone, and what was read ahead for it."""
        super().disconnected(connection)
        for key in [key for key in self._ahead if key[0] == connection.number]:
            self._drop(self._ahead.pop(key))

    def _came(self, span: _Span, result: Any) -> None:
        span.result = result
        if span.done is not None:
            span.done(result)
        elif not span.dropped:
            size = result.entries.nbytes + sum(map(len, result.payloads)) if isinstance(result, Found) else 0
            self._ahead_bytes += size - span.reserved
            span.reserved = size

    def _drop(self, span: _Span) -> None:
        span.dropped = True
        self._ahead_bytes -= span.reserved
