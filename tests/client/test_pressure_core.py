"""Back-pressure: a full cluster reports it with the cause, nothing is lost, and the publisher lives and continues."""

from __future__ import annotations

from typing import Any

import pytest

from embarcadero.errors import Backpressure, Retriable, TimedOut
from embarcadero.types import Trouble
from embarcadero.wire.codec import FullReceived, full_frame, parse_full
from tests.client.fake_cluster import LANE, World
from tests.client.test_durable_core import DELIVERY_US, add, publishing

FULL_DISK = (LANE, 1, int(Trouble.DISK_FULL))


def say_full(world: World, *why: int) -> None:
    for wire in world.wires.values():
        wire.far._say(full_frame(*why))
    world.settle()


def waiting(**changes: Any) -> tuple[World, Any]:
    """A publisher whose batch is stored and does not become durable."""
    world = publishing(durable=True, wires=1, **changes)
    batch = add(world, b"x")
    world.settle()
    return world, batch


def test_a_full_disk_is_named_and_ends_with_the_next_ack() -> None:
    """The message names the replica and the remedy; once there is space, publishing continues."""
    world, batch = waiting()
    assert world.core.pressure() is None
    say_full(world, *FULL_DISK)
    pressure = world.core.pressure()
    assert isinstance(pressure, Backpressure)
    assert isinstance(pressure, Retriable)
    assert "replica 1: disk full" in str(pressure)
    assert "free some space" in str(pressure)
    world.cluster.make_durable()
    world.settle()
    assert batch.position is not None
    assert world.core.pressure() is None


def test_a_publisher_lives_as_long_as_the_cluster_reports_that_it_is_full() -> None:
    """The delivery timeout counts time without an answer; it used to run out after 120 s and end the publisher."""
    world, batch = waiting()
    for _ in range(10):
        world.now += DELIVERY_US // 2
        say_full(world, *FULL_DISK)
        world.core.on_timer(world.now)
    assert world.core.failed is None
    assert not batch.done
    world.cluster.make_durable()
    world.settle()
    assert batch.position is not None
    again = add(world, b"y")
    world.settle()
    world.cluster.make_durable()
    world.settle()
    assert again.position is not None


def test_a_cluster_that_stops_reporting_still_fails_delivery() -> None:
    """FULL moves the deadline, it does not remove it."""
    world, batch = waiting()
    say_full(world, *FULL_DISK)
    world.run(lambda: batch.done)
    assert isinstance(batch.error, TimedOut)


def test_the_trouble_of_another_topic_on_the_connection_does_not_count() -> None:
    """Connections are shared by publishers."""
    world, _ = waiting()
    say_full(world, LANE + 1, 1, int(Trouble.DISK_FULL))
    assert world.core.pressure() is None


def test_a_broker_without_memory_is_pressure_only_while_no_broker_takes_the_batch() -> None:
    """Credit of any broker ends it."""
    world = publishing(wires=0)
    world.connect(credit=10)
    world.settle()
    add(world, b"x" * 100)
    say_full(world)
    pressure = world.core.pressure()
    assert pressure is not None
    assert "memory" in str(pressure)
    world.wires[1].far.grant(1000)
    world.settle()
    assert world.core.unsettled == 0
    assert world.core.pressure() is None


def test_a_full_memory_does_not_hide_which_disk_is_full() -> None:
    """A stalled lane fills the memory, so the broker reports both; the message used to name the memory."""
    world, _ = waiting()
    say_full(world, *FULL_DISK)
    say_full(world)
    assert "replica 1: disk full" in str(world.core.pressure())


def test_stalled_disks_do_not_refuse_batches_that_do_not_wait_for_them() -> None:
    """With ack=1 a batch in flight is acked from memory."""
    world = publishing(wires=1)
    world.settle()
    world.wires[1].far.mute = True
    add(world, b"x")
    world.settle()
    world.wires[1].far.mute = False
    say_full(world, *FULL_DISK)
    assert world.core.unsettled == 1
    assert world.core.pressure() is None


def test_an_ack_through_one_broker_ends_the_trouble_of_the_lane_on_all_links() -> None:
    """The next batch may use another link, on which the trouble was reported, too."""
    world = publishing(durable=True, wires=2)
    add(world, b"x")
    world.settle()
    say_full(world, *FULL_DISK)
    assert world.core.pressure() is not None
    world.cluster.make_durable()
    world.settle()
    ways = set()
    for data in (b"y", b"z"):  # the second one goes the other way, the first one being on its own
        ways.add(add(world, data).link)
    assert len(ways) == 2
    world.settle()
    for below in range(world.cluster.durable, len(world.cluster.log) + 1):
        world.cluster.make_durable(below)
        world.settle()
        assert world.core.pressure() is None


@pytest.mark.parametrize("why", [(-1, -1, 0), (0, -1, 0), (7, 0, 1), (0xFFFF_FFFE, 0xFF_FFFE, 255)])
def test_a_full_frame_has_a_reason_and_none_means_memory(why: tuple[int, int, int]) -> None:
    """Old brokers send 0."""
    assert parse_full(int.from_bytes(full_frame(*why)[8:], "little")) == why
    assert parse_full(0) == tuple(FullReceived())
