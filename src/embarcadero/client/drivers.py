"""What gives the cores time and connections: frames are written, timers kept, results passed on. One event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from embarcadero.client.batch import Batch
from embarcadero.client.cold import ColdReads
from embarcadero.client.connection import now_us
from embarcadero.client.core import ClientCore
from embarcadero.client.lanes import LanesCore
from embarcadero.client.subscriber import SubscriberCore
from embarcadero.errors import EmbarcaderoError, Forked

if TYPE_CHECKING:
    from embarcadero.client.brokers import Brokers
    from embarcadero.client.publisher import PublisherCore
    from embarcadero.client.publisher_driver import PublisherDriver

    Core = PublisherCore | SubscriberCore | LanesCore
else:
    Core = ClientCore  # clients that only read do not load a publisher's core

_LOG: Final = logging.getLogger("embarcadero.client")

ReaderCore = SubscriberCore | LanesCore


def forked_reader(topic: str) -> Forked:
    """Why a reader of the parent process does not read in a forked child."""
    return Forked(f"this reader of {topic!r} was opened before the process was forked", "subscribe in the child")


class CoreDriver:
    """Runs one core on the connections of `brokers`. After anything was told to the core, `run` must be called."""

    core: Core

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self.stopped = False

    def run(self) -> None:
        """Write what the core wants written, drop what it gave up, and see to its next timer."""
        for number, buffers in self.core.take_output():
            self._brokers.write(number, buffers)
        for number in self.core.take_abandoned():
            self._brokers.abandon(number)
        self._plan()

    def _plan(self) -> None:
        due = self.core.next_timer_us()
        if due is None or self.stopped or (self._timer is not None and self._timer_us <= due):
            return  # a timer that rings early is harmless, and cheaper than moving it each time
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = due
        self._timer = self._loop.call_later(max(0, due - now_us()) / 1e6, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.core.on_timer(now_us())
        self.run()

    def publishing(self) -> PublisherDriver | None:
        """Itself, if it is a publisher's."""
        return None

    def stop(self) -> None:
        """Let go of connections and timers."""
        if not self.stopped:
            self.stopped = True
            self._brokers.detach(self)
            if self._timer is not None:
                self._timer.cancel()


class SubscriberDriver(CoreDriver):
    """Hands on what a subscriber's core has ready. `on_ready` is called when there may be something new.

    `until` is an index that somebody waits for: reaching it is news, too.
    """

    core: ReaderCore

    def __init__(
        self, brokers: Brokers, core: ReaderCore, on_ready: Callable[[], None], until: int | None = None,
        topic: str = "",
    ) -> None:  # fmt: skip
        super().__init__(brokers)
        self.core, self._on_ready, self._until = core, on_ready, until
        self._cold = ColdReads(brokers, topic, self.run)
        self._topic = topic
        self._logged: EmbarcaderoError | None = None  # the last trouble with the table
        brokers.attach(self)

    def run(self) -> None:
        """Move whatever can move."""
        super().run()
        self._cold.begin(self.core.take_cold())
        self._log_trouble()
        if self.core.ready or self.core.failed is not None or self.arrived:
            self._on_ready()

    @property
    def arrived(self) -> bool:
        """Whether everything before the index that is waited for was taken."""
        place = None if self._until is None else self.core.position
        return place is not None and self._until is not None and place >= self._until

    def _log_trouble(self) -> None:
        """Log why the topic's table can't be read, once for each reason, and that it can be read again."""
        trouble, before = self.core.trouble, self._logged
        if trouble is not None and (before is None or trouble.message != before.message):
            _LOG.warning("topic %r: %s; trying again", self._topic, trouble.message)
        elif trouble is None and before is not None:
            _LOG.info("topic %r: its table can be read again", self._topic)
        self._logged = trouble

    def retry(self) -> None:
        """Go on after a store could not be reached."""
        self.core.retry(now_us())
        self.run()

    def take(self, most: int) -> list[Batch]:
        """Batches in order; the core goes on fetching."""
        taken = self.core.take_batches(most, now_us())
        super().run()
        self._cold.begin(self.core.take_cold())
        self._cold.moved.set()
        return taken

    def stop(self) -> None:
        """Let go of connections, timers and tables."""
        super().stop()
        self._cold.stop()

    def pause(self) -> None:
        """Stop fetching; the position stays."""
        self.core.pause()

    def resume(self) -> None:
        """Fetch again."""
        self.core.resume(now_us())
        self.run()

    def seek(self, by: str, value: int, lane: int | None = None) -> None:
        """Go on elsewhere."""
        self.core.seek(by, value, now_us(), lane)
        self.run()
