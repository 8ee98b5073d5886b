"""Short-lived topics of one name, while requests for their predecessors still arrive.

One process creates a topic, another writes into it, and the first deletes it and creates the next one of that name. In
later runs it also alters and trims topics. It repeats requests for deleted topics, like a client whose first request
was delayed: none of these may change the topic that has the name now (P5). After the last topic is deleted, nothing of
any of them may remain (P9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.session import PublisherSettings
from embarcadero.errors import UnknownTopic
from embarcadero.types import Order, Topic
from embarcadero.wire import messages as m
from embarcadero.wire.codec import AcksReceived, CreditReceived, FullReceived
from embarcadero_proof.sim.clients import ClientProcess, Outbox
from embarcadero_proof.sim.history import (
    Change,
    ChangeAsked,
    DeleteAsked,
    PassingChanged,
    PassingGone,
    PassingMade,
    TrimAsked,
)

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

PASSING_FROM_SEED: Final = 150_000
"""From this seed on runs have such topics."""

CHANGES_FROM_SEED: Final = 160_000
"""From this seed on they are also altered and trimmed."""

NAME: Final = "passing"
_PATIENCE_US: Final = 1_000_000
_LIVES_US: Final = (20_000, 2_500_000)
_STEP_US: Final = (10_000, 400_000)
_BATCHES_MAX: Final = 12
_LATE_SHARE: Final = 0.4
_CHANGES_SHARE: Final = 0.6
_ALTERED_TTL_S: Final = 3_600
"""The value after an alteration; topics are created with another one."""
_ORDERS: Final = (Order.NONE, Order.BROKER, Order.TOTAL, Order.STRONG)


class PassingCore(Outbox):
    """Sends requests to brokers, and remembers the answer to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[int, Link] = {}
        self._asked: tuple[int, int] | None = None
        self.answered = False

    def ask(self, number: int, message: m.AnyMessage) -> None:
        """Send a request to one broker, and wait for its answer."""
        self.answered, self._asked = False, self.send(self.links[number], message)

    def give_up(self) -> None:
        """Give up a request without an answer and hang up. The broker may still carry it out."""
        if self._asked is not None and not self.answered:
            self._abandoned.append(self._asked[0])
            self._asked = None

    def on_connected(self, link: Link, now_us: int) -> None:  # noqa: ARG002 - the cores' signature
        self.links[link.number] = link

    def on_disconnected(self, conn: int, now_us: int) -> None:  # noqa: ARG002
        self.links.pop(conn, None)

    def on_control(self, conn: int, request: int, message: m.AnyMessage, now_us: int) -> None:  # noqa: ARG002
        self.answered = self.answered or self._asked == (conn, request)


class PassingWriter(ClientProcess):
    """Writes a few batches into one of these topics. Checkers look only at the leftovers of the topic."""

    role = "publisher"

    def __init__(self, world: World, name: str, topic_id: int, order: Order, replicated: bool) -> None:
        self._publisher = PublisherCore(PublisherSettings(
            topic=NAME, topic_id=topic_id, order=order, window_bytes=1 << 16, replicated=replicated,
            resend_after_us=world.plan.resend_after_us, delivery_timeout_us=world.plan.delivery_timeout_us,
        ))  # fmt: skip
        super().__init__(world, name, self._publisher)

    def start(self) -> None:
        super().start()
        self.submit(self._write)

    def _write(self) -> None:
        for number in range(self.rng.randrange(_BATCHES_MAX)):
            self._publisher.add(b"%05d" % number * 20, 1, 0, 0, self.clock.now_us())
        self._publisher.close(self.clock.now_us())

    def on_event(self, number: int, event: Any, now_us: int) -> None:
        if isinstance(event, AcksReceived):
            self._publisher.on_acks(number, event.acks, now_us)
        elif isinstance(event, CreditReceived):
            self._publisher.on_credit(number, event.total, now_us)
        elif isinstance(event, FullReceived):
            self._publisher.on_full(number, now_us, event)

    def harvest(self) -> None:
        self._publisher.take_losses()
        self._publisher.take_settled()
        if self._publisher.closed and not self.finished:
            self.disconnect()


class PassingProcess(ClientProcess):
    """Creates and deletes topics of one name until the run has healed; the last one is deleted."""

    role = "passing"

    def __init__(self, world: World, name: str) -> None:
        self._requests = PassingCore()
        super().__init__(world, name, self._requests)
        self._topic = 0  # id of the current topic, as far as known
        self._deleted: list[int] = []
        self._changes: set[Change] = set()  # changes of the current topic
        self._asked_us = -_PATIENCE_US
        self._made = 0
        self._lives_until_us = 0

    @property
    def done(self) -> bool:
        """Whether all of these topics are deleted. A late request may still create one, which is then deleted, too."""
        return self.world.healed and not self._topic

    def start(self) -> None:
        super().start()
        self._plan()

    def _plan(self) -> None:
        self.world.queue.after(self.rng.randrange(*_STEP_US), lambda: self.submit(self._step))

    def _step(self) -> None:
        self._look()
        now_us = self.world.queue.now_us
        waits = not self._requests.answered and now_us < self._asked_us + _PATIENCE_US
        if not waits:
            self._requests.give_up()
            if not self.done and self._requests.links:
                self._ask(now_us)
        self._plan()

    def _look(self) -> None:
        """Check the store for the topic that has the name: an answer may be lost, a request may be late."""
        try:
            found: Topic | None = self.world.directory.topics.get(NAME)
        except UnknownTopic:
            found = None
        topic, now_us = found.id if found is not None else 0, self.world.queue.now_us
        if topic == self._topic:
            self._look_at_changes(found, now_us)
            return
        if self._topic:
            self.world.seen(PassingGone(at=now_us, topic=self._topic))
            self._deleted.append(self._topic)
        if found is not None:
            self.world.seen(PassingMade(at=now_us, topic=topic))
            self._made += 1
            self._lives_until_us = now_us + self.rng.randrange(*_LIVES_US)
            name = f"{self.name}-{self._made}"
            PassingWriter(self.world, name, topic, Order(found.order), found.replicas > 0).start()
        self._topic, self._changes = topic, set()
        self._look_at_changes(found, now_us)

    def _look_at_changes(self, topic: Topic | None, now_us: int) -> None:
        if topic is None or self.world.seed < CHANGES_FROM_SEED:
            return
        trims = self.world.directory.topics.trims()
        found = {Change.ALTERED} if topic.session_ttl_s == _ALTERED_TTL_S else set()
        if any(trims.get(lane, 0) for lane in self._lanes(topic)):
            found.add(Change.TRIMMED)
        for change in sorted(found - self._changes):
            self.world.seen(PassingChanged(at=now_us, topic=topic.id, change=change))
        self._changes |= found

    def _lanes(self, topic: Topic) -> list[int]:
        if topic.order > Order.BROKER:
            return [topic.lane]
        return [lane.lane for lane in self.world.directory.lanes.all(topic.lane)]

    def _ask(self, now_us: int) -> None:
        number = self.rng.choice(list(self._requests.links))
        changes = self.world.seed >= CHANGES_FROM_SEED and self.rng.random() < _CHANGES_SHARE
        if self._deleted and self.rng.random() < _LATE_SHARE:
            late = self.rng.choice(self._deleted)
            self._requests.ask(number, self._change(late) if changes else m.DeleteTopic(name=NAME, topic_id=late))
        elif not self._topic:
            replicas = self.rng.randint(0, min(2, len(self.world.replicas)))
            order = int(self.rng.choice(_ORDERS))
            self._requests.ask(number, m.CreateTopic(name=NAME, order=order, replicas=replicas))
        elif now_us > self._lives_until_us or self.world.healed:
            self.world.seen(DeleteAsked(at=now_us, topic=self._topic))
            self._requests.ask(number, m.DeleteTopic(name=NAME, topic_id=self._topic))
        elif changes:
            request = self._change(self._topic)
            if isinstance(request, m.Trim):
                self.world.seen(TrimAsked(at=now_us, lane=request.lane, index=request.before))
            change = Change.TRIMMED if isinstance(request, m.Trim) else Change.ALTERED
            self.world.seen(ChangeAsked(at=now_us, topic=self._topic, change=change))
            self._requests.ask(number, request)
        self._asked_us = now_us

    def _change(self, topic: int) -> m.AlterTopic | m.Trim:
        """Return a request that changes a topic. A late trim names a lane of the current topic: lane numbers recur."""
        lanes = self._lanes(self.world.directory.topics.get(NAME)) if self._topic else []
        if lanes and self.rng.random() < 0.5:
            return m.Trim(lane=self.rng.choice(lanes), by="index", before=1, topic_id=topic)
        return m.AlterTopic(name=NAME, session_ttl_s=_ALTERED_TTL_S, topic_id=topic)
