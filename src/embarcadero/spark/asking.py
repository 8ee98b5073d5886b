"""Questions of a planner, in as few round trips as there can be: a stream asks them for every micro-batch."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from embarcadero.client.brokers import Brokers
from embarcadero.client.reading import lanes_of, tail_of
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadFrame, Refused, UnknownTopic
from embarcadero.invariants import invariant
from embarcadero.limits import PIECES_MAX
from embarcadero.types import Cut, Tail
from embarcadero.wire import messages as m

Answer = TypeVar("Answer", bound=m.Message)
_AT_ONCE: Final = 32
"""So many topics are asked for at once."""


async def surveys(
    brokers: Brokers, topics: Mapping[str, Collection[int]]
) -> dict[str, tuple[TopicInfo, list[Tail]]]:
    """Several topics and the tails of their lanes, by name; each with the lanes that are expected.

    Topics that do not exist are left out.
    """
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(topic: str, expected: Collection[int]) -> tuple[TopicInfo, list[Tail]] | None:
        async with turns:
            try:
                return await survey(brokers, topic, expected)
            except UnknownTopic:
                return None

    found = await asyncio.gather(*(one(topic, expected) for topic, expected in topics.items()))
    return {topic: each for topic, each in zip(topics, found, strict=True) if each is not None}


async def survey(brokers: Brokers, topic: str, expected: Collection[int]) -> tuple[TopicInfo, list[Tail]]:
    """A topic and the tails of its lanes. If its lanes are those that are expected, in one round trip.

    Raises UnknownTopic.
    """
    asked = asyncio.gather(*(_tail(brokers, lane) for lane in expected))
    try:
        about = TopicInfo.told(await _ask(brokers, m.DescribeTopic(name=topic), m.TopicIs))
        known = {tail.lane: tail for tail in await asked if tail is not None}
    finally:
        asked.cancel()
    missing = [lane for lane in lanes_of(about, None) if lane not in known]
    more = await asyncio.gather(*(_ask(brokers, m.GetTail(lane=lane), m.TailIs) for lane in missing))
    known |= {tail.lane: tail for tail in more}
    return about, [tail_of(about, known[lane]) for lane in lanes_of(about, None)]


async def _tail(brokers: Brokers, lane: int) -> m.TailIs | None:
    """The tail of a lane that may be gone."""
    try:
        return await _ask(brokers, m.GetTail(lane=lane), m.TailIs)
    except Refused:
        return None


async def measure(
    brokers: Brokers, lane: int, start: int, stop: int, piece_bytes: int, most: int | None
) -> list[Cut]:
    """Pieces of batches [start, stop) of a lane, at most so many of them. Raises Trimmed, FuturePosition."""
    cuts: list[Cut] = []
    at = start
    while at < stop and (most is None or len(cuts) < most):
        ask = m.Measure(lane=lane, start=at, stop=stop, piece_bytes=piece_bytes, pieces_max=most or PIECES_MAX)
        cuts += (await _ask(brokers, ask, m.PiecesAre)).cuts
        invariant(bool(cuts) and cuts[-1].index > at, "a measured span goes on")
        at = cuts[-1].index
    return cuts


async def _ask(brokers: Brokers, message: m.Message, kind: type[Answer]) -> Answer:
    answer = await brokers.ask(message, brokers.settings.request_timeout_s)
    if not isinstance(answer, kind):
        raise BadFrame(f"{type(message).__name__} was answered with {type(answer).__name__}", "report it: a bug")
    return answer
