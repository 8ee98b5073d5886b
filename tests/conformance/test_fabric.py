"""One suite for every fabric: real memory, coherent or with real cache shared, simulated incoherent memory, and all
of these with a mirror."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from embarcadero.config import FabricSizes
from embarcadero.errors import BadName, BadRegion, InvariantBroken
from embarcadero.fabric import shared
from embarcadero.fabric.layout import LAYOUT_VERSION, ORDER, PENDING, SUPERBLOCK, Entries, RegionKind, superblock_check
from embarcadero.fabric.leader import EpochTable, create_epochs
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, attach_ring, create_ring
from embarcadero.fabric.log import LogReader, LogWriter, create_log
from embarcadero.fabric.region import EPOCHS_REGION, Fabric, Region, Shape, attach_unless_removed, write_superblock
from embarcadero.fabric.shared import MirroredFabric, SharedFabric
from embarcadero.limits import EPOCHS_AHEAD_MAX, EPOCHS_MAX
from embarcadero_proof.sim.incoherent import IncoherentMemory

GENERATION = 0x1234_5678_9ABC
SHAPE = Shape(RegionKind.ORDER, 4096, slots=8, slot_bytes=64, owner=3, incarnation=4)

Hosts = tuple[Fabric, Fabric]


def real(coherent: bool) -> Callable[[Path], Hosts]:
    def make(folder: Path) -> Hosts:
        return tuple(SharedFabric(folder, GENERATION, coherent=coherent) for _ in range(2))  # type: ignore[return-value]

    return make


def simulated(_: Path) -> Hosts:
    memory = IncoherentMemory(random.Random(1), GENERATION)
    return memory.host("near"), memory.host("far")


def mirrored(make: Callable[[Path], Hosts]) -> Callable[[Path], Hosts]:
    def make_both(folder: Path) -> Hosts:
        parts = []
        for name in ("first", "mirror"):
            (folder / name).mkdir()
            parts.append(make(folder / name))
        return MirroredFabric(parts[0][0], parts[1][0]), MirroredFabric(parts[0][1], parts[1][1])

    return make_both


def fabrics() -> Sequence[object]:
    found = {"coherent": real(coherent=True), "simulated": simulated}
    if shared.NATIVE is not None and not shared.NATIVE.coherent_only:
        found["incoherent"] = real(coherent=False)
    plain = [pytest.param(make, id=name) for name, make in found.items()]
    return plain + [pytest.param(mirrored(make), id=f"{name}-mirrored") for name, make in found.items()]


@pytest.fixture(params=fabrics())
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Hosts:
    """The same fabric as two hosts see it (on one machine: two mappings)."""
    made: Hosts = request.param(tmp_path)
    return made


# --- regions ----------------------------------------------------------------------------------------------------------


def test_a_created_region_exists_for_all(hosts: Hosts) -> None:
    """A region has zeros and the shape it was made with, for its creator and for every other host."""
    near, far = hosts
    made = near.create("epoch-1/order-0", SHAPE)
    found = far.attach("epoch-1/order-0")
    for region in (made, found):
        assert (region.name, region.shape) == ("epoch-1/order-0", SHAPE)
        region.invalidate(0, 4096)
        assert not region.data[SUPERBLOCK.itemsize :].any()
    assert made.data.flags.writeable
    assert not found.data.flags.writeable


def test_names_exist_until_removed(hosts: Hosts) -> None:
    """names and exists list the existing regions, on all hosts, in one order; removing twice is allowed."""
    near, far = hosts
    assert far.names() == []
    for name in ("b/x", "a", "b/a"):
        assert not far.exists(name)
        near.create(name, SHAPE).close()
        assert far.exists(name)
    assert far.names() == near.names() == ["a", "b/a", "b/x"]
    far.remove("b/a")
    far.remove("b/a")
    assert not near.exists("b/a")
    assert near.names() == ["a", "b/x"]


def test_removing_leaves_mappings_alone_and_frees_the_name(hosts: Hosts) -> None:
    """A host that mapped a removed region still has it. A new region of the same name starts with zeros."""
    near, far = hosts
    old = near.create("a", SHAPE)
    reader = far.attach("a")
    near.remove("a")
    new = near.create("a", SHAPE)
    old.data[200] = 7
    old.flush(200, 1)
    reader.invalidate(200, 1)
    assert int(reader.data[200]) == 7
    new.invalidate(200, 1)
    assert int(new.data[200]) == 0


def test_a_region_is_made_once(hosts: Hosts) -> None:
    """Creating a region that exists is refused, on any host, and changes nothing."""
    near, far = hosts
    made = near.create("a", SHAPE)
    made.data[200] = 7
    for fabric in hosts:
        with pytest.raises(BadRegion, match="exists already"):
            fabric.create("a", SHAPE)
    assert int(made.data[200]) == 7
    assert far.attach("a").shape == SHAPE


def test_a_missing_region_is_a_typed_error(hosts: Hosts) -> None:
    """Attaching a region that does not exist raises an error with its name."""
    with pytest.raises(BadRegion, match=r"region broker-1\.1/pending"):
        hosts[0].attach("broker-1.1/pending")


def test_regions_removed_while_they_are_attached_differ_from_damaged_ones(hosts: Hosts) -> None:
    """All of them, or None if any is missing, also if it was removed in between; damage stays an error."""
    near, far = hosts
    made = [near.create(f"broker-0.1/{name}", SHAPE) for name in ("log", "frontiers")]
    names = [region.name for region in made]

    def attach_late(name: str) -> Region:
        near.remove(names[1])
        return far.attach(name)

    found = attach_unless_removed(far, *names)
    assert found is not None
    assert [region.name for region in found] == names
    for damaged in (True, False):
        made[0].data[0] ^= 1
        made[0].flush(0, 64)
        if damaged:
            with pytest.raises(BadRegion, match="magic"):
                attach_unless_removed(far, *names)
    assert attach_unless_removed(cast("Fabric", SimpleNamespace(exists=far.exists, attach=attach_late)), *names) is None
    assert attach_unless_removed(far, *names) is None


@pytest.mark.parametrize("name", ["", "..", "/abs", "a/../../b", ".x"])
def test_bad_names_are_refused(hosts: Hosts, name: str) -> None:
    """Names that could lead out of the fabric are refused everywhere."""
    for call in (lambda: hosts[0].create(name, SHAPE), lambda: hosts[0].attach(name), lambda: hosts[0].exists(name)):
        with pytest.raises(BadName):
            call()


def other_version(region: Region) -> None:
    block = region.data[: SUPERBLOCK.itemsize].view(SUPERBLOCK)
    block["version"] = LAYOUT_VERSION + 1
    block["check"] = superblock_check(block)


def garbage(region: Region) -> None:
    region.data[:] = np.frombuffer(random.Random(1).randbytes(4096), dtype=np.uint8)


def one_bit(region: Region) -> None:
    region.data[40] ^= 1


def other_generation(region: Region) -> None:
    write_superblock(region.data, SHAPE, GENERATION + 1)


def truncated(region: Region) -> None:
    write_superblock(region.data, Shape(RegionKind.ORDER, 8192, slots=64, slot_bytes=64), GENERATION)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (garbage, "wrong magic"),
        (other_version, "version"),
        (one_bit, "damaged"),
        (other_generation, "another cluster"),
        (truncated, "8192 bytes"),
    ],
)
def test_a_wrong_superblock_is_refused(hosts: Hosts, damage: Callable[[Region], None], message: str) -> None:
    """Garbage, another version, damage, another cluster's region and a truncated one are distinguished and refused."""
    near, far = hosts
    region = near.create("a", SHAPE)
    assert far.attach("a").shape == SHAPE
    damage(region)
    region.flush(0, 4096)
    with pytest.raises(BadRegion, match=f"region a: .*{message}"):
        far.attach("a")


def test_flush_then_invalidate_makes_visible(hosts: Hosts) -> None:
    """After a store and flush on one host, another host sees it once it invalidates: bytes of any alignment."""
    near, far = hosts
    writer = near.create("a", SHAPE)
    reader = far.attach("a")
    for value, (offset, length) in enumerate([(128, 8), (191, 2), (1000, 3000), (4095, 1)], start=1):
        writer.data[offset : offset + length] = value
        writer.flush(offset, length)
        near.fence()
        reader.invalidate(offset, length)
        assert set(reader.data[offset : offset + length].tolist()) == {value}


def test_generation_and_mode_are_reported(hosts: Hosts) -> None:
    """Both hosts agree on the generation, and on whether they rely on coherent memory."""
    near, far = hosts
    assert near.generation == far.generation == GENERATION
    assert near.coherent_only == far.coherent_only


# --- rings and frontiers ----------------------------------------------------------------------------------------------


def entries(first: int, count: int) -> Entries:
    made = np.zeros(count, dtype=ORDER)
    made["seq"] = np.arange(first, first + count) * 10
    return made


def test_rings_wrap(hosts: Hosts) -> None:
    """Entries keep their indices over many laps, wherever the ring's end cuts a slice."""
    near, far = hosts
    writer = create_ring(near, "ring", RegionKind.ORDER, ORDER, slots=8)
    reader = attach_ring(far, "ring", ORDER)
    for first in range(0, 50, 5):
        assert writer.write(entries(first, 5), free_below=first) == first
        writer.publish()
        assert reader.frontier.load() == first + 5
        found = reader.read(first, first + 5)
        assert found["index"].tolist() == list(range(first, first + 5))
        assert found["seq"].tolist() == [10 * index for index in range(first, first + 5)]
    assert reader.valid_end(45) == 50


def test_overwritten_and_unwritten_slots_are_not_valid(hosts: Hosts) -> None:
    """Neither overwritten slots of an earlier lap nor unwritten slots are read."""
    near, far = hosts
    writer = create_ring(near, "ring", RegionKind.ORDER, ORDER, slots=8)
    reader = attach_ring(far, "ring", ORDER)
    assert len(reader.read(0, 8)) == 0
    writer.write(entries(0, 5), free_below=0)
    assert len(reader.read(0, 8)) == 5
    writer.write(entries(5, 5), free_below=5)
    assert len(reader.read(0, 8)) == 0
    assert reader.read(2, 10)["index"].tolist() == list(range(2, 10))


def test_entries_with_unused_bytes_survive_a_wrap(hosts: Hosts) -> None:
    """Bytes of an entry that belong to no field do not spoil its check, not even where a read wraps."""
    near, far = hosts
    writer = create_ring(near, "ring", RegionKind.PENDING, PENDING, slots=4)
    reader = attach_ring(far, "ring", PENDING)
    for first in (0, 3, 6):
        writer.write(np.zeros(3, dtype=PENDING), free_below=first)
        assert reader.read(first, first + 3)["index"].tolist() == [first, first + 1, first + 2]


def test_frontiers_only_go_up(hosts: Hosts) -> None:
    """Readers see every advance; a step back is a bug and changes nothing."""
    near, far = hosts
    writer = FrontierWriter(near.create("a", SHAPE), 256)
    reader = FrontierReader(far.attach("a"), 256)
    for value in (0, 1, 1, 7, 2**40):
        writer.advance(value)
        assert reader.load() == value
    with pytest.raises(InvariantBroken, match="never goes back"):
        writer.advance(2**40 - 1)
    assert reader.load() == 2**40


# --- epochs -----------------------------------------------------------------------------------------------------------


def epoch_tables(hosts: Hosts) -> tuple[EpochTable, EpochTable]:
    near, far = hosts
    create_epochs(near)
    return EpochTable(near, near.attach(EPOCHS_REGION, writable=True)), EpochTable(
        far, far.attach(EPOCHS_REGION, writable=True)
    )


def test_an_opened_epoch_supersedes_earlier_ones(hosts: Hosts) -> None:
    """As soon as an epoch is open, all earlier ones within reach are superseded for every process; it is not."""
    one, two = epoch_tables(hosts)
    assert not two.superseded(1)
    one.open(1)
    assert not two.superseded(1)
    two.open(1 + EPOCHS_AHEAD_MAX)
    for table in (one, two):
        assert table.superseded(1)
        assert table.superseded(EPOCHS_AHEAD_MAX)
        assert not table.superseded(1 + EPOCHS_AHEAD_MAX)


def test_the_newest_started_epoch_is_found(hosts: Hosts) -> None:
    """Opened epochs do not count as started; the newest started one within reach is found."""
    one, two = epoch_tables(hosts)
    one.open(1)
    assert two.newest_started(after=0) is None
    one.start(1)
    assert two.newest_started(after=0) == 1
    two.open(3)
    assert one.newest_started(after=0) == 1
    two.start(3)
    assert one.newest_started(after=0) == 3
    assert one.newest_started(after=3) is None


def test_the_last_started_epoch_is_found_however_far_it_is(hosts: Hosts) -> None:
    """For a process that starts after all of them; epochs that were only opened do not count."""
    one, two = epoch_tables(hosts)
    assert two.last_started() == 0
    one.open(1)
    one.start(1)
    far = 1 + 3 * EPOCHS_AHEAD_MAX
    one.open(far)
    one.start(far)
    one.open(far + 1)
    assert two.last_started() == far


def test_epochs_do_not_outgrow_the_table(hosts: Hosts) -> None:
    """Near its end the table still answers."""
    one, two = epoch_tables(hosts)
    one.open(EPOCHS_MAX - 1)
    assert two.superseded(EPOCHS_MAX - 2)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_payloads_are_copied_until_their_chunk_is_reused(hosts: Hosts) -> None:
    """Every process can copy a payload until its chunk is reused; then it is freed, and never another batch's bytes."""
    near, far = hosts
    sizes = FabricSizes(log_bytes=4 * 1024, chunk_bytes=1024)
    frontiers, log = create_log(near, "broker-2.1", sizes, owner=2, incarnation=1)
    writer = LogWriter(log, frontiers)
    reader = LogReader(far.attach("broker-2.1/log"), far.attach("broker-2.1/frontiers"))
    stored: list[tuple[int, bytes]] = []
    for number in range(40):
        reservation = writer.reserve(400)
        assert reservation is not None
        payload = bytes([number]) * 400
        reservation.view[:] = payload
        writer.flush(reservation)
        stored.append((reservation.location, payload))
        assert reader.copy(reservation.location, 400) == payload
        writer.release(reservation.location)
    freed = reader.freed(np.array([location for location, _ in stored], dtype=np.uint32)).tolist()
    assert freed == [True] * 32 + [False] * 8
    for (location, payload), gone in zip(stored, freed, strict=True):
        assert reader.copy(location, 400) == (None if gone else payload)


def test_a_log_names_its_owner(hosts: Hosts) -> None:
    """The regions of a broker's log carry its owner and incarnation."""
    create_log(hosts[0], "broker-2.7", FabricSizes(log_bytes=2048, chunk_bytes=1024), owner=2, incarnation=7)
    for name in ("broker-2.7/log", "broker-2.7/frontiers"):
        shape = hosts[1].attach(name).shape
        assert (shape.owner, shape.incarnation) == (2, 7)
