"""What gives a reader's core time, connections and tables, and hands on what it has ready. One event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from embarcadero.client.net.brokers import BrokerPool, CoreDriver
from embarcadero.client.net.connection import now_us
from embarcadero.client.read.cold import ColdReads
from embarcadero.client.read.lanes import LanesCore
from embarcadero.client.read.subscriber import SubscriberCore
from embarcadero.client.results import Batch
from embarcadero.errors import EmbarcaderoError, Forked

_LOG: Final = logging.getLogger("embarcadero.client")

ReaderCore = SubscriberCore | LanesCore


def forked_reader(topic: str) -> Forked:
    """Why a reader of the parent process does not read in a forked child."""
    return Forked(f"this reader of {topic!r} was opened before the process was forked", "subscribe in the child")


class SubscriberDriver(CoreDriver):
    """Hands on what a subscriber's core has ready. `on_ready` is called when there may be something new.

    `until` is an index that somebody waits for: reaching it is news, too.
    """

    core: ReaderCore

    def __init__(
        self,
        brokers: BrokerPool,
        core: ReaderCore,
        on_ready: Callable[[], None],
        until: int | None = None,
        topic: str = "",
    ) -> None:
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
