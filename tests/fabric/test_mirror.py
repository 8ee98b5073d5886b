"""A fabric with a mirror: everything visible in the first fabric is in the mirror, at every moment."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from embarcadero.config import FabricSizes
from embarcadero.errors import BadRegion, FabricFull
from embarcadero.fabric.layout import ORDER, RING_FRONTIER_OFFSET, SLOTS_OFFSET, RegionKind, sealed
from embarcadero.fabric.leader import EpochTable, create_epochs
from embarcadero.fabric.lines import attach_ring, create_ring
from embarcadero.fabric.log import create_log
from embarcadero.fabric.region import EPOCHS_REGION, Shape
from embarcadero.fabric.shared import MirroredFabric, SharedFabric
from embarcadero_proof.bugs.table import injected
from embarcadero_proof.sim.incoherent import IncoherentMemory

SHAPE = Shape(RegionKind.ORDER, 4096, slots=8, slot_bytes=64)


class Two:
    """Two incoherent memories, and a host that writes to both."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.first, self.mirror = IncoherentMemory(self.rng, 7), IncoherentMemory(self.rng, 7)
        self.fabric = MirroredFabric(self.first.host("near"), self.mirror.host("near"))

    def visible(self, memory: IncoherentMemory) -> tuple[int, set[bytes]]:
        """The frontier and the whole entries of a ring that have reached a memory."""
        words = memory.regions["ring"].words
        entries = words[SLOTS_OFFSET // 8 :].view(ORDER)
        return int(words[RING_FRONTIER_OFFSET // 8]), {entry.tobytes() for entry in entries[sealed(entries)]}


@pytest.mark.parametrize("planted", [False, True])
def test_the_mirror_has_everything_that_the_first_fabric_shows(planted: bool) -> None:
    """Between any two primitives, with any cache behavior. With the injected bug it does not."""
    behind = []
    for seed in range(6):
        two = Two(seed)
        ring = create_ring(two.fabric, "ring", RegionKind.ORDER, ORDER, slots=16)

        def look(_: str, two: Two = two) -> None:
            two.first.churn(two.rng.randrange(3))
            two.mirror.churn(two.rng.randrange(3))
            (frontier, entries), (known, there) = two.visible(two.first), two.visible(two.mirror)
            newest = {entry for entry in entries if int.from_bytes(entry[:8], "little") >= frontier - 4}
            behind.append(bool(newest - there) or frontier > known)

        two.first.interrupt = two.mirror.interrupt = look
        with injected(*["mirror-after-primary"] * planted):
            for first in range(0, 60, 3):
                entries = np.zeros(3, dtype=ORDER)
                entries["seq"] = first
                ring.write(entries, free_below=first)
                ring.publish()
    assert len(behind) > 100
    assert any(behind) == planted


def test_stores_are_visible_to_no_reader_before_the_flush() -> None:
    """Not even on the same host, where plain shared memory would show them."""
    two = Two()
    region = two.fabric.create("a", SHAPE)
    reader = two.fabric.attach("a")
    region.data[300] = 5
    region.invalidate(300, 1)
    reader.invalidate(300, 1)
    assert (int(region.data[300]), int(reader.data[300])) == (5, 0)
    region.flush(300, 1)
    reader.invalidate(300, 1)
    assert int(reader.data[300]) == 5


def test_a_crash_of_the_writer_leaves_flushed_data_in_both() -> None:
    """The mirror outlives its writer, and the first fabric."""
    two = Two()
    ring = create_ring(two.fabric, "ring", RegionKind.ORDER, ORDER, slots=16)
    ring.write(np.zeros(5, dtype=ORDER), free_below=0)
    ring.publish()
    two.first.crash("near")
    two.mirror.crash("near")
    for memory in (two.first, two.mirror):
        assert attach_ring(memory.host("later"), "ring", ORDER).valid_end(0) == 5


def test_an_old_sequencer_does_not_roll_back_the_epoch_table() -> None:
    """Each copies its own lines only, though it has others in its cache; every host sees all open epochs."""
    two = Two()
    create_epochs(two.fabric)
    hosts = [MirroredFabric(two.first.host(name), two.mirror.host(name)) for name in ("one", "two")]
    tables = [EpochTable(host, host.attach(EPOCHS_REGION, writable=True)) for host in hosts]
    tables[0].open(1)
    tables[1].open(2)
    tables[1].start(2)
    tables[0].start(1)
    for memory in (two.first, two.mirror):
        words = memory.regions[EPOCHS_REGION].words[16:].reshape(-1, 16)
        assert words[1:3, [0, 8]].tolist() == [[1, 2], [2, 3]]
    assert tables[0].superseded(1)


def real(tmp_path: Path) -> tuple[MirroredFabric, SharedFabric, SharedFabric]:
    for name in ("first", "mirror"):
        (tmp_path / name).mkdir()
    first, mirror = SharedFabric(tmp_path / "first", 7), SharedFabric(tmp_path / "mirror", 7)
    return MirroredFabric(first, mirror), first, mirror


def test_payloads_are_not_mirrored(tmp_path: Path) -> None:
    """They make a fabric large; all other regions of a broker are in both, and are removed from both."""
    fabric, first, mirror = real(tmp_path)
    create_log(fabric, "broker-0.1", FabricSizes(log_bytes=64 << 10, chunk_bytes=16 << 10), 0, 1)
    assert first.names() == ["broker-0.1/frontiers", "broker-0.1/log"]
    assert mirror.names() == ["broker-0.1/frontiers"]
    for name in fabric.names():
        fabric.remove(name)
    assert first.names() == mirror.names() == []


def test_a_region_without_space_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name can be tried again. An existing region stays as it is."""
    fabric, first, mirror = real(tmp_path)

    def full(name: str, shape: Shape) -> None:
        raise FabricFull(f"no room for {name} of {shape.size} bytes", "make room")

    monkeypatch.setattr(first, "create", full)
    with pytest.raises(FabricFull):
        fabric.create("a", SHAPE)
    assert mirror.names() == []
    monkeypatch.undo()
    fabric.create("a", SHAPE)
    with pytest.raises(BadRegion, match="exists already"):
        fabric.create("a", SHAPE)
    assert mirror.names() == first.names() == ["a"]


def test_sparse_regions_get_memory_in_both(tmp_path: Path) -> None:
    """Rows of a checkpoint are reserved before they are written: a full mirror is an error, too, not a crash."""
    fabric, _, _ = real(tmp_path)
    region = fabric.create("a", Shape(RegionKind.CHECKPOINT, 1 << 20))
    before = [(tmp_path / name / "a").stat().st_blocks for name in ("first", "mirror")]
    region.reserve(512 << 10, 64 << 10)
    after = [(tmp_path / name / "a").stat().st_blocks for name in ("first", "mirror")]
    assert all(more >= less + 128 for more, less in zip(after, before, strict=True))
    region.data[512 << 10 : (512 << 10) + 1000] = 9
    region.flush(512 << 10, 1000)
    assert set(fabric.attach("a").data[512 << 10 : (512 << 10) + 1000].tolist()) == {9}
    region.close()
    assert len(region.data) == 0
