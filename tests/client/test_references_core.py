"""The publisher's core with batches by reference: settled, sent again and refused like any other, and named exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embarcadero.client.batches import OutBatch
from embarcadero.client.results import BatchResult, Receipt, RecordFuture, TableResult, Waitable
from embarcadero.errors import Backpressure, BadReference, BadValue, NotAvailable, OutcomeUnknown, Refused
from embarcadero.types import Outcome, Position, StagedBatch
from embarcadero.wire.codec import payload_crc
from tests.client.fake_cluster import LANE, FakeCluster, World
from tests.client.test_intake import intake
from tests.client.test_publisher_core import make_core, make_world


def stage(world: World, index: int, payload: bytes) -> StagedBatch:
    """Put a batch of two records where references may name it."""
    world.cluster.staged[4096, index] = payload
    return StagedBatch(77, 4096, index, len(payload), 2, payload_crc(payload))


def refer(world: World, staged: StagedBatch) -> OutBatch:
    batch: OutBatch = world.core.add_reference(staged, 3, world.now)
    world.collect()
    return batch


@pytest.mark.parametrize("order", [2, 5])
def test_references_and_payloads_settle_alike(order: int) -> None:
    """One session, batches of both kinds in turn: all are in the log once, each with the intended bytes."""
    world = make_world(order)
    batches = [
        refer(world, stage(world, n, b"staged %d" % n)) if n % 2 else world.core.add(b"sent %d" % n, 2, 3, 0, world.now)
        for n in range(10)
    ]
    world.settle()
    assert [stored.payload for stored in sorted(world.cluster.log, key=lambda each: each.session_seq)] == [
        b"staged %d" % n if n % 2 else b"sent %d" % n for n in range(10)
    ]
    assert {stored.partition for stored in world.cluster.log} == {3}
    assert sorted(batch.position.index for batch in batches if batch.position) == list(range(10))


def test_the_window_and_the_credit_count_the_staged_size() -> None:
    """A reference takes as much space as its bytes would, here and at the broker."""
    world = make_world(window_bytes=10_000, wires=1)
    staged = stage(world, 0, b"x" * 6_000)
    batch = refer(world, staged)
    assert batch.size == 6_000
    assert not world.core.has_room(6_000)
    world.settle()
    assert world.wires[1].link.sent_bytes == world.wires[1].far.received_bytes == 64 + 6_000
    assert world.core.has_room(6_000)


def test_a_reference_is_sent_again_unchanged_and_stored_once() -> None:
    """The connection is lost before the ack: the same frame goes out on another one, and is found to be a duplicate."""
    world = make_world(wires=2)
    world.settle()
    batch = refer(world, stage(world, 0, b"staged"))
    [used] = [number for number, wire in world.wires.items() if wire.outward]
    while world.wires[used].outward:
        world.outward(used)
    world.cut(used)
    world.settle()
    assert [stored.payload for stored in world.cluster.log] == [b"staged"]
    assert batch.position == Position(LANE, 0, 0)
    assert len({payload for header, payload in world.cluster.frames}) == 1


def test_a_staged_batch_that_is_gone_ends_only_that_batch() -> None:
    """A weak session continues; the error names the position and the remedy."""
    world = make_world(2)
    lost = refer(world, replace(stage(world, 0, b"staged"), index=9))
    other = refer(world, stage(world, 1, b"other"))
    world.settle()
    assert isinstance(lost.error, BadReference)
    assert "lane 4096 has no batch at index 9" in str(lost.error)
    assert "stage" in lost.error.hint
    assert other.position is not None
    assert world.core.failed is None


def test_batches_after_a_refused_reference_in_a_strong_session_are_not_stored() -> None:
    """No batch passes the hole: the publisher ends immediately, not when the gap is given up."""
    world = World(make_core(order=5), FakeCluster(5), 1)
    world.settle()
    gone = refer(world, replace(stage(world, 0, b"staged"), crc=1))
    sent = refer(world, stage(world, 1, b"sent with it"))
    world.settle()
    later = refer(world, stage(world, 2, b"later"))
    assert isinstance(gone.error, BadReference)
    assert "checksum 00000001" in str(gone.error)
    assert isinstance(sent.error, OutcomeUnknown)
    assert type(later.error) is Refused
    assert isinstance(world.core.failed, BadReference)
    assert world.cluster.log == []


def test_a_refusal_after_a_copy_of_unknown_fate_is_an_unknown_outcome() -> None:
    """The first copy may have been stored before its source was trimmed: its failure is not certain."""
    world = make_world(2, wires=2)
    world.settle()
    batch = refer(world, stage(world, 0, b"staged"))
    [used] = [number for number, wire in world.wires.items() if wire.outward]
    world.cut(used)
    world.cluster.staged.clear()
    world.settle()
    assert isinstance(batch.error, OutcomeUnknown)
    assert not isinstance(batch.error, BadReference)


def test_a_staged_batch_that_cannot_be_read_for_long_is_named() -> None:
    """Brokers that refuse for as long as a delivery may take are not full: the error names the reason for the wait."""
    world = make_world(2, wires=1, delivery_timeout_us=500_000)
    world.settle()
    world.cluster.backpressure = 1 << 30
    batch = refer(world, stage(world, 6, b"staged"))
    world.run(lambda: batch.done)
    assert isinstance(batch.error, Backpressure)
    assert "index 6 of lane 4096 was not readable" in str(batch.error)


def test_brokers_of_an_earlier_version_get_no_references() -> None:
    """They would take it for a damaged payload and disconnect. The batch ends with the remedy."""
    cluster = FakeCluster(2)
    cluster.references = False
    world = World(make_core(), cluster, 2)
    batch, other = refer(world, stage(world, 0, b"staged")), world.core.add(b"carried", 1, 0, 0, world.now)
    world.settle()
    assert isinstance(batch.error, NotAvailable)
    assert "upgrade" in batch.error.hint
    assert other.position is not None


def test_in_a_cluster_that_is_being_upgraded_the_newer_brokers_get_them() -> None:
    """One broker of each version: payloads go to both, references to the newer one only."""
    world = make_world(2, wires=2)
    old = world.wires[1]
    old.link.references = False
    batches = [refer(world, stage(world, n, b"staged %d" % n)) for n in range(4)]
    world.settle()
    assert all(batch.position for batch in batches)
    assert old.link.sent_bytes == 0


def test_no_reference_is_never_treated_as_stored() -> None:
    """Every check of an outcome for "stored" is false."""
    assert not Outcome.NO_REFERENCE.stored
    assert Outcome.NO_REFERENCE >= 16  # like every refusal


# --- staging ----------------------------------------------------------------------------------------------------------
def test_a_future_names_its_staged_batch() -> None:
    """The future of an encoded batch has all fields of a reference, once it is stored."""
    result, whole = BatchResult(Waitable()), TableResult(Waitable())
    whole.add(result)
    whole.complete()
    result.settle(Position(4097, 5, 50), None, Receipt(77, 100, 10, 0xABC))
    assert RecordFuture(whole, 0).staged(schema=2) == StagedBatch(77, 4097, 5, 100, 10, 0xABC, 2)


def test_a_batch_without_a_known_position_cannot_be_named() -> None:
    """With ack=0 the position of a batch is unknown, and a table of several batches has no single position."""
    unacked = BatchResult(Waitable())
    unacked.settle(None, None)
    whole = TableResult(Waitable())
    for index in range(2):
        part = BatchResult(Waitable())
        part.settle(Position(4097, index, index), None, Receipt(77, 100, 1, 0))
        whole.add(part)
    whole.complete()
    for result in (unacked, whole):
        with pytest.raises(BadValue, match="publish_encoded"):
            RecordFuture(result, 0).staged()


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"size": 9 << 20}, {"count": 0}, {"lane": 1 << 32}, {"index": -1}, {"crc": -1}, {"topic_id": 1 << 64},
     {"schema": 1 << 16}],
)  # fmt: skip
def test_a_reference_that_no_frame_can_hold_is_refused_before_anything_is_sent(wrong: dict[str, int]) -> None:
    """Manifests come from files: a wrong number is an error that names it, not a broken connection."""
    staged = StagedBatch(77, 4096, 0, 100, 2, 1)
    [(name, value)] = wrong.items()
    with pytest.raises(BadValue, match=f"{name} {value}"):
        intake().reference_piece(replace(staged, **wrong), 0)


def test_a_reference_into_a_missing_partition_is_refused() -> None:
    """The broker would end the connection, with all publishers on it."""
    with pytest.raises(BadValue, match="partition 1 does not exist: the topic has 1"):
        intake().reference_piece(StagedBatch(77, 4096, 0, 100, 2, 1), 1)
