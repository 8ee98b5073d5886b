"""Behavior of broker and sequencer when a resource runs out: time for a frame, memory for a topic, time for a peer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from embarcadero import limits
from embarcadero.broker import disk_reads
from embarcadero.broker.clients import SMALL_BYTES
from embarcadero.config import load
from embarcadero.errors import FabricFull
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import FRAME_TIMEOUT_S, SEND_QUEUE_BYTES_MAX
from embarcadero.sequencer.order.sessions import NEVER
from embarcadero.types import Outcome
from embarcadero.wire import messages as m
from embarcadero.wire.codec import batch_header, control_frame, payload_crc
from embarcadero.wire.schemas import encode_schema
from tests.broker.disks import DiskWorld, Later, fill, payload, texts
from tests.broker.harness import SIZES, Client, World
from tests.broker.test_tables import TableWorld


def _wait(world: World, seconds: float, *clients: Client) -> None:
    world.clock.us += int(seconds * 1_000_000)
    world.run(3, *clients)


def _header(opened: m.Opened, sequence: int, payload: bytes) -> bytes:
    return batch_header(
        session_seq=sequence, low=sequence, lane=opened.lane, session=opened.session, count=1,
        crc=payload_crc(payload), length=len(payload),
    )  # fmt: skip


@pytest.mark.parametrize("patience_s", [FRAME_TIMEOUT_S, 4.0])
def test_a_batch_that_never_ends_gives_its_memory_back(patience_s: float) -> None:
    """A publisher that sends a byte now and then is disconnected; a slow publisher that makes progress is not."""
    world = World(config=load(flags={"broker.frame_timeout_s": str(patience_s)}))
    world.topic()
    slow, steady = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(slow)
    payload = bytes(1_000)
    slow.send(_header(opened, 0, payload))
    other = world.open(steady)
    for n in range(8):
        if not slow.peer.closing:
            slow.send(payload[:1])
        steady.send(_header(other, n, payload))
        _wait(world, patience_s / 4, slow, steady)
        steady.send(payload)
        _wait(world, patience_s / 4, slow, steady)
    assert slow.peer.closing
    failure = slow.pushed[-1]
    assert isinstance(failure, m.Failed)
    assert failure.code == "TimedOut"
    assert not slow.peer.arriving
    assert [Outcome(int(ack["outcome"])) for ack in steady.acks] == [Outcome.ORDERED] * 8
    assert not steady.peer.closing


def test_a_subscriber_that_never_reads_is_given_no_more_than_its_share() -> None:
    """Its fetches wait until it reads the answers that were sent; all other readers are served."""
    world = World()
    world.topic()
    writer, deaf = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(writer)
    writer.batch(opened, 0, bytes(8_000))
    world.run(6, writer)
    deaf.peer.transport.socket_bytes = lambda: SEND_QUEUE_BYTES_MAX  # the socket is full
    for _ in range(200):
        deaf.send(_fetch(opened.lane))
    world.run(3, writer)
    assert deaf.connection.stopped
    assert sum(map(len, deaf.peer.take_output())) == 0
    assert len(world.fetch(writer, opened.lane, by="earliest").payloads) == 1
    deaf.peer.transport.socket_bytes = lambda: 0
    sizes = []
    while deaf.connection.stopped or not sizes:
        world.run(1)
        sizes.append(sum(map(len, deaf.peer.take_output())))
    assert sum(sizes) >= 200 * 8_000
    assert max(sizes) <= limits.UNREAD_PAUSE_BYTES + 10_000
    assert deaf.peer.parked == 0


def _fetch(lane: int) -> bytes:
    return control_frame(m.Fetch(lane=lane, by="earliest", max_bytes=1 << 20), 7)


# --- readers that do not read -----------------------------------------------------------------------------------------
_UNREAD = 1 << 20


def _crowd(readers: int, batches: int = 12, fetches: int = 10) -> tuple[World, Client, list[Client], m.Opened]:
    """A topic with some batches, and readers that requested all of them, several times, and never read.

    The writer has read all of it, once, promptly.
    """
    world = World(sizes=dataclasses.replace(SIZES, log_bytes=2 << 20, chunk_bytes=64 << 10))
    world.topic()
    writer = Client(world.brokers[0])
    opened = world.open(writer)
    for n in range(batches):
        writer.batch(opened, n, bytes(20_000))
    world.run(6, writer)
    world.fetch(writer, opened.lane, by="earliest")
    world.run(2, writer)
    world.brokers[0].unread.total_bytes = _UNREAD
    deaf = [Client(world.brokers[0]) for _ in range(readers)]
    for _ in range(fetches):
        for reader in deaf:
            reader.send(control_frame(m.Fetch(lane=opened.lane, by="earliest", max_bytes=32 << 20), 7))
    return world, writer, deaf, opened


def test_readers_that_do_not_read_hold_a_bounded_amount_in_total() -> None:
    """However many there are and whatever they request; a client that reads gets all of its answers meanwhile."""
    world, writer, deaf, opened = _crowd(readers=100)
    for index in range(1, 13):
        request = writer.ask(m.Fetch(lane=opened.lane, start=index, max_bytes=1))
        world.run(2, writer)
        assert len(writer.fetched[request].payloads) == 1
        assert sum(reader.peer.unread_bytes() for reader in deaf) <= _UNREAD
    assert world.brokers[0].unread.used <= _UNREAD
    assert not writer.peer.closing


def test_memory_of_a_reader_that_does_not_read_goes_to_waiting_readers() -> None:
    """Readers that do not read their answers are disconnected if others need the memory; the others are answered."""
    world, _, deaf, opened = _crowd(readers=100)
    late = Client(world.brokers[0])
    request = late.ask(m.Fetch(lane=opened.lane, by="earliest", max_bytes=32 << 20, wait_ms=30_000))
    for _ in range(400):
        _wait(world, limits.UNREAD_S_MAX / 10, late)
        if request in late.fetched:
            break
    assert request in late.fetched
    ended = [reader for reader in deaf if reader.peer.closing]
    assert ended
    assert all(reader.peer.aborted and not reader.peer.take_output() for reader in ended)
    assert world.brokers[0].counters.hung_up["TimedOut"] == len(ended)
    assert not late.peer.closing


def test_a_reader_that_does_not_read_is_left_alone_while_there_is_memory() -> None:
    """A slow link is allowed."""
    world, _, deaf, _ = _crowd(readers=1, fetches=3)
    _wait(world, 10 * limits.UNREAD_S_MAX)
    assert not deaf[0].peer.closing
    assert deaf[0].peer.unread_bytes() > 0


def test_answers_get_smaller_as_more_stays_unread() -> None:
    """Each gets an eighth of the free memory: the first ones do not take it all."""
    _, _, deaf, _ = _crowd(readers=8, fetches=1)
    sizes = [reader.peer.unread_bytes() for reader in deaf]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 20_000


def _wide(world: World) -> None:
    """A topic `wide` whose description is large."""
    columns = pa.schema([(f"column_{'x' * 60}_{n}", pa.int64()) for n in range(400)])
    world.directory.topics.create(
        "wide", order=5, partitions=1, replicas=0, durable_on=0, on_gap="fence", gap_timeout_ms=None,
        columns=encode_schema(columns),
    )  # fmt: skip
    world.run()


def _describe(client: Client, first: int = 1_000, count: int = 1_400) -> None:
    """One read of as many small requests as fit: each has a large answer."""
    requests = b"".join(bytes(control_frame(m.DescribeTopic(name="wide"), first + n)) for n in range(count))
    assert len(requests) < limits.SCRATCH_BYTES
    client.send(requests)


def _answered(client: Client, first: int = 1_000) -> list[int]:
    """The numbers of all such requests that were answered, in the order of their answers."""
    return [request for request in client.answers if request >= first]


def test_requests_wait_while_their_answers_are_unread() -> None:
    """One read of requests makes one connection hold little; when it reads, all answers come, once and in order."""
    world = World()
    _wide(world)
    client = Client(world.brokers[0])
    world.topic()
    opened = world.open(client)
    _describe(client)
    client.batch(opened, 0)  # queued after the requests
    world.run(3)
    largest = limits.CONTROL_BYTES_MAX
    assert limits.UNREAD_PAUSE_BYTES < client.peer.unread_bytes() < limits.UNREAD_PAUSE_BYTES + largest
    assert world.brokers[0].unread.used == client.peer.held_bytes > client.peer.unread_bytes()
    assert client.connection.stopped
    assert not client.peer.closing
    for _ in range(400):
        world.run(1, client)
    assert _answered(client) == list(range(1_000, 2_400))
    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED]
    assert not client.connection.stopped
    assert world.brokers[0].unread.holders == world.brokers[0].unread.used == 0


def test_requests_of_many_connections_hold_a_bounded_amount_in_total() -> None:
    """Each gets less as more stays unread. A connection that reads is served meanwhile: records, requests, acks."""
    world, writer, _, opened = _crowd(readers=0)
    _wide(world)
    deaf = [Client(world.brokers[0]) for _ in range(100)]
    for one in deaf:
        _describe(one)
    answer = max(map(len, deaf[0].peer._output))
    held = sum(one.peer.unread_bytes() for one in deaf)
    assert held <= _UNREAD + len(deaf) * (answer + SMALL_BYTES)
    for index in range(1, 13):
        _describe(writer, first=index * 10_000, count=3)
        request = writer.ask(m.Fetch(lane=opened.lane, start=index, max_bytes=1, wait_ms=30_000))
        writer.batch(opened, 11 + index)
        for _ in range(200):
            _wait(world, 0.2, writer)  # some connections that do not read are closed for it
            if request in writer.fetched and len(writer.acks) == 12 + index:
                break
        assert len(writer.fetched[request].payloads) == 1
        assert len(_answered(writer, index * 10_000)) == 3
        assert len(writer.acks) == 12 + index
        assert sum(one.peer.unread_bytes() for one in deaf) <= held
    assert any(one.peer.aborted for one in deaf)
    assert not writer.peer.closing


def test_unread_acks_count() -> None:
    """A publisher that never reads holds memory, too."""
    world = World()
    world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(200):
        client.batch(opened, sequence)
        world.run(1)
    world.run(3)
    unread = client.peer.unread_bytes()
    assert unread > SMALL_BYTES
    assert world.brokers[0].unread.used == unread
    client.pump()
    assert len(client.acks) == 200


# --- readers of disks and tables that do not read ---------------------------------------------------------------------
class _SlowReaders:
    """Many readers that ask for a byte and never read, and a reader that reads. Memory is for four batches."""

    def __init__(self, world: DiskWorld, lane: int, later: Later, **options: Any) -> None:
        self._world, self._lane, self._later, self._options = world, lane, later, options
        self._fast, self._broker, self.deaf = Client(world.brokers[1]), world.brokers[1], list[Client]()

    def run(self, batches: int) -> list[bytes]:
        """Answers of the reader that reads. The others arrive when it has read one batch."""
        self._broker.unread.total_bytes, self._broker.unread._batch_bytes = 8 * 1_024, 2 * 1_024
        found = [self._next(0)]
        self.deaf = [Client(self._broker) for _ in range(200)]
        for one in self.deaf:
            one.send(self._fetch(0))
        return found + [self._next(index) for index in range(1, batches)]

    def _fetch(self, start: int, request: int = 7) -> memoryview:
        ask = m.Fetch(lane=self._lane, start=start, max_bytes=1, wait_ms=30_000, **self._options)
        return memoryview(control_frame(ask, request))

    def _next(self, start: int) -> bytes:
        request = 1_000 + start
        self._fast.send(self._fetch(start, request))
        for _ in range(20):
            if request in self._fast.fetched:
                break
            if self._later.jobs:
                self._later.step()
            self._world.run(1, self._fast)
            assert sum(one.peer.held_bytes for one in self.deaf) <= self._broker.unread.total_bytes
        (text,) = texts(self._fast.fetched[request])
        return text


def test_reads_of_files_count_for_at_least_one_batch(tmp_path: Path) -> None:
    """Even a reader that asks for little gets a batch, which has to fit in memory before its file is read."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 120, size=1_500)
    readers = _SlowReaders(world, range_.lane, later)
    assert readers.run(20) == [payload(number, 1_500) for number in range(20)]
    assert 1 <= sum(one.peer.unread_bytes() > 1_500 for one in readers.deaf) <= 3


def test_reads_of_tables_count_for_at_least_one_batch(tmp_path: Path) -> None:
    """The same where brokers have no more records."""
    later = Later()
    tiered = TableWorld(tmp_path, later, size=1_500)
    tiered.tier(0, 30, "m1")
    tiered.forget(25)
    readers = _SlowReaders(tiered.world, tiered.lane, later, table=True)
    assert readers.run(20) == tiered.everything[1][:20]
    assert 1 <= sum(one.peer.unread_bytes() > 1_500 for one in readers.deaf) <= 3


def test_read_ahead_counts_for_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First for the largest batch, however little is requested; then for its real size. Above the limit none starts."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    broker = world.brokers[1]
    monkeypatch.setattr(disk_reads, "WARM_AHEAD_BYTES_MAX", 3 * broker.unread.most(1))
    for _ in range(30):
        Client(broker).ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1))
    while later.jobs:
        assert broker.readers.disks._ahead_bytes <= disk_reads.WARM_AHEAD_BYTES_MAX
        later.step()
    assert broker.readers.disks._ahead_bytes == len(broker.readers.disks._ahead) * (1_500 + ORDER.itemsize) > 0


def test_answers_from_files_keep_only_the_bytes_they_send(tmp_path: Path) -> None:
    """A reader of one partition out of many does not keep everything that was read for it."""
    world = DiskWorld(tmp_path)
    range_ = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(300):
        client.batch(opened, sequence, payload(sequence, 500), partition=int(sequence % 10 == 0))
        world.run(1, client)
        if sequence % 10 == 9:
            for replica in world.of(range_):
                replica.copy(range_, sequence + 1)
    reader = Client(world.brokers[1])
    reader.send(control_frame(m.Fetch(lane=range_.lane, max_bytes=20_000, partitions=[1], wait_ms=1_000), 7))
    (sent,) = [chunk for chunk in reader.peer._output if bytes(chunk) == payload(0, 500)]
    assert len(sent.obj if isinstance(sent, memoryview) else sent) == 500


def test_slow_answers_wait_while_they_are_unread(tmp_path: Path) -> None:
    """Looking up positions and ends reads files first: this does not start for a client that does not read."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 120, size=1_500)
    client, other = Client(world.brokers[1]), Client(world.brokers[1])
    client.peer.transport.socket_bytes = lambda: 0
    requests = [client.ask(m.GetTail(lane=range_.lane)) for _ in range(20)]
    client.peer.transport.socket_bytes = lambda: 2 * limits.UNREAD_PAUSE_BYTES
    for _ in range(20):
        if later.jobs:
            later.step()
        world.run(1)
    waiting = world.brokers[1].readers.disks.waiting
    assert 15 < waiting < 20
    assert world.brokers[1].readers.disks.running == 0
    request = other.ask(m.GetTail(lane=range_.lane))
    later.step()
    world.run(1, other)
    assert isinstance(other.answers[request], m.TailIs)
    client.peer.transport.socket_bytes = lambda: 0
    for _ in range(40):
        world.run(1, client)
        if later.jobs:
            later.step()
    assert all(isinstance(client.answers[request], m.TailIs) for request in requests)


# --- connections that hold memory that others need
# ---------------------------------------------------------------------
def _begun(world: World, host: str, number: int, size: int) -> Client:
    """A client that sent the header of a batch, and nothing of its payload."""
    client = Client(world.brokers[0])
    client.peer.host = host
    opened = world.open(client)
    client.send(_header(opened, 0, bytes(size)))
    return client


def test_slow_batches_keep_a_small_part_of_the_log() -> None:
    """A header reserves memory for its payload.

    The oldest stalled batches are aborted; other clients publish meanwhile.
    """
    world = World()
    world.topic()
    slow = [_begun(world, f"10.0.0.{n}", n, 7_000) for n in range(5)]
    honest = Client(world.brokers[0])
    opened = world.open(honest)
    assert not any(client.peer.closing for client in slow)
    _wait(world, 2 * limits.STALLED_S, honest, *slow)
    assert [client.peer.closing for client in slow] == [True] * 4 + [False]
    failure = slow[0].pushed[-1]
    assert isinstance(failure, m.Failed)
    assert failure.code == "TimedOut"
    for n in range(20):
        honest.batch(opened, n, bytes(5_000))
        world.run(4, honest)
    assert [Outcome(int(ack["outcome"])) for ack in honest.acks] == [Outcome.ORDERED] * 20


def test_an_address_has_a_share_of_the_log_for_batches_in_flight() -> None:
    """Beyond it, its batches are answered BACKPRESSURE; those of another address are accepted."""
    world = World()
    world.topic()
    first = [_begun(world, "10.0.0.1", n, 8_000) for n in range(4)]
    refused, other = _begun(world, "10.0.0.1", 4, 8_000), _begun(world, "10.0.0.2", 5, 8_000)
    refused.pump()
    assert all(client.peer.arriving for client in [*first, other])
    assert [Outcome(int(ack["outcome"])) for ack in refused.acks] == [Outcome.BACKPRESSURE]
    assert not refused.peer.closing


def _from(world: World, host: str, broker: int = 0) -> Client:
    client = Client(world.brokers[broker])
    client.peer.host = host
    return client


def test_stalled_batches_are_not_aborted_while_the_log_has_space() -> None:
    """A megabyte over a slow line takes a second, and harms no other client."""
    world = World()
    world.topic()
    slow = [_begun(world, f"10.0.0.{n}", n, 3_000) for n in range(5)]
    assert world.brokers[0].ingest.occupancy() < world.brokers[0].settings.water_low
    _wait(world, 2 * limits.STALLED_S, *slow)
    assert not any(client.peer.closing for client in slow)


def test_the_address_that_holds_most_loses_its_stalled_batches_first() -> None:
    """The batch that started first belongs to an honest, slow client."""
    world = World()
    world.topic()
    world.brokers[0].admission.arriving._stalled_chunks_max = 2
    honest = _begun(world, "10.0.0.1", 0, 7_000)
    _wait(world, limits.STALLED_S, honest)
    crowd = [_begun(world, "10.0.0.2", n, 7_000) for n in range(1, 5)]
    _wait(world, 2 * limits.STALLED_S, honest, *crowd)
    assert [client.peer.closing for client in crowd] == [True] * 3 + [False]
    assert not honest.peer.closing


def test_small_batches_count_for_the_share_of_an_address_too() -> None:
    """Sizes may be mixed: their sum counts."""
    world = World()
    world.topic()
    large = [_begun(world, "10.0.0.1", n, 8_000) for n in range(4)]
    small = _begun(world, "10.0.0.1", 4, 1_500)
    small.pump()
    assert [Outcome(int(ack["outcome"])) for ack in small.acks] == [Outcome.BACKPRESSURE]
    assert all(client.peer.arriving for client in large)


def test_an_address_has_a_share_of_a_topics_sessions() -> None:
    """However many brokers and connections it uses, however many sessions it abandons. Another address has space."""
    world = World()  # 64 sessions: 32 for an address
    world.topic()
    for number in range(32):
        client = _from(world, "10.0.0.1", number % 2)
        world.open(client, name=f"job-{number}")
        client.connection.closed()
    one_more = _from(world, "10.0.0.1")
    _wait(world, 2 * limits.ABANDONED_S, one_more)
    assert _refusal(world, one_more) == "TooMany"
    others = [_from(world, f"10.0.1.{number}") for number in range(32)]
    for other in others:
        world.open(other)
    world.open(one_more, name="job-7")


def test_simultaneous_session_requests_respect_the_share_too() -> None:
    """They used to be counted only when answered, so all requests of one read were granted."""
    world = World()
    world.topic()
    client = _from(world, "10.0.0.1")
    requests = [client.ask(m.OpenSession(topic="t")) for _ in range(40)]
    world.run(10, client)
    kinds = [type(client.answers[request]).__name__ for request in requests]
    assert kinds == ["Opened"] * 32 + ["Failed"] * 8


def test_a_connection_may_reopen_one_name_many_times() -> None:
    """Each open continues the last one, through any broker: there is always one session."""
    world = World(config=load(None, {"broker.sessions_per_connection": 3}))
    world.topic()
    clients = [_from(world, "10.0.0.1", broker) for broker in (0, 1)]
    for number in range(200):
        world.open(clients[number % 2], name="progress", at=number)
    (lane,) = world.sequencer.lanes.values()
    assert lane.order.table.used <= 2
    assert lane.order.table.peers.counts.total() == lane.order.table.used
    for number in range(200):
        world.open(clients[number % 2], name="taken over")
    for client in clients:
        world.open(client)
    assert all(len(client.peer.sessions) <= 3 for client in clients)


def test_sessions_of_deleted_topics_count_no_longer() -> None:
    """A long-lived connection uses many topics over time."""
    world = World(config=load(None, {"broker.sessions_per_connection": 3}))
    client = _from(world, "10.0.0.1")
    for _ in range(10):
        world.topic()
        world.open(client)
        world.directory.topics.delete("t")
        world.run(4, client)
        assert not client.peer.sessions
        assert not client.peer.lanes


def test_a_connection_that_opens_many_sessions_leaves_none_behind_when_it_closes() -> None:
    """The first ones count as abandoned while it is connected: unnamed sessions make space for new ones."""
    world = World(config=load(None, {"broker.sessions_per_connection": 4}))
    world.topic()
    greedy = _from(world, "10.0.0.1")
    for _ in range(32):
        world.open(greedy)
    _wait(world, 2 * limits.ABANDONED_S, greedy)
    for _ in range(28):
        world.open(_from(world, "10.0.0.1"))
    assert _refusal(world, _from(world, "10.0.0.1")) == "TooMany"
    greedy.connection.closed()
    world.run(3)
    _wait(world, 2 * limits.ABANDONED_S)
    world.open(_from(world, "10.0.0.1"))


def test_abandoned_sessions_do_not_fill_the_table() -> None:
    """Opened, never used, and abandoned: they make space for new ones. Sessions with a name or a connection stay."""
    world = World()
    world.topic()
    keeper = Client(world.brokers[0])
    kept, named = world.open(keeper), world.open(keeper, name="kept")
    for _ in range(62):
        leaver = Client(world.brokers[0])
        world.open(leaver)
        leaver.connection.closed()
    world.run(3)
    newcomer = Client(world.brokers[1])
    _wait(world, limits.ABANDONED_S, keeper)
    for _ in range(30):
        world.open(newcomer)
    keeper.batch(kept, 0)
    keeper.batch(named, 0)
    world.run(6, keeper)
    assert [Outcome(int(ack["outcome"])) for ack in keeper.acks] == [Outcome.ORDERED] * 2


def _refusal(world: World, client: Client) -> str:
    request = client.ask(m.OpenSession(topic="t"))
    world.run(6, client)
    answer = client.answers[request]
    return answer.code if isinstance(answer, m.Failed) else type(answer).__name__


def test_a_topic_without_space_waits_and_blocks_no_other_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its publishers get BACKPRESSURE; others continue; when there is space it works by itself."""
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
    """Whether the sequencer considers a session's publisher gone."""
    table = world.sequencer.lanes[opened.lane].order.table
    row = table.row_of(opened.session)
    assert row is not None
    return int(table.connections.departed_us[row]) != NEVER


def test_a_connection_of_many_sessions_tracks_few_and_all_continue() -> None:
    """The oldest session counts as abandoned until it sends again."""
    world = World(config=load(None, {"broker.sessions_per_connection": 4}))
    world.topic()
    client, broker = Client(world.brokers[0]), world.brokers[0]
    sessions = [world.open(client) for _ in range(12)]
    for opened in sessions:
        client.batch(opened, 0)
        world.run(2, client)
    assert len(client.peer.sessions) == len(broker.sessions.attached) == 4
    client.batch(sessions[0], 1)
    world.run(2, client)
    assert list(client.peer.sessions)[-1] == (sessions[0].lane, sessions[0].session)
    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED] * 13
    assert [_departed(world, opened) for opened in sessions] == [False] + [True] * 8 + [False] * 3
    client.connection.closed()
    world.run(2)
    assert all(_departed(world, opened) for opened in sessions)
    assert not broker.sessions.attached


@pytest.mark.parametrize("together", [1, 3])
def test_ended_sessions_are_not_remembered(together: int) -> None:
    """Closed, fenced or never opened: their connection stays, and nothing about them does."""
    world = World()
    lane = world.topic()
    client, broker = Client(world.brokers[0]), world.brokers[0]
    closed, named = world.open(client), world.open(client, name="n")
    for opened in (closed, named):
        client.batch(opened, 0)
    world.run(3, client)
    assert len(broker.sessions.attached) == 2
    client.ask(m.CloseSession(lane=lane, session=closed.session))
    world.run(3, client)
    assert list(broker.sessions.attached) == [(lane, named.session)]
    world.open(Client(world.brokers[1]), name="n")
    for session in (named.session, *range(1_000, 1_020)):
        for sequence in range(1, 1 + together):
            client.batch(m.Opened(lane=lane, session=session, index=0, expected=0, low=0), sequence)
        world.run(3, client)
    last = [Outcome(int(ack["outcome"])) for ack in client.acks[2:]]
    assert last == [Outcome.FENCED] * together + [Outcome.UNKNOWN_SESSION] * 20 * together
    assert not broker.sessions.attached
    assert not client.peer.sessions


def test_a_detach_without_a_slot_does_not_undo_a_later_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that reconnected counts as attached, whatever its broker still owed the sequencer."""
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
