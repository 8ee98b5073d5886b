"""Reading a topic of orders 0 and 1, sans I/O: one reader per lane, and an eye on lanes that come.

Each broker incarnation writes a lane of its own, so such a topic is a list of lanes that grows when brokers are started
anew. Batches of one lane come in its order; batches of different lanes take turns. A lane whose broker is gone ends
with a typed END_OF_LANE gap. New lanes are asked for by a long poll and read from their beginning, or from
the time that the reader starts at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from embarcadero.client.arguments import EARLIEST, Lookup
from embarcadero.client.link import FetchCore, Link, SoleRequest
from embarcadero.client.results import Batch
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore, TableAsk
from embarcadero.errors import BadValue, EmbarcaderoError, OutcomeUnknown, Retriable, TooMany, from_wire
from embarcadero.types import TopicLane
from embarcadero.wire.codec import FetchedReceived, control_frame
from embarcadero.wire.messages import AnyMessage, Failed, GetLanes, LanesAre

_BACKOFF_US = 50_000
_LANES_SHARING = 4
"""Lanes fetch in parallel: each fetches this many times less at once than the one lane of another topic would."""


class LanesCore(FetchCore):
    """One reader of all lanes of a topic. It is used like a SubscriberCore."""

    def __init__(
        self,
        settings: ReaderSettings,
        topic: int,
        lanes: Iterable[TopicLane],
        start: Lookup = EARLIEST,
    ) -> None:
        super().__init__()
        self.topic = topic
        self._settings = replace(settings, max_bytes=max(1, settings.max_bytes // _LANES_SHARING))
        self._request = SoleRequest(settings.turn, settings.silent_after_us)  # the GetLanes under way
        self._start_of_new = start if start.by == "time" else EARLIEST  # lanes to come are read from a time, too
        self.paused = False
        self._error: EmbarcaderoError | None = None
        self.lanes: dict[int, TopicLane] = {}
        self._cores: dict[int, SubscriberCore] = {}
        self._first = 0  # whose turn it is to hand on batches
        for lane in lanes:
            self._begin(lane, start, 0)

    # --- what the driver asks for ---
    @property
    def failed(self) -> EmbarcaderoError | None:
        """What ended the reading."""
        return self._error or next((core.failed for core in self._cores.values() if core.failed is not None), None)

    @property
    def position(self) -> int | None:
        """There is no one position: see `positions`."""
        raise BadValue("a topic of order 0 or 1 has a position in each lane", "use positions()")

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None while the cluster has not said where that is."""
        return {lane: core.position for lane, core in list(self._cores.items())}  # the event loop may add one meanwhile

    @property
    def ready(self) -> int:
        """How many batches (and gaps) can be taken now."""
        return sum(core.ready for core in self._cores.values())

    def take_batches(self, most: int, now_us: int) -> list[Batch]:
        """Up to `most` batches (and gaps); lanes take turns."""
        taken: list[Batch] = []
        cores = [core for core in self._cores.values() if core.ready]
        self._first += 1
        for number in range(len(cores)):
            core = cores[(self._first + number) % len(cores)]
            share = -(-(most - len(taken)) // (len(cores) - number))
            taken += core.take_batches(share, now_us)
        return taken

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Go on elsewhere: in all lanes, or by index or seq in one."""
        if lane is None and by in ("index", "seq"):
            raise BadValue(f"an {by} names a place in one lane", "say which: seek(..., lane=...) or seek(position)")
        if lane is not None and lane not in self._cores:
            raise BadValue(f"lane {lane} is not a lane of this topic", f"its lanes are {sorted(self._cores)}")
        if lane is None:
            self._start_of_new = Lookup(by, value) if by == "time" else EARLIEST
        for core in self._cores.values() if lane is None else [self._cores[lane]]:
            core.seek(by, value, now_us)

    def pause(self) -> None:
        """Ask for no more batches, in any lane; lanes that come are noted."""
        self.paused = True
        for core in self._cores.values():
            core.pause()

    def resume(self, now_us: int) -> None:
        """Go on where we paused."""
        self.paused = False
        for core in self._cores.values():
            core.resume(now_us)

    @property
    def trouble(self) -> EmbarcaderoError | None:
        """Why the topic's table could not be read when it was last asked, in any lane."""
        return next((core.trouble for core in self._cores.values() if core.trouble is not None), None)

    def retry(self, now_us: int) -> None:
        """Go on at the same positions after a store could not be reached."""
        for core in self._cores.values():
            core.retry(now_us)

    def take_output(self) -> list[tuple[int, list[Any]]]:
        """Frames to write, by connection."""
        output, self._output = self._output, {}
        for core in self._cores.values():
            for conn, buffers in core.take_output():
                output.setdefault(conn, []).extend(buffers)
        return list(output.items())

    def take_table_asks(self) -> list[TableAsk]:
        """What is to be asked of the topic's table."""
        return [ask for core in self._cores.values() for ask in core.take_table_asks()]

    def take_abandoned(self) -> list[int]:
        """Connections given up: the driver drops them and connects again, under new numbers."""
        abandoned, self._abandoned = dict.fromkeys(self._abandoned), []
        for core in self._cores.values():
            abandoned |= dict.fromkeys(core.take_abandoned())
        return list(abandoned)

    # --- what the connections tell ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        self._request.connected(link)
        for core in self._cores.values():
            core.on_connected(link, now_us)
        self._pump(now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone."""
        self._output.pop(conn, None)
        self._request.disconnected(conn)
        for core in self._cores.values():
            core.on_disconnected(conn, now_us)
        self._pump(now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """Lanes, a Failed, or a Pong."""
        self._request.heard(conn, now_us)
        if not self._request.answered_by(conn, request):
            for core in self._cores.values():
                core.on_control(conn, request, message, now_us)
            return
        self._request.end()
        if isinstance(message, LanesAre):
            for lane in message.lanes:
                if lane.lane not in self.lanes:
                    self._begin(lane, self._start_of_new, now_us)
        elif isinstance(message, Failed):
            error = from_wire(message.code, message.message, message.hint)
            if not isinstance(error, Retriable | OutcomeUnknown | TooMany):
                self._error = error
            self._request.back_off(now_us + _BACKOFF_US)
        self._pump(now_us)

    def on_fetched(self, conn: int, event: FetchedReceived, now_us: int) -> None:
        """The answer to some lane's Fetch."""
        for core in list(self._cores.values()):
            core.on_fetched(conn, event, now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""
        if (overdue := self._request.overdue(now_us)) is not None:
            self._judge(*overdue, self, now_us)
        self._request.on_timer(now_us)
        for core in self._cores.values():
            core.on_timer(now_us)
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        times = [due for core in self._cores.values() if (due := core.next_timer_us()) is not None]
        times += [due for due in (self._request.silence_us, self._request.back_off_us) if due is not None]
        return min(times, default=None)

    # --- lanes ---
    def _begin(self, lane: TopicLane, start: Lookup, now_us: int) -> None:
        """Read one more lane."""
        self.lanes[lane.lane] = lane
        if lane.removed and lane.lane not in self._settings.in_table:
            return  # nothing of it is left
        settings = replace(self._settings, turn=self._request.turn + len(self._cores))
        core = self._cores[lane.lane] = SubscriberCore(settings, lane.lane, start, owner=self)
        if self.paused:
            core.pause()
        for link in self._request.links():
            core.on_connected(link, now_us)

    def _pump(self, now_us: int) -> None:
        """Ask for lanes that we do not know yet, unless that is under way."""
        if self._error is not None or not self._request.may_begin(now_us):
            return
        link = self._request.next_link()
        ask = GetLanes(lane=self.topic, above=max(self.lanes, default=0), wait_ms=self._settings.wait_ms)
        self._write(link.number, control_frame(ask, self._request.begin(link, self, now_us)))
