"""Doorbells: they shorten a sleep, and nothing depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.node.bell import SocketBell


@pytest.fixture
def bells(tmp_path: Path) -> Iterator[tuple[SocketBell, SocketBell]]:
    """A sequencer's and a broker's, in a folder whose name is too long for a socket's path."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    pair = SocketBell(folder, "sequencer"), SocketBell(folder, "broker-0.1")
    yield pair
    for bell in pair:
        bell.close()


def test_a_ring_ends_a_long_sleep(bells: tuple[SocketBell, SocketBell]) -> None:
    """The sleeper wakes long before its time is over."""
    sequencer, broker = bells

    async def sleep() -> bool:
        asyncio.get_running_loop().call_soon(broker.ring, "sequencer")
        await asyncio.wait_for(sequencer.wait(3600), 60)
        return True

    assert asyncio.run(sleep())


def test_a_ring_before_the_sleep_is_heard(bells: tuple[SocketBell, SocketBell]) -> None:
    """What rang while nobody slept ends the next sleep at once."""
    sequencer, broker = bells

    async def sleep() -> bool:
        broker.ring("sequencer")
        await asyncio.wait_for(sequencer.wait(3600), 60)
        return True

    assert asyncio.run(sleep())


def test_ringing_at_an_empty_house_is_harmless(bells: tuple[SocketBell, SocketBell]) -> None:
    """Nobody of that name listens; a sleep without a ring ends by itself."""
    sequencer, _ = bells
    sequencer.ring("broker-9.9")

    asyncio.run(sequencer.wait(0.01))

    assert not sequencer.rung


def test_a_flood_of_rings_does_not_block(bells: tuple[SocketBell, SocketBell]) -> None:
    """Beyond what the queue takes, rings are lost; the ringer goes on."""
    sequencer, broker = bells
    for _ in range(10_000):
        broker.ring("sequencer")

    asyncio.run(sequencer.wait(3600))

    assert not sequencer.rung
