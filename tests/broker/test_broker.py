"""Broker and sequencer together on incoherent memory: batches in, acks and reads out."""

from __future__ import annotations

import pyarrow as pa
import pytest

from embarcadero.broker.broker import Broker
from embarcadero.broker.context import BrokerContext
from embarcadero.env import Env
from embarcadero.errors import Backpressure, DiskFailed, DiskFull, EmbarcaderoError
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import EPOCHS_REGION
from embarcadero.limits import BACKPRESSURE_AFTER_S
from embarcadero.placement.topics import Topics
from embarcadero.types import NO_SESSION, GapKind, Outcome
from embarcadero.wire import messages as m
from embarcadero.wire.codec import control_frame, payload_crc
from embarcadero.wire.schemas import encode_schema
from tests.broker.harness import SIZES, Client, World


@pytest.fixture
def world() -> World:
    """Two brokers and an order-5 topic."""
    world = World()
    world.lane = world.topic()  # type: ignore[attr-defined]
    return world


def _outcomes(client: Client) -> list[tuple[int, Outcome]]:
    return [(int(ack["session_seq"]), Outcome(int(ack["outcome"]))) for ack in client.acks]


def _code(answer: object) -> str:
    assert isinstance(answer, m.Failed), answer
    assert answer.hint
    return answer.code


def test_a_batch_is_acked_with_its_position_and_read_back_there(world: World) -> None:
    """A reader of another broker finds the same bytes at the position in the ack."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    opened = world.open(writer)
    writer.batch(opened, 0, b"hello", count=3)
    world.run(6, writer)

    [ack] = writer.acks
    found = world.fetch(reader, opened.lane, by="index", start=int(ack["index"]))

    assert Outcome(int(ack["outcome"])) == Outcome.ORDERED
    assert [bytes(payload) for payload in found.payloads] == [b"hello"]
    assert int(found.entries["seq"][0]) == int(ack["seq"]) == 0
    assert int(found.entries["count"][0]) == 3


def test_a_session_striped_over_brokers_keeps_its_order(world: World) -> None:
    """Sequences sent to two brokers out of order are read in submission order."""
    clients = [Client(broker) for broker in world.brokers]
    opened = world.open(clients[0])
    for sequence in (3, 1, 5, 0, 4, 2):
        clients[sequence % 2].batch(opened, sequence, b"%d" % sequence)
        world.run(1)
    world.run(6, *clients)

    found = world.fetch(clients[1], opened.lane, by="earliest")

    assert [bytes(payload) for payload in found.payloads] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert sorted(_outcomes(clients[0]) + _outcomes(clients[1])) == [(s, Outcome.ORDERED) for s in range(6)]


def test_a_retry_through_another_broker_names_the_first_position(world: World) -> None:
    """The same stamped batch is stored once."""
    first, second = (Client(broker) for broker in world.brokers)
    opened = world.open(first)
    first.batch(opened, 0, b"once")
    world.run(6, first)
    second.batch(opened, 0, b"once")
    world.run(6, second)

    assert _outcomes(second) == [(0, Outcome.DUP_OF)]
    assert int(second.acks[0]["index"]) == int(first.acks[0]["index"])


def test_a_store_that_fails_during_a_read_is_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error; the broker does not treat the partial result as complete."""
    broker = world.brokers[0]
    made = world.directory.topics.create("late")

    def silent() -> None:
        raise Backpressure("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(broker._view.context.directory.topics, "trims", silent)
        with pytest.raises(Backpressure):
            broker.refresh()
    world.directory.elections.next_epoch()
    broker.refresh()

    assert made.lane in broker.store.lanes


@pytest.mark.parametrize("error", [DiskFull("the store is full", "make room"), DiskFailed("EIO", "check its disk")])
def test_a_store_whose_disk_fails_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch, error: EmbarcaderoError
) -> None:
    """Clients are informed of the error, and that it may pass: readers and publishers retry by themselves."""
    client = Client(world.brokers[0])
    lane = world.brokers[0].store.topics["t"].lane

    def fails(*_: object, **_options: object) -> None:
        raise error

    questions = [
        m.DescribeTopic(name="t"),
        m.OpenSession(topic="t"),
        m.GetLanes(lane=lane),
        m.Fetch(lane=lane, by="earliest", start=0, max_bytes=1_000, wait_ms=0),
        m.CreateTopic(name="another", replicas=0),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(world.directory, "revision", fails)
        for call in ("described", "create"):
            patch.setattr(world.directory.topics, call, fails)
        for question in questions:
            answer = client.answers[client.ask(question)]
            assert answer == m.Failed(code="Retriable", message=error.message, hint=error.hint)
    assert isinstance(client.answers[client.ask(m.DescribeTopic(name="t"))], m.TopicIs)


@pytest.mark.parametrize("gone", ["frontiers", "log"])
def test_a_log_that_is_being_removed_counts_as_removed(world: World, gone: str) -> None:
    """During a cleanup some regions still exist: readers that come then learn that payloads left memory."""
    member = world.brokers[1].member
    logs = BrokerLogs(world.memory.host("reader"), lambda: None)
    logs.update([member])
    world.memory.host("sequencer").remove(f"{member.region_prefix}/{gone}")
    assert logs.of(member.handle) is None


def test_only_a_sleeping_sequencer_is_woken(world: World) -> None:
    """No doorbell is rung while the sequencer polls by itself; afterwards every published batch rings it."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0)  # the session's first batch through a broker adds an entry of its own
    world.run(6, client)
    assert world.sequencer.awake(True)
    assert not world.sequencer.awake(True)
    world.bell.rings.clear()
    client.batch(opened, 1)
    assert world.bell.rings == []
    assert world.sequencer.awake(False)
    client.batch(opened, 2)
    assert world.bell.rings == ["sequencer"]
    world.run(6, client)
    assert _outcomes(client) == [(s, Outcome.ORDERED) for s in range(3)]


@pytest.mark.parametrize("batches", [1, 3])
def test_no_ack_relies_on_a_sequencer_after_a_later_epoch_opened(world: World, batches: int) -> None:
    """Its results are present and valid, yet a successor may decide otherwise."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0)
    world.run(6, client)
    for sequence in range(1, 1 + batches):
        client.batch(opened, sequence)
    assert world.sequencer.round() == batches
    successor = world.memory.host("successor")
    epochs = EpochTable(successor, successor.attach(EPOCHS_REGION, writable=True))
    epochs.open(world.sequencer.epoch + 1)
    for broker in world.brokers:
        broker.poll()
    client.pump()
    assert _outcomes(client) == [(0, Outcome.ORDERED)]


def test_other_bytes_under_a_used_sequence_are_a_conflict(world: World) -> None:
    """A sequence can't be used twice for different batches."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0, b"first")
    client.batch(opened, 0, b"other")
    world.run(6, client)

    assert _outcomes(client) == [(0, Outcome.ORDERED), (0, Outcome.CONFLICT)]


def test_a_session_that_was_never_opened_is_refused(world: World) -> None:
    """Unknown sessions get UNKNOWN_SESSION, also the session number that means "none"."""
    client = Client(world.brokers[0])
    opened = m.Opened(lane=world.lane, session=77, index=0, expected=0, low=0)  # type: ignore[attr-defined]
    client.batch(opened, 0)
    client.batch(opened, 0, session=NO_SESSION)
    world.run(6, client)

    assert sorted(_outcomes(client)) == [(0, Outcome.UNKNOWN_SESSION)] * 2


def test_an_unknown_lane_is_refused_and_the_connection_lives(world: World) -> None:
    """A batch for a topic that does not exist is answered; the next one works."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0, lane=999)
    client.batch(opened, 0)
    world.run(6, client)

    assert _outcomes(client) == [(0, Outcome.UNKNOWN_TOPIC), (0, Outcome.ORDERED)]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"crc": 1}, "ChecksumMismatch"),
        ({"partition": 9}, "BadFrame"),
        ({"count": 0}, "BadFrame"),
        ({"low": 5}, "BadFrame"),
    ],
)
def test_malformed_input_ends_the_connection_with_a_typed_error_and_affects_no_other_client(
    world: World, fields: dict[str, int], code: str
) -> None:
    """The peer gets the reason; another client's batch goes through; nothing from the bad client is stored."""
    bad, good = Client(world.brokers[0]), Client(world.brokers[0])
    opened = world.open(good)
    bad.batch(opened, 0, b"bad", **fields)
    bad.pump()
    good.batch(opened, 0, b"good")
    world.run(6, good)

    assert bad.peer.closing
    assert _code(bad.pushed[-1]) == code
    assert _outcomes(good) == [(0, Outcome.ORDERED)]
    assert [bytes(p) for p in world.fetch(good, opened.lane, by="earliest").payloads] == [b"good"]


def test_a_batch_beyond_credit_ends_the_connection(world: World) -> None:
    """A client promises to stay within its credit; a client that breaks this promise is disconnected."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    payload = bytes(8000)
    client.peer.credit.granted = 8000
    client.batch(opened, 0, payload)
    client.pump()

    assert _code(client.pushed[-1]) == "OverCredit"


def test_a_batch_above_the_size_limit_is_refused_before_memory_is_taken(world: World) -> None:
    """The header alone is enough to refuse."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.peer.credit.granted = 1 << 30
    client.batch(opened, 0, bytes(SIZES.chunk_bytes + 1))
    client.pump()

    assert _code(client.pushed[-1]) == "FrameTooLarge"


def test_nothing_works_before_the_hello(world: World) -> None:
    """Batches and requests of a client that sent no hello are refused."""
    client = Client(world.brokers[0], greet=False)
    client.send(control_frame(m.ListTopics(), 1))
    client.pump()

    assert client.peer.closing
    assert _code(client.pushed[-1]) == "BadFrame"


def test_a_client_of_another_version_is_informed(world: World) -> None:
    """The message names the versions of both sides."""
    client = Client(world.brokers[0], greet=False)
    client.ask(m.Hello(versions=[99]))

    assert _code(client.pushed[-1]) == "BadVersion"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"by": "index", "start": 10_000}, "FuturePosition"),
        ({"by": "seq", "start": 10_000}, "FuturePosition"),
        ({"read": "latest"}, "BadValue"),
        ({"read": "dirty"}, "BadValue"),
        ({"by": "mood"}, "BadValue"),
        ({"max_bytes": 0}, "BadFrame"),
        ({"wait_ms": 10**9}, "BadFrame"),
        ({"lane": 999}, "UnknownTopic"),
    ],
)
def test_a_bad_fetch_is_answered_and_the_connection_lives(world: World, options: dict[str, object], code: str) -> None:
    """Each mistake has its own error; the next request is answered."""
    client = Client(world.brokers[0])
    asked = {"lane": world.lane, "max_bytes": 1000} | options  # type: ignore[attr-defined]
    request = client.ask(m.Fetch(**asked))
    again = client.ask(m.Ping())
    client.pump()

    assert _code(client.answers[request]) == code
    assert isinstance(client.answers[again], m.Pong)


def test_a_fetch_at_the_end_waits_for_the_next_batch(world: World) -> None:
    """A long poll is answered when there is a batch, not before."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    opened = world.open(writer)
    request = reader.ask(m.Fetch(lane=opened.lane, by="latest", max_bytes=1000, wait_ms=5_000))
    world.run(6, reader)
    before = request in reader.fetched
    writer.batch(opened, 0, b"news")
    world.run(6, reader)

    assert not before
    assert [bytes(payload) for payload in reader.fetched[request].payloads] == [b"news"]


def test_a_fetch_that_times_out_is_answered_empty(world: World) -> None:
    """No reader waits without end."""
    reader = Client(world.brokers[0])
    request = reader.ask(m.Fetch(lane=world.lane, by="latest", max_bytes=1000, wait_ms=100))  # type: ignore[attr-defined]
    world.run(10, reader)

    assert reader.fetched[request].payloads == []


def test_a_reader_gets_only_the_partitions_it_asked_for(world: World) -> None:
    """Filtering is by entry; the position moves past the other partitions."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(8):
        client.batch(opened, sequence, b"%d" % sequence, partition=sequence % 4)
    world.run(6, client)

    found = world.fetch(client, opened.lane, by="earliest", partitions=[1, 3])

    assert [bytes(payload) for payload in found.payloads] == [b"1", b"3", b"5", b"7"]
    assert found.next_index == found.tail_index


def test_a_fetch_by_seq_finds_the_batch_that_holds_the_record(world: World) -> None:
    """Floor search: any record of a batch leads to the batch."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(3):
        client.batch(opened, sequence, b"%d" % sequence, count=10)
    world.run(6, client)

    found = [world.fetch(client, opened.lane, by="seq", start=seq).payloads[0] for seq in (0, 9, 10, 29)]

    assert [bytes(payload) for payload in found] == [b"0", b"0", b"1", b"2"]


def test_batches_evicted_from_memory_are_one_trimmed_gap_and_the_rest_follows_in_order(world: World) -> None:
    """A reader that is too late learns how much it missed, and continues."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(200):
        client.batch(opened, sequence, b"%04d" % sequence + bytes(996))
        world.run(1, client)
    world.run(6, client)

    found = world.fetch(client, opened.lane, by="index", start=0)
    after = world.fetch(client, opened.lane, by="index", start=found.next_index)
    numbers = [int(bytes(payload[:4])) for payload in after.payloads]

    assert found.gap.kind == GapKind.TRIMMED
    assert found.gap.start == 0
    assert found.gap.stop == found.next_index > 0
    assert numbers == list(range(numbers[0], 200))
    assert world.fetch(client, opened.lane, by="earliest").next_index == after.next_index


def test_the_tail_reports_the_end_and_the_start(world: World) -> None:
    """Tail after an ack includes the acked batch."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0, count=5)
    world.run(6, client)
    request = client.ask(m.GetTail(lane=opened.lane))

    tail = client.answers[request]

    assert isinstance(tail, m.TailIs)
    assert (tail.seq, tail.index) == (5, int(client.acks[0]["index"]) + 1)
    assert (tail.start_index, tail.start_seq) == (0, 0)


def test_a_dead_broker_s_batches_are_ordered_and_served_by_others(world: World) -> None:
    """Batches that a broker published before it died are not lost; its new incarnation has new regions."""
    doomed = Client(world.brokers[0])
    opened = world.open(doomed)
    doomed.batch(opened, 0, b"last words")
    world.brokers.pop(0)
    world.brokers.insert(0, world.start_broker(0))
    world.run(10)
    reader = Client(world.brokers[1])
    new = Client(world.brokers[0])
    new.batch(opened, 1, b"next")
    world.run(10, new)

    found = world.fetch(reader, opened.lane, by="earliest")

    assert [bytes(payload) for payload in found.payloads] == [b"last words", b"next"]
    assert _outcomes(new) == [(1, Outcome.ORDERED)]


def test_a_replaced_incarnation_learns_that_it_is_deposed(world: World) -> None:
    """A zombie stops by itself and sends no more acks."""
    zombie = world.brokers[0]
    client = Client(zombie)
    opened = world.open(client)
    world.brokers[0] = world.start_broker(0)
    world.run(10)
    client.batch(opened, 0)
    for _ in range(5):
        world.clock.us += 100_000
        world.sequencer.round()
        zombie.poll()
    client.pump()

    assert zombie.deposed
    assert client.acks == []


def test_an_incarnation_that_is_dead_keeps_its_regions_until_it_is_removed(world: World) -> None:
    """Readers may still need them."""
    late = world.directory.members.register(1, "127.0.0.1", 9093, 1)
    world.directory.members.mark_dead(late.broker, late.incarnation)
    fabric = world.memory.host("host-late")
    env = Env(world.clock, world.bell)
    broker = Broker(BrokerContext(env, fabric, world.directory, late, world.sizes, world.config))
    assert broker.deposed
    assert fabric.exists(f"{late.region_prefix}/pending")


def test_a_full_broker_grants_no_credit_reports_backpressure_and_recovers() -> None:
    """With the sequencer stalled, credit stops at the mark; after 10 s clients see it; then publishing resumes."""
    world = World(brokers=1)
    world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    broker = world.brokers[0]
    sent = 0
    for sequence in range(200):
        if client.credit - client.peer.credit.received < 1064:
            break
        client.batch(opened, sequence, bytes(1000))
        sent += 1
        broker.poll()
        client.pump()
    stalled_credit = client.credit
    world.clock.us += int(BACKPRESSURE_AFTER_S * 1_000_000) + 1
    broker.poll()
    broker.poll()
    client.pump()
    reported = client.full
    world.run(20, client)

    assert reported
    assert sent < 200
    assert client.credit > stalled_credit
    assert sum(outcome == Outcome.ORDERED for _, outcome in _outcomes(client)) > 0


def test_a_pending_ring_that_is_full_refuses_batches_and_loses_nothing() -> None:
    """Beyond its slots a broker answers BACKPRESSURE, and control entries still fit."""
    world = World(brokers=1)
    world.topic(order=2)
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.peer.credit.granted = 1 << 30
    for sequence in range(SIZES.pending_slots * 2):
        client.batch(opened, sequence, b"%d" % sequence)
    other = Client(world.brokers[0])
    request = other.ask(m.OpenSession(topic="t"))
    world.run(20, client, other)
    outcomes = _outcomes(client)
    stored = {s for s, outcome in outcomes if outcome == Outcome.ORDERED}
    found = world.fetch(client, opened.lane, by="earliest")

    assert isinstance(other.answers[request], m.Opened)
    assert len(outcomes) == SIZES.pending_slots * 2
    assert {outcome for _, outcome in outcomes} == {Outcome.ORDERED, Outcome.BACKPRESSURE}
    assert {int(bytes(payload)) for payload in found.payloads} == stored


def test_a_client_cut_in_the_middle_of_a_batch_leaves_nothing_behind(world: World) -> None:
    """Half a batch is not stored, and its memory is freed."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    before = world.brokers[0].ingest.used_slots
    payload = b"x" * 5000
    client.batch(opened, 0, payload[:2000], length=5000, crc=payload_crc(payload))
    client.connection.closed()
    world.run(10)
    reader = Client(world.brokers[1])
    found = world.fetch(reader, opened.lane, by="earliest")

    assert found.payloads == []
    assert world.brokers[0].ingest.used_slots == before
    assert world.brokers[0].ingest.log.occupied() == 0


def test_members_are_pushed_when_brokers_come_and_go(world: World) -> None:
    """Clients learn of new brokers without asking."""
    client = Client(world.brokers[0])
    world.brokers.append(world.start_broker(2))
    world.run(10, client)

    pushed = [message for message in client.pushed if isinstance(message, m.MembersAre)]

    assert sorted(address.broker for address in pushed[-1].brokers) == [0, 1, 2]


def test_a_broker_that_leaves_accepts_only_batches_within_granted_credit() -> None:
    """Clients are informed. No more credit or sessions are granted; batches that still arrive are settled and acked."""
    world = World(brokers=2)
    world.topic()
    leaving = world.brokers[0]
    client = Client(leaving)
    opened = world.open(client)
    client.batch(opened, 0)
    leaving.leave()
    granted = client.credit
    client.batch(opened, 1)
    assert leaving.unsettled > 0
    refused = client.ask(m.OpenSession(topic="t"))
    world.run(6, client)

    announced = [message for message in client.pushed if isinstance(message, m.MembersAre)]
    assert [address.broker for address in announced[-1].brokers] == [1]
    assert isinstance(client.answers[refused], m.Failed)
    assert client.answers[refused].code == "Retriable"
    assert [int(ack["outcome"]) for ack in client.acks] == [Outcome.ORDERED, Outcome.ORDERED]
    assert (leaving.unsettled, client.credit) == (0, granted)


def test_a_publisher_of_a_deleted_topic_has_no_effect_on_a_new_topic_of_the_same_name(world: World) -> None:
    """Session handles start again there: the handle that it wants to continue belongs to another session."""
    stale, holder = Client(world.brokers[0]), Client(world.brokers[1])
    before = world.open(stale, name="job")
    stale.ask(m.DeleteTopic(name="t"))
    world.topic()
    opened = world.open(holder, name="job")
    request = stale.ask(m.OpenSession(topic="t", name="job", resume=before.session, lane=before.lane))
    holder.batch(opened, 0)
    world.run(6, stale, holder)

    assert (opened.session, opened.lane != before.lane) == (before.session, True)
    assert stale.answers[request].code == "UnknownSession"
    assert [int(ack["outcome"]) for ack in holder.acks] == [Outcome.ORDERED]


def test_unknown_versions_of_a_schema_are_refused(world: World) -> None:
    """Batches of known versions are accepted, others refused one by one; the connection stays."""
    columns = [pa.schema([(name, pa.int8()) for name in names]) for names in ("a", "ab")]
    world.topic("typed", columns=encode_schema(columns[0]))
    client = Client(world.brokers[0])
    typed, raw = world.open(client, "typed"), world.open(client)
    for sequence, version in enumerate((1, 0, 2)):
        client.batch(typed, sequence, schema=version)
    client.batch(raw, 0, schema=1)
    world.directory.topics.alter(m.AlterTopic(name="typed", columns=encode_schema(columns[1])))
    client.batch(typed, 1, schema=2)  # before the broker has polled for changes
    client.batch(typed, 2, schema=1)
    world.run(6, client)

    refused = [(int(ack["session_seq"]), int(ack["lane"])) for ack in client.acks if ack["outcome"] == 24]
    assert refused == [(1, typed.lane), (2, typed.lane), (0, raw.lane)]
    assert [seq for seq, outcome in _outcomes(client) if outcome == Outcome.ORDERED] == [0, 1, 2]


def test_partitions_added_a_moment_ago_are_taken(world: World) -> None:
    """A broker that has not yet polled for changes does so before it refuses."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    request = client.ask(m.AlterTopic(name="t", partitions=8))
    client.batch(opened, 0, partition=7)
    world.run(6, client)

    answer = client.answers[request]
    assert isinstance(answer, m.TopicIs)
    assert answer.topic.partitions == 8
    assert _outcomes(client) == [(0, Outcome.ORDERED)]
    assert _code(client.answers[client.ask(m.AlterTopic(name="t", order=2))]) == "BadValue"
    assert _code(client.answers[client.ask(m.AlterTopic(name="missing", partitions=2))]) == "UnknownTopic"


def test_a_deposed_sequencer_is_no_reason_to_refuse_a_position(world: World) -> None:
    """A batch of the next epoch may lie beyond the end that an old epoch knows: the reader has to ask again."""
    client = Client(world.brokers[0])
    lane = world.open(client).lane
    assert _code(world.fetch(client, lane, by="index", start=99)) == "FuturePosition"
    world.sequencer.leadership.epochs.open(world.directory.elections.next_epoch())
    assert _code(world.fetch(client, lane, by="index", start=99)) == "Retriable"


def test_an_election_does_not_make_a_broker_read_the_store_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker follows the next epoch without reading topics and members, which did not change."""
    world = World()
    world.topic()
    world.run()
    looked = list[str]()
    before = world.brokers[0].epoch.number
    monkeypatch.setattr(Topics, "trims", lambda _self: looked.append("trims") or {})
    world.restart_sequencer()
    world.run(20)

    assert world.brokers[0].epoch.number > before
    assert looked == []


def test_the_order_of_a_session_comes_from_the_sequencer(world: World) -> None:
    """Order 2: weak by default, strong on request. Order 5: strong, and nothing else is accepted."""
    world.topic("total", order=2)
    client = Client(world.brokers[0])
    orders = [world.open(client, "total", order=order).order for order in (None, 2, 5)]
    assert orders == [2, 2, 5]
    assert [world.open(client, "t", order=order).order for order in (None, 5)] == [5, 5]
    for topic, order in (("t", 2), ("total", 0), ("total", 7)):
        refused = client.answers[client.ask(m.OpenSession(topic=topic, order=order))]
        assert isinstance(refused, m.Failed)
        assert refused.code == "BadValue"
