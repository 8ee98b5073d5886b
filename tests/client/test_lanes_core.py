"""The cores that orders 0 and 1 use: a reader of many lanes, and a publisher pinned to one broker or without acks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embarcadero.client.arguments import Lookup
from embarcadero.client.lanes import LanesCore
from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.session import PublisherSettings
from embarcadero.client.subscriber import ReaderSettings
from embarcadero.errors import BadValue, UnknownTopic
from embarcadero.types import Gap, GapKind, Order, Outcome, Position, TopicLane
from embarcadero.wire import messages as m
from embarcadero.wire.codec import ACK, NO_ACK, FetchedReceived, decode_control, parse_batch_header
from tests.wire.samples import entries_for

TOPIC = 3
SILENT_US = 3_000_000


def lane(number: int, **fields: Any) -> TopicLane:
    return TopicLane(lane=number, topic=TOPIC, broker=number, incarnation=1, handle=number, **fields)


def reader(*lanes: TopicLane, **options: Any) -> LanesCore:
    start = Lookup(options.pop("by", "earliest"), options.pop("start", 0))
    core = LanesCore(ReaderSettings(silent_after_us=SILENT_US, **options), TOPIC, lanes, start)
    core.on_connected(Link(1, 0), 0)
    return core


def asked(core: Any) -> list[tuple[int, int, Any]]:
    """(connection, request, message) of all requests that go out now."""
    found = []
    for conn, buffers in core.take_output():
        found += [(conn, int.from_bytes(b[8:16], "little"), decode_control(b[16:])) for b in buffers if b[3] == 1]
    return found


def fetched(request: int, payloads: list[bytes], first: int, gap: Gap | None = None) -> FetchedReceived:
    entries = entries_for(payloads, first)
    entries["seq"] = entries["index"]
    following = gap.stop if gap else first + len(payloads)
    views = [memoryview(payload) for payload in payloads]
    return FetchedReceived(request, following, following, gap, entries, views)


def answer(core: LanesCore, questions: list[Any], number: int, payloads: list[bytes], first: int = 0,
           gap: Gap | None = None) -> None:  # fmt: skip
    """Answer the Fetch of one lane."""
    [(conn, request)] = [(c, r) for c, r, q in questions if isinstance(q, m.Fetch) and q.lane == number]
    core.on_fetched(conn, fetched(request, payloads, first, gap), 0)


def test_lanes_are_read_side_by_side_each_in_its_order() -> None:
    """Each lane has its own fetch; batches name their lane; lanes take turns."""
    core = reader(lane(10), lane(11))
    questions = asked(core)
    assert {q.lane for _, _, q in questions if isinstance(q, m.Fetch)} == {10, 11}
    answer(core, questions, 10, [b"a", b"b", b"c"])
    answer(core, questions, 11, [b"x", b"y", b"z"])
    taken = core.take_batches(4, 0)
    assert {batch.lane for batch in taken} == {10, 11}
    taken += core.take_batches(100, 0)
    for number, expected in ((10, [b"a", b"b", b"c"]), (11, [b"x", b"y", b"z"])):
        assert [bytes(batch.payload) for batch in taken if batch.lane == number] == expected
    assert core.positions() == {10: 3, 11: 3}


def test_new_lanes_are_requested_and_read_from_their_beginning() -> None:
    """The long poll names the highest known lane; a new lane is fetched from earliest, even after "latest"."""
    core = reader(lane(10), by="latest")
    [(conn, request, watch)] = [q for q in asked(core) if isinstance(q[2], m.GetLanes)]
    assert (watch.lane, watch.above) == (TOPIC, 10)
    core.on_control(conn, request, m.LanesAre(lane=TOPIC, lanes=[lane(12), lane(13, end=4, removed=True)]), 0)
    questions = asked(core)
    assert [(q.lane, q.by) for _, _, q in questions if isinstance(q, m.Fetch)] == [(12, "earliest")]
    assert [q.above for _, _, q in questions if isinstance(q, m.GetLanes)] == [13]


def test_an_ended_lane_is_reported_once_and_not_requested_again_until_a_seek() -> None:
    """END_OF_LANE comes as a typed gap."""
    core = reader(lane(10))
    answer(core, asked(core), 10, [b"a"])
    answer(core, asked(core), 10, [], 1, Gap(GapKind.END_OF_LANE, 1, 1))
    taken = core.take_batches(10, 0)
    assert [batch.gap and batch.gap.kind for batch in taken] == [None, GapKind.END_OF_LANE]
    core.on_timer(10_000_000)
    assert not [q for _, _, q in asked(core) if isinstance(q, m.Fetch)]
    core.seek("index", 0, 0, lane=10)
    assert [q.start for _, _, q in asked(core) if isinstance(q, m.Fetch)] == [0]


def test_a_filtered_reader_reaches_the_end_after_batches_of_other_partitions() -> None:
    """Filtered batches lie between its position and the end; without a filter that would be a hole."""
    for partitions, failed in (([1], False), (None, True)):
        core = reader(lane(10), partitions=partitions, by="index")
        for _ in range(2):
            answer(core, asked(core), 10, [], 0, Gap(GapKind.END_OF_LANE, 4, 4))
            if not failed:
                break
        assert (core.failed is not None) == failed
        assert core.ready == (0 if failed else 1)


def test_a_position_by_number_needs_an_existing_lane() -> None:
    """earliest and latest are for all lanes; an index or a seq for one."""
    core = reader(lane(10), lane(11))
    for wrong in ({"by": "index", "value": 1}, {"by": "seq", "value": 1}, {"by": "index", "value": 1, "lane": 99}):
        with pytest.raises(BadValue):
            core.seek(now_us=0, **wrong)
    asked(core)
    core.seek("latest", 0, 0)
    assert [(q.lane, q.by) for _, _, q in asked(core) if isinstance(q, m.Fetch)] == [(10, "latest"), (11, "latest")]
    with pytest.raises(BadValue, match="positions"):
        _ = core.position


def test_a_lost_link_is_replaced_for_all_lanes_and_a_deleted_topic_ends_the_reading() -> None:
    """Every request in flight on it is repeated elsewhere."""
    core = reader(lane(10), lane(11))
    asked(core)
    core.on_connected(Link(2, 0), 0)
    core.on_disconnected(1, 0)
    again = asked(core)
    assert {conn for conn, _, _ in again} == {2}
    assert len(again) == 3
    [(conn, request)] = [(c, r) for c, r, q in again if isinstance(q, m.GetLanes)]
    core.on_control(conn, request, m.Failed(code="UnknownTopic", message="gone"), 0)
    assert isinstance(core.failed, UnknownTopic)


# --- publishing ---
def publisher(order: int, links: int = 2, acks: bool = True) -> PublisherCore:
    """A publisher with an open session 7 and credit on all links."""
    settings = PublisherSettings(
        topic="t", window_bytes=1 << 20, resend_after_us=SILENT_US, delivery_timeout_us=60_000_000,
        order=order, acks=acks,
    )  # fmt: skip
    core = PublisherCore(settings)
    for number in range(1, links + 1):
        core.on_connected(Link(number, 0), 0)
        core.on_credit(number, 1 << 20, 0)
    [(conn, request, _)] = asked(core)
    core.on_control(conn, request, m.Opened(lane=TOPIC, session=7, index=0, expected=0, low=0), 0)
    return core


def sent(core: PublisherCore) -> list[tuple[int, int, int]]:
    """(connection, sequence, flags) of batches that go out now."""
    return [
        (conn, header.session_seq, header.flags)
        for conn, buffers in core.take_output()
        for header in (parse_batch_header(b) for b in buffers if len(b) == 64 and b[3] == 2)
    ]


def ack(sequence: int, outcome: Outcome, index: int = 0, real_lane: int = 0) -> np.ndarray:
    made = np.zeros(1, dtype=ACK)
    made["lane"], made["session"], made["session_seq"], made["outcome"] = TOPIC, 7, sequence, int(outcome)
    made["index"] = made["seq"] = index
    made["extra"] = real_lane
    return made


def test_a_position_names_the_lane_that_the_broker_named() -> None:
    """Orders 0 and 1: the ack's extra is the lane; batches are striped with order 0."""
    core = publisher(Order.NONE)
    batches = [core.add(b"x", 1, 0, 0, 0) for _ in range(2)]
    assert {conn for conn, _, _ in sent(core)} == {1, 2}
    core.on_acks(1, ack(0, Outcome.ORDERED, 5, 4_097), 0)
    assert batches[0].position == Position(4_097, 5, 5)


def test_order_1_stays_on_one_link_and_moves_all_unacked_batches_when_that_closes() -> None:
    """The session's order holds on each link, also when a batch has to wait."""
    core = publisher(Order.BROKER)
    for _ in range(4):
        core.add(b"x", 1, 0, 0, 0)
    out = sent(core)
    [home] = {conn for conn, _, _ in out}
    assert [sequence for _, sequence, _ in out] == [0, 1, 2, 3]
    core.on_acks(home, ack(0, Outcome.ORDERED, 0, 4_096), 0)
    core.on_acks(home, ack(2, Outcome.BACKPRESSURE), 0)
    core.add(b"x", 1, 0, 0, 0)
    assert sent(core) == []  # 4 may not overtake 2
    core.on_timer(1_000_000)
    assert [sequence for _, sequence, _ in sent(core)] == [2, 4]
    core.on_disconnected(home, 0)
    assert sent(core) == [(3 - home, sequence, 0) for sequence in (1, 2, 3, 4)]


def test_order_1_leaves_a_broker_that_has_been_full_for_long() -> None:
    """It continues elsewhere; batches in flight there are sent before the rest."""
    core = publisher(Order.BROKER)
    core.add(b"x", 1, 0, 0, 0)
    [(home, _, _)] = sent(core)
    core.on_full(home, 0)
    core.add(b"x", 1, 0, 0, 0)
    assert sent(core) == [(3 - home, 1, 0)]


def test_without_acks_a_batch_is_settled_when_sent_and_close_waits_for_the_brokers_to_have_it() -> None:
    """Batches carry NO_ACK; before the session is closed every link that carried one is pinged."""
    core = publisher(Order.NONE, acks=False)
    batches = [core.add(b"x", 1, 0, 0, 0) for _ in range(2)]
    assert {flags for _, _, flags in sent(core)} == {NO_ACK}
    assert [(batch.done, batch.position, batch.error) for batch in batches] == [(True, None, None)] * 2
    core.close(0)
    pings = asked(core)
    assert sorted(conn for conn, _, message in pings if isinstance(message, m.Ping)) == [1, 2]
    for conn, request, _ in pings:
        assert not core.closed
        core.on_control(conn, request, m.Pong(), 0)
    [(conn, request, message)] = asked(core)
    assert isinstance(message, m.CloseSession)
    core.on_control(conn, request, m.Done(), 0)
    assert core.closed


def test_new_lanes_are_read_from_the_requested_time() -> None:
    """A reader that waits for a future time waits for it in new lanes, too; after another seek they are read whole."""
    core = reader(lane(10))
    questions = asked(core)
    for where, expected in ((("time", 77), ("time", 77)), (("latest", 0), ("earliest", 0))):
        [(conn, request)] = [(c, r) for c, r, q in questions if isinstance(q, m.GetLanes)]
        number = max(core.lanes) + 1
        core.seek(*where, 0)
        asked(core)
        core.on_control(conn, request, m.LanesAre(lane=TOPIC, lanes=[lane(number)]), 0)
        questions = asked(core)
        [new] = [q for _, _, q in questions if isinstance(q, m.Fetch) and q.lane == number]
        assert (new.by, new.start) == expected


def test_a_paused_reader_requests_no_batches_in_any_lane() -> None:
    """Not in new lanes, either; it continues in all of them."""
    core = reader(lane(10), lane(11))
    questions = asked(core)
    core.pause()
    answer(core, questions, 10, [b"a"])
    answer(core, questions, 11, [b"x"])
    [(conn, request)] = [(c, r) for c, r, q in questions if isinstance(q, m.GetLanes)]
    core.on_control(conn, request, m.LanesAre(lane=TOPIC, lanes=[lane(12)]), 0)
    core.take_batches(100, 0)
    assert not [q for _, _, q in asked(core) if isinstance(q, m.Fetch)]
    core.resume(0)
    assert {q.lane for _, _, q in asked(core) if isinstance(q, m.Fetch)} == {10, 11, 12}
