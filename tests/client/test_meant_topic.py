"""Which topic a call means, by the topic's age: requests and answers take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from embarcadero.client.api import aio_log
from embarcadero.errors import TopicReplaced
from embarcadero.types import Topic
from embarcadero.wire import messages as m

CREATED = 100.0


def answered(monkeypatch: pytest.MonkeyPatch, began: float, trips: Sequence[tuple[float, float]]) -> Callable[[], Any]:
    """Ask for a topic that was created at CREATED; each request and each answer takes this long."""
    now, left = [began], list(trips)

    async def ask(*_: object) -> m.TopicIs:
        there, back = left.pop(0)
        now[0] += there
        told = m.TopicIs(topic=Topic(name="t", id=7, lane=0), age_us=int((now[0] - CREATED) * 1e6))
        now[0] += back
        return told

    log = aio_log.Log.__new__(aio_log.Log)
    monkeypatch.setattr(aio_log, "monotonic", lambda: now[0])
    monkeypatch.setattr(log, "_ask", ask)
    return lambda: asyncio.run(log._meant("t", None))


@pytest.mark.parametrize("trips", [[(0.0, 0.001)], [(0.0, 1.0), (0.0, 0.001)], [(2.0, 0.0)]])
def test_a_topic_that_is_older_than_the_call_is_meant(
    monkeypatch: pytest.MonkeyPatch, trips: list[tuple[float, float]]
) -> None:
    """Also if it is hardly older, and its first answer took long."""
    assert answered(monkeypatch, CREATED + 0.005, trips)().id == 7


@pytest.mark.parametrize("trips", [[(4.0, 0.0), (0.001, 0.001)], [(4.0, 3.0), (0.0, 0.5)]])
def test_a_topic_that_is_younger_than_the_call_is_not_meant(
    monkeypatch: pytest.MonkeyPatch, trips: list[tuple[float, float]]
) -> None:
    """A paused broker answers seconds later, when another topic has the name."""
    with pytest.raises(TopicReplaced, match="was created while this call waited"):
        answered(monkeypatch, CREATED - 3.0, trips)()


def test_a_topic_that_may_be_younger_is_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is fast enough to decide it: the call changes nothing."""
    with pytest.raises(TopicReplaced):
        answered(monkeypatch, CREATED + 0.005, [(0.0, 1.0)] * aio_log._LOOKS_MAX)()
