"""What a broker and a sequencer do when something runs out: time for a frame, room for a topic, a peer's patience."""

from __future__ import annotations

import pytest

from embarcadero.config import load
from embarcadero.errors import FabricFull
from embarcadero.limits import FRAME_TIMEOUT_S, SEND_QUEUE_BYTES_MAX
from embarcadero.types import Outcome
from embarcadero.wire import messages as m
from embarcadero.wire.codec import batch_header, control_frame, payload_crc
from tests.broker.harness import Client, World


def _wait(world: World, seconds: float, *clients: Client) -> None:
    world.clock.us += int(seconds * 1_000_000)
    world.run(3, *clients)


def _header(opened: m.Opened, sequence: int, payload: bytes) -> bytes:
    return batch_header(
        session_seq=sequence, low=sequence, lane=opened.lane, session=opened.session, count=1,
        crc=payload_crc(payload), length=len(payload),
    )  # fmt: skip


@pytest.mark.parametrize("patience_s", [FRAME_TIMEOUT_S, 4.0])
def test_a_batch_that_never_ends_gives_its_room_back(patience_s: float) -> None:
    """A publisher that sends a byte now and then is hung up on; one that is slow but gets on is not."""
    world = World(config=load(flags={"broker.frame_timeout_s": str(patience_s)}))
    world.topic()
    slow, steady = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(slow)
    payload = bytes(1_000)
    slow.send(_header(opened, 0, payload))
    other = world.open(steady)
    for n in range(8):
        if not slow.connection.closing:
            slow.send(payload[:1])
        steady.send(_header(other, n, payload))
        _wait(world, patience_s / 4, slow, steady)
        steady.send(payload)
        _wait(world, patience_s / 4, slow, steady)
    assert slow.connection.closing
    failure = slow.pushed[-1]
    assert isinstance(failure, m.Failed)
    assert failure.code == "TimedOut"
    assert slow.connection.arriving is None
    assert [Outcome(int(ack["outcome"])) for ack in steady.acks] == [Outcome.ORDERED] * 8
    assert not steady.connection.closing


def test_a_subscriber_that_never_reads_is_given_no_more_than_its_share() -> None:
    """Fetches wait while what was answered is not taken; everybody else is served."""
    world = World()
    world.topic()
    writer, deaf = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(writer)
    writer.batch(opened, 0, bytes(8_000))
    world.run(6, writer)
    deaf.connection.blocked = True  # the socket is full
    for _ in range(200):
        deaf.send(_fetch(opened.lane))
    world.run(3, writer)
    assert deaf.connection.parked == 200
    assert sum(map(len, deaf.connection.take_output())) == 0
    assert len(world.fetch(writer, opened.lane, by="earliest").payloads) == 1
    deaf.connection.blocked = False
    world.run(1)
    assert sum(map(len, deaf.connection.take_output())) <= SEND_QUEUE_BYTES_MAX
    assert deaf.connection.parked == 0


def _fetch(lane: int) -> bytes:
    return control_frame(m.Fetch(lane=lane, by="earliest", max_bytes=1 << 20), 7)


def test_a_topic_that_finds_no_room_waits_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its publishers are told to come back; others go on; when there is room it works by itself."""
    world = World()
    world.topic("first")
    client = Client(world.brokers[0])
    opened = world.open(client, "first")
    host = type(world.memory.host("sequencer"))
    create, full = host.create, True

    def no_room(self: object, name: str, shape: object) -> object:
        if full and "/checkpoint-" in name:
            raise FabricFull(f"no room for region {name}", "make it larger")
        return create(self, name, shape)

    monkeypatch.setattr(host, "create", no_room)
    world.topic("second")
    request = client.ask(m.OpenSession(topic="second"))
    world.run(6, client)
    answer = client.answers[request]
    assert isinstance(answer, m.Failed)
    assert answer.code == "Backpressure"
    client.batch(opened, 0, b"others")
    world.run(6, client)
    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED]
    assert [(event, facts["topic"]) for event, facts in world.diary.warnings] == [("topic waits", "second")]
    full = False
    world.run(60)
    client.batch(world.open(client, "second"), 0, b"at last")
    world.run(6, client)
    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED] * 2
