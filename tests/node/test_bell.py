"""Doorbells: they shorten a sleep, and nothing depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.node.env import PipeBell


@pytest.fixture
def bells(tmp_path: Path) -> Iterator[tuple[PipeBell, PipeBell]]:
    """A sequencer's and a broker's, in a folder whose name is too long for a socket's path."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    pair = PipeBell(folder, "sequencer"), PipeBell(folder, "broker-0.1")
    yield pair
    for bell in pair:
        bell.close()


def test_a_ring_ends_a_long_sleep(bells: tuple[PipeBell, PipeBell]) -> None:
    """The sleeper wakes long before its time is over."""
    sequencer, broker = bells

    async def sleep() -> bool:
        asyncio.get_running_loop().call_soon(broker.ring, "sequencer")
        await asyncio.wait_for(sequencer.wait(3600), 60)
        return True

    assert asyncio.run(sleep())


def test_a_ring_before_the_sleep_is_not_lost(bells: tuple[PipeBell, PipeBell]) -> None:
    """A ring while no process slept ends the next sleep immediately."""
    sequencer, broker = bells

    async def sleep() -> bool:
        broker.ring("sequencer")
        await asyncio.wait_for(sequencer.wait(3600), 60)
        return True

    assert asyncio.run(sleep())


def test_ringing_without_a_listener_is_harmless(bells: tuple[PipeBell, PipeBell]) -> None:
    """No process of that name listens; a sleep without a ring ends by itself."""
    sequencer, _ = bells
    sequencer.ring("broker-9.9")

    asyncio.run(sequencer.wait(0.01))

    assert not sequencer.rung


def test_a_flood_of_rings_does_not_block(bells: tuple[PipeBell, PipeBell]) -> None:
    """Beyond the capacity of the queue, rings are lost; the ringer continues."""
    sequencer, broker = bells
    for _ in range(10_000):
        broker.ring("sequencer")

    asyncio.run(sequencer.wait(3600))

    assert not sequencer.rung


def test_a_successor_of_the_same_name_gets_rings_of_earlier_ringers(tmp_path: Path) -> None:
    """The listener is gone, and rings meanwhile are lost; the next listener of that name gets the next ring."""
    broker, first = PipeBell(tmp_path, "broker-0.1"), PipeBell(tmp_path, "sequencer")
    broker.ring("sequencer")
    first.close()
    broker.ring("sequencer")
    broker.ring("sequencer")
    second = PipeBell(tmp_path, "sequencer")
    try:
        asyncio.run(second.wait(0.01))
        broker.ring("sequencer")
        asyncio.run(_heard(second))
    finally:
        second.close()
        broker.close()


async def _heard(bell: PipeBell) -> None:
    bell._loop = None  # a new loop in this test
    await asyncio.wait_for(bell.wait(3600), 60)


def test_a_ring_during_a_sleep_is_handled_there(bells: tuple[PipeBell, PipeBell]) -> None:
    """The sleep continues as long as the handler returns that there is no more work."""
    sequencer, broker = bells
    answers: list[int] = []

    def rung() -> bool:
        answers.append(len(answers))
        if len(answers) < 3:
            broker.ring("sequencer")
        return len(answers) == 3

    async def sleep() -> None:
        asyncio.get_running_loop().call_soon(broker.ring, "sequencer")
        await asyncio.wait_for(sequencer.wait(3600, rung), 60)

    asyncio.run(sleep())

    assert answers == [0, 1, 2]
    assert not sequencer.rung


def test_an_error_in_the_handler_ends_the_sleep(bells: tuple[PipeBell, PipeBell]) -> None:
    """The waiting caller gets the error, as if it had done the work itself."""
    sequencer, broker = bells

    def rung() -> bool:
        raise ValueError("broken")

    async def sleep() -> None:
        asyncio.get_running_loop().call_soon(broker.ring, "sequencer")
        await asyncio.wait_for(sequencer.wait(3600, rung), 60)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(sleep())
