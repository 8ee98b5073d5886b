"""Batches by reference: the broker copies a staged batch, checks it, and stores it like any other batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embarcadero.broker import references
from embarcadero.errors import Corrupt
from embarcadero.types import Outcome, Range, ReferenceFault
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    REFERENCE,
    REFERENCE_BODY,
    WANT_DURABLE,
    BatchReference,
    batch_header,
    payload_crc,
    reference_body,
)
from embarcadero_proof.bugs.table import injected
from tests.broker.disks import DiskWorld, Later, payload, texts
from tests.broker.harness import Client, World

Where = tuple[int, int, int]
"""Lane, index and topic id of a staged batch."""


def opened(client: Client, topic: str) -> m.Opened:
    """Open a session of a topic of order 0 or 1."""
    answer = client.answers[client.ask(m.OpenSession(topic=topic))]
    assert isinstance(answer, m.Opened), answer
    return answer


def refer(client: Client, session: m.Opened, sequence: int, at: Where, data: bytes, **fields: Any) -> None:
    """Send a batch of two records that names the staged one; `fields` override the correct values."""
    lane, index, topic_id = at
    size = fields.pop("size", len(data))
    header: dict[str, Any] = {
        "session_seq": sequence, "low": 0, "lane": session.lane, "session": session.session, "count": 2,
        "crc": payload_crc(data), "length": REFERENCE_BODY.itemsize, "flags": REFERENCE,
    }  # fmt: skip
    client.send(batch_header(**(header | fields)) + reference_body(BatchReference(lane, size, index, topic_id)))


def outcomes(client: Client) -> list[tuple[int, Outcome]]:
    client.pump()
    return [(int(ack["session_seq"]), Outcome(int(ack["outcome"]))) for ack in client.acks]


def faults(client: Client) -> list[tuple[Outcome, int]]:
    client.pump()
    return [(Outcome(int(ack["outcome"])), int(ack["extra"])) for ack in client.acks]


def id_of(world: Any, name: str) -> int:
    return next(topic.id for topic in world.directory.topics.all() if topic.name == name)


def stage(world: Any, client: Client, data: bytes, topic: str = "zero") -> Where:
    """Stage a batch of two records; return where it is."""
    client.batch(opened(client, topic), 0, data, count=2)
    client.pump()
    ack = client.acks.pop()
    return int(ack["extra"]), int(ack["index"]), id_of(world, topic)


@pytest.fixture
def world() -> World:
    """Two brokers, a topic of order 0 and one of order 1 to stage in, one of order 5 to publish into."""
    world = World()
    world.topic("zero", order=0)
    world.topic("one", order=1)
    world.topic("t", order=5)
    return world


# --- from memory ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("staged_in", ["zero", "one"])
def test_any_broker_copies_what_any_other_has_staged(world: World, staged_in: str) -> None:
    """Staged through one broker, published through the other: an ordinary batch with the bytes that were staged."""
    stager, publisher = Client(world.brokers[0]), Client(world.brokers[1])
    places = [(stage(world, stager, data, staged_in), data) for data in (b"first", b"second" * 100)]
    session = world.open(publisher)
    for sequence, (at, data) in enumerate(places):
        refer(publisher, session, sequence, at, data, partition=3)
    world.run(3, publisher)

    assert outcomes(publisher) == [(0, Outcome.ORDERED), (1, Outcome.ORDERED)]
    found = world.fetch(publisher, session.lane)
    assert texts(found) == [b"first", b"second" * 100]
    assert [int(entry["partition"]) for entry in found.entries[:2]] == [3, 3]
    assert [int(entry["count"]) for entry in found.entries[:2]] == [2, 2]
    assert world.brokers[1].admission.references.copied == 2


@pytest.mark.parametrize("order", ["zero", "one"])
def test_a_topic_of_order_0_or_1_takes_references_too(world: World, order: str) -> None:
    """They get positions in the broker's own lane; order 1 accepts them in sequence."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), opened(client, order)
    for sequence in range(3):
        refer(client, session, sequence, at, b"staged")
    assert outcomes(client) == [(sequence, Outcome.ORDERED) for sequence in range(3)]
    assert texts(world.fetch(client, int(client.acks[0]["extra"]), by="earliest"))[-3:] == [b"staged"] * 3


def test_a_reference_sent_again_is_a_duplicate(world: World) -> None:
    """A batch is identified by sequence and checksum only: carried or named makes no difference."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), world.open(client)
    refer(client, session, 0, at, b"staged")
    client.batch(session, 0, b"staged", count=2)
    refer(client, session, 0, at, b"staged")
    world.run(3, client)
    assert sorted(outcome for _, outcome in outcomes(client)) == [Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP_OF]
    assert texts(world.fetch(client, session.lane)) == [b"staged"]


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"crc": 1}, ReferenceFault.DIFFERS),
        ({"count": 3}, ReferenceFault.DIFFERS),
        ({"size": 5}, ReferenceFault.DIFFERS),
        ({"size": 7}, ReferenceFault.DIFFERS),
        ({"at": (0, 1, 0)}, ReferenceFault.GONE),
        ({"at": (0, (1 << 64) - 1, 0)}, ReferenceFault.GONE),
        ({"at": (0, 0, 1)}, ReferenceFault.ANOTHER_TOPIC),
        ({"at": (1, 0, 0)}, ReferenceFault.ANOTHER_TOPIC),
    ],
)
def test_a_reference_that_is_wrong_is_refused_alone(world: World, wrong: dict[str, Any], fault: ReferenceFault) -> None:
    """The ack has the reason; nothing is stored, and the connection stays."""
    client = Client(world.brokers[0])
    (lane, index, topic_id), session = stage(world, client, b"staged"), world.open(client)
    more = wrong.pop("at", (0, 0, 0))
    at = lane + more[0], index + more[1], topic_id + more[2]
    refer(client, session, 0, at, b"staged", **wrong)
    assert faults(client) == [(Outcome.NO_REFERENCE, fault)]
    refer(client, session, 0, (lane, index, topic_id), b"staged")
    world.run(3, client)
    assert faults(client)[1] == (Outcome.ORDERED, 0)
    assert world.brokers[0].unsettled == 0


def test_a_lane_of_a_topic_in_one_order_is_no_staging_topic(world: World) -> None:
    """Only lanes that brokers order by themselves are read: topics of orders 2 and 5 have no lane that can be named."""
    client = Client(world.brokers[0])
    session = world.open(client)
    client.batch(session, 0, b"ordered", count=2)
    world.run(3, client)
    refer(client, session, 1, (session.lane, 1, id_of(world, "t")), b"ordered")
    assert faults(client)[1] == (Outcome.NO_REFERENCE, ReferenceFault.ANOTHER_TOPIC)


def test_a_recreated_topic_is_another_topic(world: World) -> None:
    """An old reference does not name batches that were staged later under the same topic name."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), world.open(client)
    world.directory.topics.delete("zero")
    world.run(3)
    refer(client, session, 0, at, b"staged")
    world.topic("zero", order=0)
    lane, index, _ = stage(world, client, b"staged")
    refer(client, session, 0, (lane, index, at[2]), b"staged")
    assert faults(client) == [(Outcome.NO_REFERENCE, ReferenceFault.ANOTHER_TOPIC)] * 2


def test_a_trimmed_batch_is_gone(world: World) -> None:
    """A staged batch below the start of its lane is reported as gone, even while its bytes are in memory."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), world.open(client)
    world.directory.topics.trim("zero", at[0], 1)
    world.run()
    refer(client, session, 0, at, b"staged")
    assert faults(client) == [(Outcome.NO_REFERENCE, ReferenceFault.GONE)]


# --- limits -----------------------------------------------------------------------------------------------------------
def test_a_reference_costs_as_much_as_its_bytes(world: World) -> None:
    """Credit is charged for the staged size, so no client makes a broker copy more than it could have sent."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"x" * 4_000), world.open(client)
    before = client.peer.credit.received
    refer(client, session, 0, at, b"x" * 4_000)
    assert client.peer.credit.received == before + 64 + 4_000
    for sequence in range(1, 10):
        refer(client, session, sequence, at, b"x" * 4_000)
        client.peer.credit.granted = min(client.peer.credit.granted, before + 10_000)
    client.pump()
    assert client.peer.closing
    assert [message.code for message in client.pushed if isinstance(message, m.Failed)] == ["OverCredit"]
    assert world.brokers[0].ingest.arriving == 0


@pytest.mark.parametrize(
    ("size", "code"), [(0, "BadFrame"), (8 * 1024 + 1, "FrameTooLarge"), (9 << 20, "FrameTooLarge")]
)
def test_an_impossible_size_ends_the_connection(world: World, size: int, code: str) -> None:
    """The frame itself is small: the size it names is checked like a payload's length."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), world.open(client)
    refer(client, session, 0, at, b"staged", size=size)
    client.pump()
    assert [message.code for message in client.pushed if isinstance(message, m.Failed)] == [code]


def test_a_damaged_reference_ends_the_connection(world: World) -> None:
    """A flipped bit is a network fault, not a wrong reference: the client sends it again over another connection."""
    client = Client(world.brokers[0])
    (lane, index, topic_id), session = stage(world, client, b"staged"), world.open(client)
    body = bytearray(reference_body(BatchReference(lane, 6, index, topic_id)))
    body[8] ^= 1
    client.send(batch_header(session_seq=0, low=0, lane=session.lane, session=session.session, count=2,
                             crc=payload_crc(b"staged"), length=32, flags=REFERENCE))  # fmt: skip
    client.send(body)
    client.pump()
    assert [message.code for message in client.pushed if isinstance(message, m.Failed)] == ["ChecksumMismatch"]


def test_without_space_in_the_log_it_is_sent_again(world: World) -> None:
    """Brokers fill up without a sequencer; a reference is then refused like a batch that carries its bytes."""
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"x" * 4_000), world.open(client)
    client.peer.credit.granted = 1 << 30
    sequence = 0
    while not client.acks and sequence < 40:
        refer(client, session, sequence, at, b"x" * 4_000)
        client.pump()
        sequence += 1
    assert 10 < sequence < 40
    assert outcomes(client) == [(sequence - 1, Outcome.BACKPRESSURE)]


# --- with replicas ----------------------------------------------------------------------------------------------------
class StagedWorld:
    """Batches staged in a topic of order 0 with three replicas; the jobs of broker 1 run when a test asks for it."""

    def __init__(self, path: Path) -> None:
        self.world = DiskWorld(path)
        self.jobs = Later()
        self.world.brokers[1].readers.disks._workers = self.jobs
        self.world.topic("zero", order=0)
        self.world.topic("t", order=5, replicas=0, durable_on=0)
        self.stager, self.publisher = Client(self.world.brokers[0]), Client(self.world.brokers[1])
        self.session = self.world.open(self.publisher)
        self._staging = opened(self.stager, "zero")
        self._staged = 0
        self.range: Range | None = None

    @property
    def broker(self) -> Any:
        """The broker that publishes by reference."""
        return self.world.brokers[1]

    def stage(self, count: int, size: int = 1_500, durable: bool = True) -> None:
        """Stage batches, each of its own bytes, and write them to disk."""
        for number in range(self._staged, self._staged + count):
            self.stager.batch(self._staging, number, payload(number, size), count=2)
            self.stager.pump()
            self._staged += 1
            if durable:
                self.sync()
        self.world.run(2, self.stager)

    def sync(self) -> None:
        """Copy everything that is staged to two disks."""
        [lane] = self.world.directory.lanes.all()
        if self.range is None:
            self.range = self.world.directory.ranges.open_range(lane.lane)
            assert self.range is not None
            self.world.hand.word(lane.lane, self.range.number)
        for replica in self.world.of(self.range)[:2]:
            replica.copy(self.range, self._staged, lane.region)
        self.world.brokers[0].poll()

    def refer(self, sequence: int, staged: int, size: int = 1_500, session: m.Opened | None = None) -> None:
        """Publish a staged batch by reference."""
        [lane] = self.world.directory.lanes.all()
        at = lane.lane, staged, id_of(self.world, "zero")
        refer(self.publisher, session or self.session, sequence, at, payload(staged, size))

    def published(self) -> list[bytes]:
        """The records of the topic."""
        self.world.run(3, self.publisher)
        return texts(self.world.fetch(self.stager, self.session.lane))


@pytest.fixture
def staged(tmp_path: Path) -> StagedWorld:
    return StagedWorld(tmp_path)


def test_only_durable_batches_are_published(staged: StagedWorld) -> None:
    """A staged batch that is not on disks yet may still be lost: the publisher tries again."""
    staged.stage(1, size=20, durable=False)
    staged.refer(0, 0, size=20)
    assert outcomes(staged.publisher) == [(0, Outcome.BACKPRESSURE)]
    staged.sync()
    staged.world.run(2)
    staged.refer(0, 0, size=20)
    assert staged.published() == [payload(0)]
    assert outcomes(staged.publisher) == [(0, Outcome.BACKPRESSURE), (0, Outcome.ORDERED)]


def test_a_broker_that_copies_batches_that_are_not_durable_is_detected(staged: StagedWorld) -> None:
    """The same with the bug injected: the batch is stored, so the test above can fail."""
    staged.stage(1, size=20, durable=False)
    with injected("reference-not-durable"):
        staged.refer(0, 0, size=20)
    staged.world.run(2, staged.publisher)
    assert outcomes(staged.publisher) == [(0, Outcome.ORDERED)]


def test_evicted_batches_are_read_on_a_worker_and_the_session_keeps_its_order(staged: StagedWorld) -> None:
    """Batches of the session wait for an earlier batch that is on disk, in either form; other sessions do not wait."""
    staged.stage(60)
    other = staged.world.open(staged.publisher)
    staged.refer(0, 3)
    staged.refer(1, 59)
    staged.publisher.batch(staged.session, 2, b"carried")
    staged.refer(3, 4)
    staged.refer(0, 58, session=other)
    staged.publisher.batch(other, 1, b"passes")
    waiting = staged.broker.admission.references.waiting
    assert staged.published() == [payload(58, 1_500), b"passes"]
    assert (waiting, len(staged.jobs.jobs)) == (4, 1)
    assert staged.broker.unsettled == 5  # its bytes are in the log already, but it has no entry

    staged.jobs.step()
    assert staged.published() == [
        payload(58, 1_500), b"passes", payload(3, 1_500), payload(59, 1_500), b"carried",
    ]  # fmt: skip
    staged.jobs.step()
    assert staged.published()[5:] == [payload(4, 1_500)]
    assert staged.broker.unsettled == 0
    assert staged.publisher.peer.credit.staging == 0


def test_one_job_reads_the_next_batches_of_a_session(staged: StagedWorld) -> None:
    """Consecutive batches on disk cost one turn of a worker, up to about a frame."""
    staged.stage(60)
    for sequence in range(9):
        staged.refer(sequence, sequence)
    rounds = 0
    while staged.jobs.jobs:
        staged.jobs.step()
        rounds += 1
    assert staged.published() == [payload(number, 1_500) for number in range(9)]
    assert rounds == 3  # the first alone, then as many as fit in 8 KiB


def test_a_connection_that_closes_leaves_nothing(staged: StagedWorld) -> None:
    """Waiting requests are dropped, space in the log is freed, and a job that ends later has no effect."""
    staged.stage(60)
    staged.refer(0, 3)
    staged.publisher.batch(staged.session, 1, b"carried")
    assert staged.broker.ingest.arriving == 1
    staged.publisher.connection.closed()
    assert (staged.broker.ingest.arriving, staged.broker.admission.references.waiting) == (0, 0)
    staged.jobs.step()
    assert staged.published() == []
    assert staged.broker.unsettled == 0


def test_credit_comes_back_when_a_batch_is_stored_and_not_before(staged: StagedWorld) -> None:
    """A client can't have more read for it than its credit, however slow the disk is."""
    staged.stage(60)
    granted = staged.publisher.peer.credit.granted
    sequence = 0
    while staged.publisher.peer.credit.received + 1_564 <= granted:
        staged.refer(sequence, sequence % 20)
        sequence += 1
    assert sequence > 4
    staged.world.run(5, staged.publisher)
    assert staged.publisher.peer.credit.granted == granted
    while staged.jobs.jobs:
        staged.jobs.step()
    staged.world.run(2, staged.publisher)
    assert staged.publisher.peer.credit.granted > granted


def test_a_file_that_cannot_be_read_now_is_tried_again_later(
    staged: StagedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a good copy there is no answer yet: the client sends the batch again, and its neighbors are published."""
    staged.stage(60)

    def fails(*_: object) -> None:
        raise Corrupt("no good copy", "wait for repair")

    with monkeypatch.context() as patch:
        patch.setattr("embarcadero.broker.disk_reads.Segments.fetch", fails)
        staged.refer(0, 3)
        staged.jobs.step()
    assert outcomes(staged.publisher) == [(0, Outcome.BACKPRESSURE)]
    staged.refer(0, 3)
    staged.jobs.step()
    assert staged.published() == [payload(3, 1_500)]


def test_requests_above_the_bound_of_a_connection_are_refused(
    staged: StagedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound counts batches, small ones too; a batch refused with its bytes frees its memory."""
    monkeypatch.setattr(references, "REFERENCES_WAITING_MAX", 2)
    staged.stage(60)
    staged.refer(0, 3)
    staged.refer(1, 4)
    staged.refer(2, 5)
    staged.publisher.batch(staged.session, 3, b"carried")
    assert outcomes(staged.publisher) == [(2, Outcome.BACKPRESSURE), (3, Outcome.BACKPRESSURE)]
    assert (staged.broker.ingest.arriving, staged.broker.admission.references.waiting) == (0, 2)


def test_a_reference_on_disk_with_another_checksum_is_refused(staged: StagedWorld) -> None:
    """Files are checked like memory; the ack of a durable batch reports the same."""
    staged.stage(60)
    [lane] = staged.world.directory.lanes.all()
    at = lane.lane, 3, id_of(staged.world, "zero")
    refer(staged.publisher, staged.session, 0, at, payload(4, 1_500))
    staged.jobs.step()
    assert faults(staged.publisher) == [(Outcome.NO_REFERENCE, ReferenceFault.DIFFERS)]


def test_a_durable_ack_waits_for_the_disks_of_the_topic(tmp_path: Path) -> None:
    """With WANT_DURABLE "stored" means durable, for batches by reference too."""
    world = DiskWorld(tmp_path)
    world.topic("zero", order=0, replicas=0, durable_on=0)
    range_ = world.topic("t", order=5)
    client = Client(world.brokers[0])
    at, session = stage(world, client, b"staged"), world.open(client)
    refer(client, session, 0, at, b"staged", flags=REFERENCE | WANT_DURABLE)
    world.run(3, client)
    assert outcomes(client) == []
    for replica in world.of(range_)[:2]:
        replica.copy(range_, 1)
    world.run(3, client)
    assert outcomes(client) == [(0, Outcome.ORDERED)]
