"""Tiering several topics in turn, on and on: what `up --tier` runs, one process for all of them.

A topic's trouble is its own: it is told, and tried again after a while; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic
from typing import Final

from embarcadero.client.sync import Log
from embarcadero.env import Journal
from embarcadero.errors import EmbarcaderoError, UnknownTopic
from embarcadero.tier.engines import Engine, ProcessEngine
from embarcadero.tier.job import Cycle, TierJob
from embarcadero.tier.settings import TierSettings

_REST_S_MIN: Final = 0.1


class Tierer:
    """The jobs of one holder. Without a list of topics: all that have replicas, new ones as they come."""

    def __init__(
        self,
        log: Log,
        settings: TierSettings,
        journal: Journal,
        *,
        holder: str,
        topics: Sequence[str] = (),
        engine: Engine | None = None,
        told: Callable[[str, Cycle], None] = lambda _topic, _cycle: None,
    ) -> None:
        self._log, self._settings, self._journal, self._holder = log, settings, journal, holder
        self._topics, self._told = list(topics), told
        self._engine = engine or ProcessEngine(log)
        self._jobs: dict[str, TierJob] = {}

    def follow(self, stop: Event) -> None:
        """Cycle after cycle until told to stop; then leave, so that another holder may begin."""
        try:
            while not stop.is_set():
                if not self.look(stop):
                    self._rest(stop)
        finally:
            for topic in list(self._jobs):
                self._leave(topic)
            self._engine.close()

    def _rest(self, stop: Event) -> None:
        """Wait until the next look is due; meanwhile the engine may give up what it does not need."""
        until = monotonic() + self._settings.interval_s
        while not stop.is_set() and (left_s := until - monotonic()) > 0:
            due_s = self._engine.release_idle()
            stop.wait(left_s if due_s is None else min(left_s, max(due_s, _REST_S_MIN)))

    def look(self, stop: Event) -> bool:
        """One cycle of each topic. True if there is more to do at once."""
        try:
            wanted = self._wanted()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't list topics", reason=str(error))
            return False
        for topic in self._jobs.keys() - set(wanted):
            self._leave(topic)
        more = [self._cycle(topic) for topic in wanted if not stop.is_set()]
        return any(more)

    def _wanted(self) -> list[str]:
        return self._topics or [topic.name for topic in self._log.topics() if topic.replicas]

    def _cycle(self, topic: str) -> bool:
        try:
            if topic not in self._jobs:
                job = TierJob(self._log, topic, self._settings, self._engine, holder=self._holder)
                tier = job.open()
                self._jobs[topic] = job
                self._journal.note(
                    "tiers", topic=topic, table=tier.table, epoch=tier.epoch, engine=self._engine.name
                )
            done = self._jobs[topic].cycle()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't tier", topic=topic, reason=str(error))
            if not isinstance(error, UnknownTopic):
                self._leave(topic)
            self._jobs.pop(topic, None)
            return False
        if done.files:
            self._journal.note(
                "tiered", topic=topic, files=done.files, rows=done.rows, bytes=done.bytes, engine=self._engine.name
            )
        self._told(topic, done)
        return done.more

    def _leave(self, topic: str) -> None:
        job = self._jobs.pop(topic, None)
        if job is None:
            return
        try:
            job.close()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't leave", topic=topic, reason=str(error))  # the lease ends by itself
