"""Several topics in turn: the trouble of one is reported, retried, and does not affect the others."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

from embarcadero.client.api.sync_log import Log
from embarcadero.tier.job import Cycle, TierJob, TierJobs
from embarcadero.tier.storage import TierSettings
from tests.tier.truth import await_durable


class Told:
    """A journal that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, event: str, **facts: Any) -> None:
        self.lines.append(f"{event} {facts}")

    warn = error = note


def test_trouble_of_one_topic_is_its_own(log: Log, tmp_path: Path) -> None:
    """One is held by another job, one is deleted on the way, one has no replicas; the last is tiered all the same."""
    cycles: list[tuple[str, Cycle]] = []

    class Reported(TierJobs):
        def report(self, topic: str, done: Cycle) -> None:
            cycles.append((topic, done))

    names, told = ["held", "doomed", "fine"], Told()
    settings = TierSettings.local(tmp_path, hot_retention_s=0, topics=names)
    for name in names:
        log.create_topic(name)
        with log.publisher(name, ack=2) as publisher:
            publisher.send(b"x")
        await_durable(log, name)
    tierer = Reported(log, settings, told, holder="many")
    with TierJob(log, "held", settings, holder="another"):
        tierer.look(Event())
    log.delete_topic("doomed")
    tierer.look(Event())
    tierer.look(Event())
    assert [(topic, cycle.rows) for topic, cycle in cycles if cycle.rows] == [("doomed", 1), ("fine", 1), ("held", 1)]
    assert any("another" in line and "held" in line for line in told.lines)
    assert any("can't tier" in line and "doomed" in line for line in told.lines)
    stop = Event()
    stop.set()
    tierer.follow(stop)
    with TierJob(log, "fine", settings, holder="next") as job:
        assert job.cycle().rows == 0


def test_all_topics_with_replicas(log: Log, tmp_path: Path) -> None:
    """Without a list: only topics in memory are skipped."""
    log.create_topic("in-memory", replicas=0)
    log.create_topic("on-disk")
    wanted = TierJobs(log, TierSettings.local(tmp_path), Told(), holder="all")._wanted()
    assert "on-disk" in wanted
    assert "in-memory" not in wanted
