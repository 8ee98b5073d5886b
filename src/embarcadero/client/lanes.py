"""Reading a topic of order 0 or 1, sans I/O: one reader per lane, and a watch for new lanes.

Each broker incarnation writes its own lane, so the topic is a list of lanes that grows when brokers restart. Batches of
one lane keep its order; batches of different lanes alternate. When the broker of a lane is gone, the lane ends with an
END_OF_LANE gap. A long poll finds new lanes. They are read from their start, or from the start time of the reader.
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
"""Lanes fetch in parallel: each Fetch asks for this fraction of the bytes of a topic with one lane."""


class LanesCore(FetchCore):
    """A reader of all lanes of a topic, with the interface of a SubscriberCore."""

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
        self._request = SoleRequest(settings.turn, settings.silent_after_us)  # the open GetLanes
        self._start_of_new = start if start.by == "time" else EARLIEST  # a start time applies to new lanes as well
        self.paused = False
        self._error: EmbarcaderoError | None = None
        self.lanes: dict[int, TopicLane] = {}
        self._cores: dict[int, SubscriberCore] = {}
        self._first = 0  # the lane whose batches are delivered next
        for lane in lanes:
            self._begin(lane, start, 0)

    # --- for the driver ---
    @property
    def failed(self) -> EmbarcaderoError | None:
        """The error that ended the reading."""
        return self._error or next((core.failed for core in self._cores.values() if core.failed is not None), None)

    @property
    def position(self) -> int | None:
        """Raise BadValue: each lane has its own position, see `positions`."""
        raise BadValue("a topic of order 0 or 1 has a position in each lane", "use positions()")

    def positions(self) -> dict[int, int | None]:
        """Return, by lane, the index of the next batch; None while it is not known."""
        return {lane: core.position for lane, core in list(self._cores.items())}  # the event loop may add a lane

    @property
    def ready(self) -> int:
        """Number of batches (and gaps) that can be taken now."""
        return sum(core.ready for core in self._cores.values())

    def take_batches(self, most: int, now_us: int) -> list[Batch]:
        """Take up to `most` batches (and gaps), from the lanes in rotation."""
        taken: list[Batch] = []
        cores = [core for core in self._cores.values() if core.ready]
        self._first += 1
        for number in range(len(cores)):
            core = cores[(self._first + number) % len(cores)]
            share = -(-(most - len(taken)) // (len(cores) - number))
            taken += core.take_batches(share, now_us)
        return taken

    def seek(self, by: str, value: int, now_us: int, lane: int | None = None) -> None:
        """Continue at another position: in all lanes, or by index or seq in one lane."""
        if lane is None and by in ("index", "seq"):
            problem = f"seek needs a lane: in a topic of order 0 or 1, each lane has its own {by}"
            raise BadValue(problem, "use seek(..., lane=...) or seek(position)")
        if lane is not None and lane not in self._cores:
            raise BadValue(f"lane {lane} is not a lane of this topic", f"use one of {sorted(self._cores)}")
        if lane is None:
            self._start_of_new = Lookup(by, value) if by == "time" else EARLIEST
        for core in self._cores.values() if lane is None else [self._cores[lane]]:
            core.seek(by, value, now_us)

    def pause(self) -> None:
        """Stop fetching in all lanes. New lanes are still found."""
        self.paused = True
        for core in self._cores.values():
            core.pause()

    def resume(self, now_us: int) -> None:
        """Continue after `pause`, at the same positions."""
        self.paused = False
        for core in self._cores.values():
            core.resume(now_us)

    @property
    def trouble(self) -> EmbarcaderoError | None:
        """The last error of the topic's table in a lane, until the table can be read again."""
        return next((core.trouble for core in self._cores.values() if core.trouble is not None), None)

    def retry(self, now_us: int) -> None:
        """Continue at the same positions after a store did not answer."""
        for core in self._cores.values():
            core.retry(now_us)

    def take_output(self) -> list[tuple[int, list[Any]]]:
        """Take the frames to write, by connection."""
        output, self._output = self._output, {}
        for core in self._cores.values():
            for conn, buffers in core.take_output():
                output.setdefault(conn, []).extend(buffers)
        return list(output.items())

    def take_table_asks(self) -> list[TableAsk]:
        """Take the reads of the topic's table that the driver must do."""
        return [ask for core in self._cores.values() for ask in core.take_table_asks()]

    def take_abandoned(self) -> list[int]:
        """Take the abandoned connections: the driver drops them and connects again, with new numbers."""
        abandoned, self._abandoned = dict.fromkeys(self._abandoned), []
        for core in self._cores.values():
            abandoned |= dict.fromkeys(core.take_abandoned())
        return list(abandoned)

    # --- events of connections ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        self._request.connected(link)
        for core in self._cores.values():
            core.on_connected(link, now_us)
        self._pump(now_us)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection was lost."""
        self._output.pop(conn, None)
        self._request.disconnected(conn)
        for core in self._cores.values():
            core.on_disconnected(conn, now_us)
        self._pump(now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """Handle LanesAre, Failed or Pong."""
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
        """Pass the answer to a Fetch to the lanes."""
        for core in list(self._cores.values()):
            core.on_fetched(conn, event, now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do everything that is due. An early call does nothing."""
        if (overdue := self._request.overdue(now_us)) is not None:
            self._judge(*overdue, self, now_us)
        self._request.on_timer(now_us)
        for core in self._cores.values():
            core.on_timer(now_us)
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """Return when `on_timer` must run, if no other event comes first."""
        times = [due for core in self._cores.values() if (due := core.next_timer_us()) is not None]
        times += [due for due in (self._request.silence_us, self._request.back_off_us) if due is not None]
        return min(times, default=None)

    # --- lanes ---
    def _begin(self, lane: TopicLane, start: Lookup, now_us: int) -> None:
        """Start to read a lane."""
        self.lanes[lane.lane] = lane
        if lane.removed and lane.lane not in self._settings.in_table:
            return  # all its records were removed
        settings = replace(self._settings, turn=self._request.turn + len(self._cores))
        core = self._cores[lane.lane] = SubscriberCore(settings, lane.lane, start, owner=self)
        if self.paused:
            core.pause()
        for link in self._request.links():
            core.on_connected(link, now_us)

    def _pump(self, now_us: int) -> None:
        """Ask for new lanes, unless a request is open."""
        if self._error is not None or not self._request.may_begin(now_us):
            return
        link = self._request.next_link()
        ask = GetLanes(lane=self.topic, above=max(self.lanes, default=0), wait_ms=self._settings.wait_ms)
        self._write(link.number, control_frame(ask, self._request.begin(link, self, now_us)))
