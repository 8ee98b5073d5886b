"""Ctrl-C between any two steps of a sync call: the interrupt is raised, and the client stays usable.

Python runs a signal handler when a call returns or a function begins. A profiler is called at the same moments, so a
profiler that raises at the n-th of them simulates a Ctrl-C at each possible point in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client.results import Waitable
from tests.client.fake_server import FakeServer

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
"""An interrupt inside a destructor is lost, in this test as in any program; a coroutine may not get to its loop."""

PLACES_MAX = 5_000


class CtrlC:
    """Raises KeyboardInterrupt at the n-th moment of this thread, inside the package or below it."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "return", "c_return"):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


def at_every_moment(action: Callable[[], object]) -> Iterator[int]:
    """Interrupt an action at its first moment, its second, ... until it ends before that. Yields after each."""
    for moment in range(2, PLACES_MAX):
        bomb = CtrlC(moment)
        try:
            sys.setprofile(bomb)
            action()
        except KeyboardInterrupt:
            yield moment
            continue
        finally:
            sys.setprofile(None)
        if bomb.left > 0:
            return
    pytest.fail("the action has more moments than expected")


@pytest.fixture
def log() -> Iterator[Any]:
    with FakeServer(order=5) as server, emb.connect(server.addresses) as log:
        yield log


@pytest.mark.parametrize("batch_bytes", [1, 1_000_000])
def test_send_can_be_interrupted_anywhere(log: Any, batch_bytes: int) -> None:
    """Each record is stored once or not at all, and later records are stored in order."""
    with log.publisher("t", batch_bytes=batch_bytes, linger_ms=0) as publisher:
        names, sent = count(), 0
        for moment in at_every_moment(lambda: publisher.send(b"i%d" % next(names))):
            publisher.send(b"s%d" % moment)
            publisher.flush(20)
            sent += 1
        publisher.send(b"end").result(20)
    values = log.read("t").column("value").to_pylist()
    sure = [value for value in values if value.startswith(b"s")]
    assert sure == [b"s%d" % moment for moment in range(2, sent + 2)]
    assert len(set(values)) == len(values)
    assert sent > 5


def test_a_table_can_be_interrupted_anywhere(log: Any) -> None:
    """Likewise for publish."""
    table = pa.table({"value": [b"x"]})
    with log.publisher("t", linger_ms=0) as publisher:
        moments = 0
        for _ in at_every_moment(lambda: publisher.publish(table)):
            moments += 1
            publisher.publish(pa.table({"value": [b"s"]})).result(20)
    assert log.read("t").column("value").to_pylist().count(b"s") == moments


def test_waiting_for_an_outcome_can_be_interrupted_anywhere(log: Any) -> None:
    """result(), flush() and poll(): the next call of each works normally."""
    with log.publisher("t", linger_ms=0) as publisher, log.subscribe("t") as subscriber:
        for _ in at_every_moment(lambda: publisher.send(b"a").result(20)):
            publisher.send(b"b").result(20)
        for _ in at_every_moment(lambda: (publisher.send(b"a"), publisher.flush(20))):
            publisher.flush(20)
        for _ in at_every_moment(lambda: subscriber.poll(20)):
            publisher.send(b"b").result(20)
            subscriber.seek("earliest")
            assert subscriber.poll(20) is not None


@pytest.mark.parametrize("what", ["topics", "tail", "read", "publisher", "subscribe"])
def test_requests_can_be_interrupted_anywhere(log: Any, what: str) -> None:
    """The client sends the next request normally."""
    questions: dict[str, Callable[[], Any]] = {
        "topics": log.topics,
        "tail": lambda: log.tail("t"),
        "read": lambda: log.read("t"),
        "publisher": lambda: log.publisher("t"),
        "subscribe": lambda: log.subscribe("t"),
    }
    for _ in at_every_moment(questions[what]):
        assert [topic.name for topic in log.topics(timeout=20)] == ["t"]


def test_closing_can_be_interrupted_anywhere() -> None:
    """However far it got, closing again ends, and the thread is gone."""
    with FakeServer(order=5) as server:
        logs: list[Any] = []

        def use_and_close() -> None:
            logs[-1].close(5)

        logs.append(emb.connect(server.addresses))
        for _ in at_every_moment(use_and_close):
            logs[-1].close(5)
            assert not logs[-1].thread.alive
            logs.append(emb.connect(server.addresses))
            logs[-1].publisher("t").send(b"x")
        assert len(logs) > 5


def test_an_interrupted_wait_releases_its_lock() -> None:
    """Prevents a bug in which a lock stays taken without an owner, and every other thread waits for it."""
    lock = Waitable()

    for _ in at_every_moment(lambda: lock.wait_for(lambda: False, 0.001)):
        assert not lock.lock.locked()
