"""Between a publisher's intake (any thread) and its driver (the event loop): seals what lingered, submits, closes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from embarcadero.client.brokers import Brokers
from embarcadero.client.drivers import PublisherDriver
from embarcadero.client.futures import RecordFuture
from embarcadero.client.intake import Intake, Sealed
from embarcadero.client.options import PublisherOptions, checked_ack
from embarcadero.client.publisher import PublisherCore
from embarcadero.errors import Closed, TimedOut
from embarcadero.limits import RESEND_AFTER_S
from embarcadero.types import Ack, Topic

_POLL_S = 0.001  # how often a congested publisher is looked at, at most


class Pump:
    """The event loop's half of a publisher. `moved` is set whenever room may have come free or the end has come."""

    def __init__(
        self, brokers: Brokers, topic: Topic, options: PublisherOptions, future: type[RecordFuture] = RecordFuture
    ) -> None:
        self.intake = Intake(
            partitions=topic.partitions,
            batch_bytes=options.batch_bytes,
            frame_bytes_max=brokers.frame_bytes_max,
            window_bytes=options.window_bytes,
            future=future,
        )
        core = PublisherCore(
            topic=topic.name,
            session_name=options.session or "",
            window_bytes=options.window_bytes,
            resend_after_us=int(RESEND_AFTER_S * 1e6),
            delivery_timeout_us=int(options.delivery_timeout * 1e6),
            order=topic.order,
            acks=options.ack != Ack.NONE,
        )
        self._loop = asyncio.get_running_loop()
        self._linger_s = options.linger_ms / 1000
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False
        self.moved = asyncio.Event()
        self.driver = PublisherDriver(brokers, core, checked_ack(options.ack), self._settled)
        self.driver.ended.add_done_callback(self._ended)

    # --- any thread, with the intake's condition held ---
    def needs_poke(self) -> bool:
        """Whether `poke` must be called soon; says so once."""
        self.intake.news = False
        if self._poked or not (self.intake.has_sealed or (self._timer is None and self.intake.gathering)):
            return False
        self._poked = True
        return True

    # --- event loop ---
    def poke(self) -> None:
        """Take what is sealed, and see that what is not will be."""
        intake = self.intake
        with intake.condition:
            self._poked = False
            self._seal_lingered()
            sealed = intake.take_sealed()
            oldest_s = intake.oldest_s()
            if oldest_s is not None and self._timer is None:
                wait_s = max(oldest_s + self._linger_s - time.monotonic(), 0.0)
                self._timer = self._loop.call_later(wait_s or max(self._linger_s, _POLL_S), self._ring)
        if sealed:
            self.driver.submit(sealed)

    def _seal_lingered(self) -> None:
        """Batches that could not be sent anyway go on growing instead."""
        if not self.driver.congested:
            self.intake.seal(time.monotonic() - self._linger_s)

    def _ring(self) -> None:
        self._timer = None
        self.poke()

    def _settled(self, sealed: Sealed) -> None:
        with self.intake.condition:
            self.intake.settled(sealed)
        self.moved.set()

    def _ended(self, _: Any) -> None:
        """The publisher failed or was closed: whatever still gathers ends as well."""
        with self.intake.condition:
            closed = Closed("the publisher is closed", "open another one")
            self.intake.refusal = self.intake.refusal or self.driver.core.failed or closed
            self.intake.seal()
            self.intake.condition.notify_all()
        self.poke()
        self.moved.set()

    async def close(self, timeout: float) -> None:  # noqa: ASYNC109 - what is left at its end gets its own end
        """Settle everything and close the session. After `timeout` whatever is left ends with an unknown outcome."""
        with self.intake.condition:
            if self.intake.refusal is None:
                self.intake.refusal = Closed("the publisher is closed", "open another one")
            self.intake.seal()
        self.poke()
        self.driver.close()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.driver.ended), timeout)
        finally:
            if not self.driver.ended.done():  # the time is over, or we were cancelled
                self.driver.fail(TimedOut("not settled when the publisher was closed", "read the log to find out"))
            if self._timer is not None:
                self._timer.cancel()
            self.driver.stop()
