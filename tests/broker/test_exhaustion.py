"""What a broker and a sequencer do when something runs out: time for a frame, room for a topic, a peer's patience."""

from __future__ import annotations

import pytest

from embarcadero import limits
from embarcadero.config import load
from embarcadero.errors import FabricFull
from embarcadero.limits import FRAME_TIMEOUT_S, SEND_QUEUE_BYTES_MAX
from embarcadero.sequencer.sessions import NEVER
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


def _departed(world: World, opened: m.Opened) -> bool:
    """Whether the sequencer takes a session's publisher for gone."""
    table = world.sequencer.lanes[opened.lane].order.table
    row = table.row_of(opened.session)
    assert row is not None
    return int(table.departed_us[row]) != NEVER


def test_a_connection_of_many_sessions_has_few_in_mind_and_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that came first makes room, and is not taken for gone: its gaps keep their time."""
    monkeypatch.setattr(limits, "SESSIONS_PER_CONNECTION_MAX", 4)
    world = World()
    world.topic()
    client, broker = Client(world.brokers[0]), world.brokers[0]
    sessions = [world.open(client) for _ in range(12)]
    for opened in sessions:
        client.batch(opened, 0)
        world.run(2, client)
    assert len(client.connection.sessions) == len(broker._attached) == 4
    client.batch(sessions[0], 1)
    world.run(2, client)
    assert list(client.connection.sessions)[-1] == (sessions[0].lane, sessions[0].session)
    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED] * 13
    assert not any(_departed(world, opened) for opened in sessions)
    client.connection.closed()
    world.run(2)
    assert [_departed(world, opened) for opened in sessions] == [True] + [False] * 8 + [True] * 3
    assert not broker._attached


@pytest.mark.parametrize("together", [1, 3])
def test_sessions_that_ended_are_not_kept_in_mind(together: int) -> None:
    """Closed, fenced or never opened: their connection stays, and nothing of them does."""
    world = World()
    lane = world.topic()
    client, broker = Client(world.brokers[0]), world.brokers[0]
    closed, named = world.open(client), world.open(client, name="n")
    for opened in (closed, named):
        client.batch(opened, 0)
    world.run(3, client)
    assert len(broker._attached) == 2
    client.ask(m.CloseSession(lane=lane, session=closed.session))
    world.run(3, client)
    assert list(broker._attached) == [(lane, named.session)]
    world.open(Client(world.brokers[1]), name="n")
    for session in (named.session, *range(1_000, 1_020)):
        for sequence in range(1, 1 + together):
            client.batch(m.Opened(lane=lane, session=session, index=0, expected=0, low=0), sequence)
        world.run(3, client)
    last = [Outcome(int(ack["outcome"])) for ack in client.acks[2:]]
    assert last == [Outcome.FENCED] * together + [Outcome.UNKNOWN_SESSION] * 20 * together
    assert not broker._attached
    assert not client.connection.sessions


def test_a_detach_that_found_no_slot_does_not_undo_a_later_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that came back over another connection is there, whatever its broker still owed the sequencer."""
    world = World()
    world.topic()
    first, again = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(first)
    first.batch(opened, 0)
    world.run(2, first)
    with monkeypatch.context() as full:
        full.setattr(world.brokers[0].ingest, "stage_control", lambda _entry: None)
        first.connection.closed()
    again.batch(opened, 1)
    world.run(3, again)
    assert [Outcome(int(ack["outcome"])) for ack in again.acks] == [Outcome.ORDERED]
    assert not _departed(world, opened)
