"""A simulated reader of whole topics: it asks for both ends of a lane, then reads the span between.

`read()` and `scan()` of the client, the "earliest" of a Spark query and the plan of a tiering job all begin with such
an answer, and take its start for the first existing batch. So an answer with a start above readable batches hides them
without an error. This reader asks again soon after a refusal, so it asks often while a lane is recovered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from embarcadero.client.arguments import Lookup
from embarcadero.client.link import Link
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore
from embarcadero.wire import messages as m
from embarcadero.wire.codec import FetchedReceived
from embarcadero_proof.sim.clients import ClientProcess, ProbeCore, start_read
from embarcadero_proof.sim.history import Died, Moved, Passed, RoleFailed
from embarcadero_proof.sim.tables import no_table
from embarcadero_proof.sim.workload import note_batch

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

SPANS_FROM_SEED: Final = 80_000
"""From this seed on runs with replicas have such a reader."""

_PATIENCE_US: Final = 5_000_000
_SOON_US: Final = (1_000, 30_000)
_LATER_US: Final = (20_000, 1_500_000)
_READS_SHARE: Final = 0.2


class SpanCore(ProbeCore):
    """Asks for both ends of a lane; then a subscriber of the client library reads the span."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: SubscriberCore | None = None

    def begin(self, reader: SubscriberCore, now_us: int) -> None:
        """Read with this subscriber, over all connections."""
        self.reader = reader
        for link in self.links.values():
            reader.on_connected(link, now_us)

    def on_connected(self, link: Link, now_us: int) -> None:
        super().on_connected(link, now_us)
        if self.reader is not None:
            self.reader.on_connected(link, now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        super().on_disconnected(conn, now_us)
        if self.reader is not None:
            self.reader.on_disconnected(conn, now_us)

    def on_control(self, conn: int, request: int, message: m.AnyMessage, now_us: int) -> None:
        super().on_control(conn, request, message, now_us)
        if self.reader is not None:
            self.reader.on_control(conn, request, message, now_us)

    def take_output(self) -> list[tuple[int, list[Any]]]:
        return super().take_output() + ([] if self.reader is None else self.reader.take_output())

    def take_abandoned(self) -> list[int]:
        return super().take_abandoned() + ([] if self.reader is None else self.reader.take_abandoned())

    def on_timer(self, now_us: int) -> None:
        if self.reader is not None:
            self.reader.on_timer(now_us)

    def next_timer_us(self) -> int | None:
        return None if self.reader is None else self.reader.next_timer_us()


class SpanProcess(ClientProcess):
    """Reads lanes of topics with replicas from start to end, again and again."""

    role = "span"

    def __init__(self, world: World, name: str) -> None:
        self._spans = SpanCore()
        super().__init__(world, name, self._spans)
        self._began_us = self._number = 0
        self._lane: int | None = None
        self._stop = 0

    def start(self) -> None:
        super().start()
        self._plan(_LATER_US)

    def _plan(self, span_us: tuple[int, int]) -> None:
        self.world.queue.after(self.rng.randrange(*span_us), lambda: self.submit(self._ask))

    def _ask(self) -> None:
        late = self.world.queue.now_us > self._began_us + _PATIENCE_US
        if self._lane is not None and self._spans.reader is None and late:
            self._spans.give_up()
        topics = [topic for topic in self.world.plan.topics if topic.replicas]
        lanes = self.world.lanes_of(self.rng.choice(topics))
        if self._lane is None and self._spans.links and lanes:
            self._lane, self._began_us = self.rng.choice(lanes), self.world.queue.now_us
            self._spans.ask(self.rng.choice(list(self._spans.links)), self._lane)
        else:
            self._plan(_LATER_US)

    def on_event(self, number: int, event: Any, now_us: int) -> None:
        if self._spans.reader is not None and isinstance(event, FetchedReceived):
            self._spans.reader.on_fetched(number, event, now_us)

    def harvest(self) -> None:
        if self._spans.reader is not None:
            self._take(self._spans.reader)
        elif self._lane is not None and self._spans.failed:
            self._end(_SOON_US)
        elif self._lane is not None and (tail := self._spans.answer) is not None:
            self.world.seen(start_read(self.world, self.name, self._began_us, tail))
            if tail.start_index < tail.durable_index and self.rng.random() < _READS_SHARE:
                self._begin(tail)
            else:
                self._end(_LATER_US)

    def _begin(self, tail: m.TailIs) -> None:
        """Read from the reported start: by index as `scan` does, or by seq as `read` does.

        A lost seq names no record: a reader begins after the lost records, and no gap reports that.
        """
        self._number += 1
        self._stop, by_seq = tail.durable_index, self.rng.random() < 0.5 and not self.world.tiering.on
        by_seq = by_seq and all(first != tail.start_seq for first, _ in tail.holes)
        by, start = ("seq", tail.start_seq) if by_seq else ("index", tail.start_index)
        now_us = self.world.queue.now_us
        self.world.seen(Moved(at=now_us, reader=self._reader_name, lane=tail.lane, index=tail.start_index))
        settings = ReaderSettings(
            stop=self._stop, silent_after_us=self.world.plan.resend_after_us, wait_ms=2_000, max_bytes=1 << 18,
            **self.world.tiering.settings,
        )  # fmt: skip
        reader = SubscriberCore(settings, tail.lane, Lookup(by, start), owner=self._spans)
        self._spans.begin(reader, self.clock.now_us())

    @property
    def reads(self) -> bool:
        """Whether it is reading a lane."""
        return self._spans.reader is not None

    @property
    def _reader_name(self) -> str:
        return f"{self.name}-{self._number}"

    def _take(self, reader: SubscriberCore) -> None:
        batches = reader.take_batches(1_000, self.clock.now_us())
        if batches:
            self.world.see_frontier(reader.lane)
        for batch in batches:
            note_batch(self.world, self._reader_name, batch, durable=True)
        no_table(reader, self.clock.now_us())
        now_us, position = self.world.queue.now_us, reader.position
        if reader.failed is not None:
            what = f"a read of a span failed: {type(reader.failed).__name__}: {reader.failed}"
            self.world.seen(RoleFailed(at=now_us, process=self.name, error=what))
        elif not reader.ended and (position is None or position < self._stop):
            return
        elif position is not None:
            self.world.seen(Passed(at=now_us, reader=self._reader_name, lane=reader.lane, index=position))
        self.world.seen(Died(at=now_us, process=self._reader_name))  # it reads only up to the end that it learned
        self._end(_LATER_US)

    def _end(self, next_us: tuple[int, int]) -> None:
        self._lane = self._spans.asked = self._spans.answer = self._spans.reader = None
        self._spans.failed = ""
        self._plan(next_us)
