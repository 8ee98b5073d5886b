"""A copy to damage, and a peer's to repair it from."""

from __future__ import annotations

from embarcadero.env import Clock
from embarcadero.errors import EmbarcaderoError
from embarcadero.storage.layout import (
    segment_name,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.repair import Scrub, copy_span, heal_tails, mend
from embarcadero.storage.segment import DamageKind
from tests.storage.crash_disk import Node, World
from tests.storage.records import (
    FOLDER,
    START,
    Source,
    fill,
    matches,
    open_log,
    open_reader,
)

COUNT = 200


class Copies:
    """A copy to damage, and a peer's."""

    def __init__(self) -> None:
        self.source = Source()
        self.world, peers = World(1), World(2)
        log, peer = open_log(self.world.disk()), open_log(peers.disk())
        fill(log, self.source, COUNT)
        fill(peer, self.source, COUNT)
        self.end = log.end
        self.infos = log.segments
        self.peer = open_reader(peers.disk())
        log.close()

    def node(self, number: int, suffix: str = ".log") -> Node:
        return self.world.names[self.path(number, suffix)]

    def path(self, number: int, suffix: str = ".log") -> str:
        return f"{FOLDER}/{segment_name(self.infos[number].base_seq, suffix)}"

    def flip(self, path: str, place: int) -> None:
        node = self.world.names[path]
        node.data[place] ^= 4
        node.safe = bytearray(node.data)

    def open(self) -> RangeLog:
        return open_log(self.world.disk())

    def served_right(self) -> None:
        """Every record that is served is correct."""
        reader = open_reader(self.world.disk())
        for index in range(START, self.end):
            try:
                entries, payloads = reader.read(index, index + 1, 10)
            except EmbarcaderoError:
                continue
            if len(entries):
                expected, bodies = self.source.span(index, index + 1)
                assert (entries.tobytes(), [bytes(one) for one in payloads]) == (expected.tobytes(), bodies)

    def repair(self, log: RangeLog) -> None:
        """Repair as a replica does, until the copy is complete."""
        for damage in list(log.damage):
            if damage.kind is not DamageKind.TAIL:
                assert mend(log, self.peer, damage)
        copy_span(self.peer, log, self.end)
        log.sync_job()()
        heal_tails(log, self.end)
        self.whole(log)
        log.close()
        self.whole(self.open())

    def whole(self, log: RangeLog) -> None:
        assert not log.damage
        assert (log.first, log.end) == (START, self.end)
        assert matches(open_reader(self.world.disk()), self.source, START, self.end)


class ManualClock(Clock):
    """A clock that a test advances."""

    us = 0

    def now_us(self) -> int:
        return self.us

    def wall_us(self) -> int:
        return self.us


def scrub_all(log: RangeLog) -> Scrub:
    """A whole round over a log's finished segments; damage that it finds is quarantined."""
    clock = ManualClock()
    scrub = Scrub(clock)
    while scrub.rounds < 1:
        assert scrub.due
        scrub.note([log], scrub.job([log])())
        clock.us = scrub.due_us
    return scrub
