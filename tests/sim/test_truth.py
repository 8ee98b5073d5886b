"""The checker that sees all disks counts replicas that have a batch, not disks with any bytes at its position."""

from __future__ import annotations

from functools import partial

from embarcadero.types import Range, ReplicaRef
from embarcadero_proof.sim.disk import Mount, SimDisk
from embarcadero_proof.sim.tables import digest_of
from embarcadero_proof.sim.truth import Truth
from tests.storage.records import LANE, RANGE, START, START_SEQ, Source, fill, open_log

COUNT = 9


def a_range(*replicas: int) -> Range:
    refs = [ReplicaRef(replica=replica, incarnation=1, disk=f"{replica}") for replica in replicas]
    return Range(lane=LANE, number=RANGE, start=START, start_seq=START_SEQ, replicas=refs, durable_on=2)


def write(truth: Truth, replica: int, source: Source, sync: bool = True) -> None:
    """A new disk of a replica gets the first records of the range."""
    disk = SimDisk(f"{replica}")
    disk.on_synced = partial(truth.look, replica)
    fill(open_log(Mount(lambda: disk)), source, COUNT, sync)


def copies(truth: Truth, range_: Range, digest: int | None = None) -> list[int]:
    return [truth.copies(range_, index, digest) for index in range(START, START + COUNT)]


def test_each_replica_that_has_synced_counts() -> None:
    """Unsynced bytes do not count; neither do bytes after the last record."""
    truth, source = Truth(), Source()
    write(truth, 0, source)
    write(truth, 1, source)
    write(truth, 2, source, sync=False)
    assert copies(truth, a_range(0, 1, 2)) == [2] * COUNT
    assert truth.copies(a_range(0, 1, 2), START + COUNT) == 0


def test_two_disks_of_one_replica_count_once() -> None:
    """One was wiped, or is a zombie's, and the other replaced it."""
    truth, source = Truth(), Source()
    write(truth, 0, source)
    write(truth, 0, source)
    assert copies(truth, a_range(0, 1)) == [1] * COUNT


def test_a_replica_outside_the_range_does_not_count() -> None:
    """Whatever it has there."""
    truth, source = Truth(), Source()
    write(truth, 0, source)
    write(truth, 3, source)
    assert copies(truth, a_range(0, 1)) == [1] * COUNT
    assert copies(truth, a_range(0, 3)) == [2] * COUNT


def test_other_bytes_in_the_same_position_do_not_count() -> None:
    """Neither if the expected bytes are known, nor if only their durability was reported."""
    truth, source = Truth(), Source(1)
    write(truth, 0, source)
    write(truth, 1, Source(2))
    _, payloads = source.span(START, START + COUNT)
    batches = {START + at: payload for at, payload in enumerate(payloads) if payload}
    assert len(batches) > COUNT // 2
    for index, payload in batches.items():
        assert truth.copies(a_range(0, 1), index, digest_of(payload)) == 1
        assert truth.copies(a_range(0, 1), index) == 1
        assert truth.copies(a_range(0, 1), index, digest_of(b"neither")) == 0
