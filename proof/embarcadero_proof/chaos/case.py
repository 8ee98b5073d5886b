"""One case: a cluster, load, faults for a while, healing, new clients, a full read, and all checks."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import embarcadero as emb
from embarcadero.config import load
from embarcadero.limits import MIB
from embarcadero.types import Ack, Order
from embarcadero_proof.chaos.cases import Case
from embarcadero_proof.chaos.cluster import FaultyCluster
from embarcadero_proof.chaos.disks import books, disk_events, lost_spans, stored, with_losses
from embarcadero_proof.chaos.load import SETTLE_S, Asker, Reader, StreamPlan, TopicPlan, Writer, ends, make_topic
from embarcadero_proof.chaos.proxy import Proxy
from embarcadero_proof.chaos.troubles import Stage
from embarcadero_proof.chaos.verdict import Judgement, judge
from embarcadero_proof.chaos.watch import Observer
from embarcadero_proof.sim.history import Ended, Healed, History, LaneMade, RoleFailed

BROKERS: Final = 3
REPLICAS: Final = 3
TOPICS: Final = {"strong": Order.STRONG, "total": Order.TOTAL, "pinned": Order.BROKER}
NEWCOMERS_BATCHES: Final = 20
CALM_S: Final = 1.5
"""Load before the first fault, and after healing: the plot then shows normal behaviour, too."""


_WELL_S: Final = 60.0
_END_S: Final = 20.0
_IMPATIENT: Final = load(None, {"client.fetch_wait_ms": 300})
"""A reader at the end of a topic gets entries without records only when its long poll ends."""


@dataclass(slots=True)
class Outcome:
    """The result of a case."""

    case: str
    words: str
    seconds: float = 0.0
    kills: int = 0
    judgement: Judgement = field(default_factory=Judgement)
    history: History = field(default_factory=History)


class Performance:
    """One case on one cluster in its own folder."""

    def __init__(
        self, case: Case, folder: Path, seconds: float, seed: int = 0, calm_s: float = CALM_S, brokers: int = BROKERS,
        replicas: int = REPLICAS,
    ) -> None:  # fmt: skip
        self.case, self.seconds, self.calm_s = case, max(seconds, case.least_s), calm_s
        self.rng = random.Random(f"{case.name}:{seed}")
        self.observer = Observer()
        self.cluster = FaultyCluster(
            folder, brokers, replicas, by_proxy=case.by_proxy, fabric__log_bytes=64 * MIB,
            replica__segment_bytes=MIB,
        )  # fmt: skip
        ours = self.cluster
        self.proxy = Proxy(ours.told_port, ours.port, brokers) if case.by_proxy else None
        self.stage = Stage(ours, self.proxy, self.observer, self.rng)
        self.topics: list[TopicPlan] = []
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        self.asker: Asker | None = None
        self.threads: list[threading.Thread] = []

    def run(self) -> Outcome:
        """Run the whole case; it leaves nothing behind when it returns or raises."""
        began = time.monotonic()
        try:
            self._begin()
            self._get_into_trouble()
            self._heal()
            self._read_back()
        finally:
            self._clean_up()
        history = self._history()
        found = judge(history)
        found.problems += self.stage.problems
        return Outcome(
            self.case.name, self.case.words, round(time.monotonic() - began, 1), self.stage.kills, found, history
        )

    # --- acts ---------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self.proxy is not None:
            self.proxy.start()
        self.cluster.start()
        copies = self.cluster.replicas
        with emb.connect(self.cluster.addresses) as log:
            self.topics = [
                make_topic(log, self.observer, name, order, copies, copies // 2 + 1) for name, order in TOPICS.items()
            ]
        self._wrong()  # in one thread first: msgspec crashes if several threads are the first to decode a type
        books(self.cluster.folder.store_path)
        self.asker = Asker(self.topics, self.observer, self.cluster.addresses)
        self.readers = [self._reader(topic, "durable") for topic in self.topics]
        self.readers.append(self._reader(self.topics[0], "ordered"))
        self._publish(self.topics, "")
        for actor in (*self.readers, self.asker):
            actor.start()
        time.sleep(self.calm_s)

    def _reader(self, topic: TopicPlan, read: str, suffix: str = "") -> Reader:
        name = f"{topic.name}-{suffix or read}"
        return Reader(name, topic, read, self.observer, self.cluster.addresses, _IMPATIENT)

    def _publish(self, topics: list[TopicPlan], prefix: str, most: int | None = None) -> None:
        for topic in topics:
            for ack in (Ack.ORDERED, Ack.DURABLE):
                plan = StreamPlan(f"{prefix}{topic.name}-ack{ack:d}", topic, int(ack))
                writer = Writer(plan, self.observer, self.cluster.addresses, most=most)
                writer.start()
                self.writers.append(writer)

    def _get_into_trouble(self) -> None:
        until_s = time.monotonic() + self.seconds
        self.threads = [
            threading.Thread(target=self.stage.keep_striking, args=(trouble, until_s), daemon=True)
            for trouble in self.case.troubles
        ]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _heal(self) -> None:
        """Wait until the cluster is well without faults, let old publishers finish, and start new ones."""
        self.observer.saw(Healed)
        self._await_well()
        time.sleep(self.calm_s)
        self._publish(self.topics, "new-", NEWCOMERS_BATCHES)
        for writer in self.writers:
            if writer.plan.topic in self.topics and not writer.name.startswith("new-"):
                writer.finish()
        self._join(self.writers)

    def _await_well(self) -> None:
        give_up = time.monotonic() + _WELL_S
        while wrong := self._wrong():
            if time.monotonic() > give_up:
                self.observer.saw(RoleFailed, process="cluster", error=f"not healthy after {_WELL_S:.0f} s: {wrong[0]}")
                return
            time.sleep(0.1)

    def _wrong(self) -> list[str]:
        with_pids = self.cluster.folder.require_running()
        down = [f"{node.roles} is down" for node in with_pids.nodes if not node.pid]
        return down or self.cluster.report().degraded

    def _read_back(self) -> None:
        """Let all readers reach the end: those that were connected all the time, and new ones from the beginning."""
        if self.asker is None:
            return
        self.asker.finish()
        self.asker.join(SETTLE_S)
        again = [self._reader(topic, "durable", "again") for topic in self.topics]
        for reader in again:
            reader.start()
        self.readers += again
        with emb.connect(self.cluster.addresses) as log:
            for topic in self.topics:
                if (tail := self.asker.ask(log, topic)) is None:
                    error = f"the cluster is healthy, but no broker reports the end of {topic.name}"
                    self.observer.saw(RoleFailed, process="cluster", error=error)
                for reader in self.readers:
                    if reader.topic is topic and tail is not None:
                        reader.come_to(ends(tail))
        self._join(self.readers)

    def _join(self, actors: list[Writer] | list[Reader]) -> None:
        give_up = time.monotonic() + SETTLE_S
        for actor in actors:
            actor.join(max(0.0, give_up - time.monotonic()))
            actor.finish()
        for actor in actors:
            actor.join(5.0)

    def _clean_up(self) -> None:
        """End all threads before the cluster and the program, also after Ctrl-C."""
        self.stage.over.set()
        actors = [actor for actor in (*self.writers, *self.readers, self.asker) if actor is not None and actor.ident]
        for actor in actors:
            actor.abandon()
        for thread in (*self.threads, *actors):
            if thread.ident:
                thread.join(_END_S)
        self.observer.saw(Ended)
        self.cluster.end()
        if self.proxy is not None:
            self.proxy.stop()

    # --- after --------------------------------------------------------------------------------------------------------
    def _history(self) -> History:
        """Return all events, and the final contents of disks and store."""
        seen, folder = self.observer.history(), self.cluster.folder
        known = books(folder.store_path)
        starts = {topic.lane: topic.start for topic in self.topics} | {made.lane: 0 for made in seen.of(LaneMade)}
        unended = [event for event in seen if not isinstance(event, Ended)]
        events = with_losses(unended, lost_spans(known, self.stage.cut_short))
        on_disk = stored(folder.path, known.ranges, starts)
        now_us = self.observer.now_us()
        return History([*events, *disk_events(seen, on_disk, known.ranges, now_us), Ended(at=now_us)])
