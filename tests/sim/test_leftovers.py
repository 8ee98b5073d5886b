"""The resources of an idle cluster are within their bounds, and anything beyond them is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.region import Shape
from embarcadero.placement.directory import STARTS_KEPT
from embarcadero.placement.store import Put
from embarcadero.storage.layout import begun_name, range_folder
from embarcadero_proof.sim.checkers import p9
from embarcadero_proof.sim.history import Sampled
from embarcadero_proof.sim.leftovers import leftovers, see_leftovers
from embarcadero_proof.sim.run import run_world
from embarcadero_proof.sim.world import World

BRIEF = 4_003
"""A run with replicas that is over soon."""


@pytest.fixture(scope="module")
def world() -> World:
    """A run that has ended."""
    return run_world(BRIEF)


def too_much(world: World) -> set[str]:
    """Resources beyond their bounds."""
    return {amount.what for amount in leftovers(world) if amount.value > amount.bound}


def test_a_finished_run_keeps_only_allowed_resources(world: World) -> None:
    """All of it is recorded, and P9 holds."""
    seen = {sampled.what for sampled in world.history.of(Sampled)}
    assert {amount.what for amount in leftovers(world)} <= seen
    assert not too_much(world)
    assert not p9.check(world.history)


def a_region(name: str) -> Callable[[World], None]:
    return lambda world: world.memory.host("host-0").create(name, Shape(RegionKind.LOG, 4096)).close()


def a_file(path: str) -> Callable[[World], None]:
    def make(world: World) -> None:
        disk = world.disks.mount(world.probe, lambda: world.replicas[0].device)
        folder = path.rpartition("/")[0]
        for parts in range(folder.count("/") + 1 if folder else 0):
            if not disk.exists(part := "/".join(folder.split("/")[: parts + 1])):
                disk.make_folder(part)
        disk.open(path, create=True).close()

    return make


def many_starts(world: World) -> None:
    world.store.transact([], [Put(f"starts/{epoch:010}", b"{}") for epoch in range(100, 101 + STARTS_KEPT)])


def an_open_connection(world: World) -> None:
    for process in world.brokers.values():
        if process.alive and process.broker is not None:
            process.broker.connect()


def an_object_of_a_replica(world: World) -> None:
    for process in world.replicas.values():
        if process.replica is not None:
            process.replica.sessions._known[999] = 0


def an_object_of_a_broker(world: World) -> None:
    for process in world.brokers.values():
        if process.broker is not None:
            process.broker.connect()
            for peer in process.broker.peers.values():
                peer.sessions[999, 1] = None


def an_object_of_a_sequencer(world: World) -> None:
    assert world.sequencer.sequencer is not None
    world.sequencer.sequencer.without_memory.add(999)


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        (a_region("broker-9.9/log"), "incarnations with regions that are forgotten"),
        (a_region("replica-9.9/durable"), "incarnations with regions that are forgotten"),
        (a_file(f"{range_folder(0, 999)}/start"), "copies of ranges that are not its own"),
        (a_file(begun_name(range_folder(0, 999))), "copies of ranges that are not its own"),
        (a_file(f"{range_folder(0, 999)}.repair/start"), "repairs under way"),
        (a_file(f"{range_folder(0, 1)}/00000000000000000077.index"), "files of no segment"),
        (many_starts, "starts"),
        (an_open_connection, "connections"),
        (an_object_of_a_replica, "objects of deleted topics (sessions._known)"),
        (an_object_of_a_broker, "objects of deleted topics (peers.*.sessions)"),
        (an_object_of_a_sequencer, "objects of deleted topics (without_memory)"),
    ],
)
def test_leftovers_are_noticed(world: World, leave: Callable[[World], None], what: str) -> None:
    """One thing too many, and P9 reports it."""
    leave(world)
    assert what in too_much(world)
    see_leftovers(world)
    assert any(what in violation.sentence for violation in p9.check(world.history))


def test_too_many_epochs_are_noticed(world: World) -> None:
    """Past epochs, epochs that never started, and results that no broker will read."""
    started = world.directory.elections.started_epoch()
    for name in ("epoch-00/held", "epoch-000/held", *(f"epoch-{started + ahead}/held" for ahead in range(1, 6))):
        a_region(name)(world)
    a_region(f"epoch-{started}/results-9.9")(world)
    expected = {"epochs with regions", "epochs made and never started", "answers to brokers that are gone"}
    assert expected <= too_much(world)
