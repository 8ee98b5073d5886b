"""Topics that come and go under one name, while requests for their predecessors still arrive.

One process creates a topic, another writes into it, the first deletes it and creates the next one of that name. It also
repeats requests for topics that are deleted, as a client does whose first request was delayed: none of these may change
the topic that has the name now (P5). When the last one is deleted, nothing of any of them may stay (P9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.errors import UnknownTopic
from embarcadero.sim.clients import ClientProcess, Outbox
from embarcadero.sim.history import DeleteAsked, PassingGone, PassingMade
from embarcadero.types import Order
from embarcadero.wire import messages as m
from embarcadero.wire.receiver import AcksReceived, CreditReceived, FullReceived

if TYPE_CHECKING:
    from embarcadero.sim.world import World

PASSING_FROM_SEED: Final = 150_000
"""From then on runs have such topics."""

NAME: Final = "passing"
_PATIENCE_US: Final = 1_000_000
_LIVES_US: Final = (20_000, 2_500_000)
_STEP_US: Final = (10_000, 400_000)
_BATCHES_MAX: Final = 12
_LATE_SHARE: Final = 0.4
_ORDERS: Final = (Order.NONE, Order.BROKER, Order.TOTAL, Order.STRONG)


class PassingCore(Outbox):
    """Sends requests to brokers; remembers the answer to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[int, Link] = {}
        self._asked: tuple[int, int] | None = None
        self.answered = False

    def ask(self, number: int, message: m.AnyMessage) -> None:
        """Put a request to one broker, and wait for its answer."""
        self.answered, self._asked = False, self.send(self.links[number], message)

    def give_up(self) -> None:
        """No answer came in time: hang up. The broker may still carry out the request."""
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
    """Writes a few batches into one of these topics. Only what they leave behind is looked at."""

    role = "publisher"

    def __init__(self, world: World, name: str, topic_id: int, order: Order, replicated: bool) -> None:
        self._publisher = PublisherCore(
            topic=NAME, topic_id=topic_id, order=order, window_bytes=1 << 16, replicated=replicated,
            resend_after_us=world.plan.resend_after_us, delivery_timeout_us=world.plan.delivery_timeout_us,
        )  # fmt: skip
        super().__init__(world, name, self._publisher)

    def start(self) -> None:
        super().start()
        self.tell(self._write)

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
    """Creates and deletes topics of one name until the run is healed; the last one is deleted."""

    role = "passing"

    def __init__(self, world: World, name: str) -> None:
        self._requests = PassingCore()
        super().__init__(world, name, self._requests)
        self._topic = 0  # the id of the topic that is there, as far as is known
        self._deleted: list[int] = []
        self._asked_us = -_PATIENCE_US
        self._made = 0
        self._lives_until_us = 0

    @property
    def done(self) -> bool:
        """Whether all of these topics are deleted. A late request may still create one, which is deleted, too."""
        return self.world.healed and not self._topic

    def start(self) -> None:
        super().start()
        self._plan()

    def _plan(self) -> None:
        self.world.queue.after(self.rng.randrange(*_STEP_US), lambda: self.tell(self._step))

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
        """See which topic has the name, as one who sees the store: an answer may be lost, a request may be late."""
        try:
            topic = self.world.directory.topic(NAME).id
        except UnknownTopic:
            topic = 0
        if topic == self._topic:
            return
        now_us = self.world.queue.now_us
        if self._topic:
            self.world.seen(PassingGone(at=now_us, topic=self._topic))
            self._deleted.append(self._topic)
        if topic:
            self.world.seen(PassingMade(at=now_us, topic=topic))
            self._made += 1
            self._lives_until_us = now_us + self.rng.randrange(*_LIVES_US)
            made = self.world.directory.topic(NAME)
            name = f"{self.name}-{self._made}"
            PassingWriter(self.world, name, topic, Order(made.order), made.replicas > 0).start()
        self._topic = topic

    def _ask(self, now_us: int) -> None:
        number = self.rng.choice(list(self._requests.links))
        if self._deleted and self.rng.random() < _LATE_SHARE:
            self._requests.ask(number, m.DeleteTopic(name=NAME, topic_id=self.rng.choice(self._deleted)))
        elif not self._topic:
            replicas = self.rng.randint(0, min(2, len(self.world.replicas)))
            order = int(self.rng.choice(_ORDERS))
            self._requests.ask(number, m.CreateTopic(name=NAME, order=order, replicas=replicas))
        elif now_us > self._lives_until_us or self.world.healed:
            self.world.seen(DeleteAsked(at=now_us, topic=self._topic))
            self._requests.ask(number, m.DeleteTopic(name=NAME, topic_id=self._topic))
        self._asked_us = now_us
