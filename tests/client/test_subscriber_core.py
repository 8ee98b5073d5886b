"""The subscriber's core against a cluster in memory: every batch once, in order, with right bytes, or a typed gap."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.client.results import Batch
from embarcadero.errors import BadFrame, ChecksumMismatch, FuturePosition
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import FETCH_ENTRIES_MAX
from embarcadero.types import EntryKind, Gap, GapKind
from embarcadero.wire import messages as m
from embarcadero.wire.codec import FetchedReceived, payload_crc
from tests.client.fake_cluster import FakeCluster, Stored, World, subscriber_core

SILENT_US = 3_000_000


def make_world(wires: int = 1, records: int = 0, **options: Any) -> World:
    core = subscriber_core(silent_after_us=SILENT_US, **options)
    world = World(core, FakeCluster(), wires)
    for n in range(records):
        world.cluster.put(b"%d" % n, count=n % 3 + 1)
    return world


def drain(world: World, most: int = 1000) -> list[Batch]:
    taken: list[Batch] = []
    while True:
        world.settle()
        found = world.core.take_batches(most, world.now)
        world.collect()
        world.settle()  # a damaged batch is requested once more
        if not found and not world.core.ready:
            return taken
        taken += found


def payloads(batches: list[Batch]) -> list[bytes]:
    return [bytes(batch.payload) for batch in batches]


def questions(world: World, number: int = 1) -> list[m.Fetch]:
    return [q for q in world.wires[number].far.questions if isinstance(q, m.Fetch)]


def test_all_batches_come_once_in_order() -> None:
    """Batches in the log and later ones are delivered with their positions."""
    world = make_world(records=5)
    first = drain(world)
    world.cluster.put(b"later")
    later = drain(world)
    assert payloads(first + later) == [b"0", b"1", b"2", b"3", b"4", b"later"]
    assert [(b.index, b.seq, b.count) for b in first + later] == [
        (0, 0, 1), (1, 1, 2), (2, 3, 3), (3, 6, 1), (4, 7, 2), (5, 9, 1),
    ]  # fmt: skip
    assert world.core.position == 6


def test_reading_starts_at_an_index_a_seq_the_earliest_or_the_latest() -> None:
    """Each way to give a position leads to it; a seq leads to the batch that holds it."""
    starts = {("index", 3): b"3", ("seq", 5): b"2", ("earliest", 0): b"0", ("latest", 0): b"new"}
    for (by, start), expected in starts.items():
        world = make_world(records=5, by=by, start=start)
        world.settle()
        world.cluster.put(b"new")
        assert payloads(drain(world))[0] == expected


def test_latest_is_fixed_at_the_first_answer() -> None:
    """Batches ordered after the subscriber got its position are not missed when the link then breaks."""
    world = make_world(records=3, by="latest")
    world.settle()
    assert world.core.position == 3
    world.cut(1)
    world.cluster.put(b"between")
    world.connect()
    assert payloads(drain(world)) == [b"between"]


def test_a_position_is_unknown_until_the_cluster_reports_it() -> None:
    """A start by seq has no index before the first answer."""
    world = make_world(wires=0, records=3, by="seq", start=1)
    assert world.core.position is None
    world.connect()
    world.settle()
    assert world.core.position == 1


def test_position_counts_taken_batches_not_fetched_ones() -> None:
    """Prefetched batches do not move the reader's position."""
    world = make_world(records=5)
    world.settle()
    assert [b.index for b in world.core.take_batches(2, world.now)] == [0, 1]
    assert world.core.position == 2


def test_seek_drops_prefetched_batches() -> None:
    """After a seek the next batch is the requested one, and an answer to the old request is ignored."""
    world = make_world(records=5)
    world.settle()
    world.core.seek("index", 4, world.now)
    world.collect()
    world.cluster.put(b"5")
    assert payloads(drain(world)) == [b"4", b"5"]


def test_prefetch_is_bounded() -> None:
    """Without a consumer the buffer stops growing, and fetching continues once it is emptied."""
    world = make_world(max_bytes=100)
    for n in range(50):
        world.cluster.put(b"%02d" % n * 20)
    world.settle()
    asked = len(questions(world))
    assert 2 <= asked <= 4
    world.advance(SILENT_US * 3)
    assert len(questions(world)) == asked
    assert len(drain(world)) == 50


def test_a_lost_link_is_replaced_at_the_same_index() -> None:
    """The answer that was on the wire is requested again elsewhere; nothing is missed or repeated."""
    world = make_world(wires=2, records=3)
    world.outward(1)
    world.cut(1)
    assert payloads(drain(world)) == [b"0", b"1", b"2"]


def test_a_silent_link_is_given_up() -> None:
    """No answer, not even to a ping: the next link gets the request."""
    world = make_world(wires=2, records=3)
    world.wires[1].far.mute = True
    world.run(lambda: 1 not in world.wires)
    assert payloads(drain(world)) == [b"0", b"1", b"2"]


def test_a_long_poll_that_ends_empty_is_repeated() -> None:
    """An idle log is not a silent broker."""
    world = make_world()
    world.settle()
    for _ in range(3):
        world.wires[1].far.serve_parked(over=True)
        world.settle()
    assert len(questions(world)) == 4
    world.cluster.put(b"x")
    assert payloads(drain(world)) == [b"x"]


def test_a_damaged_payload_is_requested_once_more_from_another_broker() -> None:
    """Wrong bytes are never delivered; the other broker's copy is correct."""
    world = make_world(wires=2, records=3)
    world.wires[1].far.damage = 2
    assert payloads(drain(world)) == [b"0", b"1", b"2"]
    assert world.core.failed is None
    assert len(questions(world, 2)) >= 1


def test_a_payload_damaged_twice_is_an_error_after_the_good_ones() -> None:
    """Batches before the damage are delivered; then there is a typed error, until the reader seeks past it."""
    world = make_world(records=3)
    world.cluster.log[1].payload = b"X"
    assert payloads(drain(world)) == [b"0"]
    assert isinstance(world.core.failed, ChecksumMismatch)
    world.core.seek("index", 2, world.now)
    world.collect()
    assert payloads(drain(world)) == [b"2"]


def test_a_hole_in_the_record_numbers_is_never_passed_on() -> None:
    """A broker that leaves out a batch is asked once more, and then it is an error."""
    world = make_world(records=3)
    world.cluster.log[1].count += 1
    assert payloads(drain(world)) == [b"0", b"1"]
    assert isinstance(world.core.failed, BadFrame)


def test_trimmed_positions_come_as_a_gap() -> None:
    """A reader below the start of the log gets a typed gap, then the remaining batches."""
    world = make_world(records=5)
    world.cluster.start_index = 3
    batches = drain(world)
    assert batches[0].gap == Gap(GapKind.TRIMMED, 0, 3)
    assert (batches[0].index, len(batches[0]), batches[0].records()) == (0, 0, [])
    assert payloads(batches[1:]) == [b"3", b"4"]


def test_reading_from_a_time() -> None:
    """It starts at the first batch since then; a future time is requested again, and nothing older comes."""
    world = make_world(records=3, by="time", start=1_000_001)
    assert payloads(drain(world)) == [b"1", b"2"]
    world.core.seek("time", 1_000_005, world.now)
    assert drain(world) == []
    for n in (3, 4):
        world.cluster.put(b"%d" % n)
        world.wires[1].far.serve_parked(over=True)
        assert drain(world) == []
    assert world.core.position is None
    world.cluster.put(b"5")
    assert payloads(drain(world)) == [b"5"]
    assert {(ask.by, ask.start) for ask in questions(world)[2:-1]} == {("time", 1_000_005)}


def test_a_paused_subscriber_requests_nothing_and_continues_at_its_position() -> None:
    """Answers in flight are kept; links that come and go do not wake it."""
    world = make_world(records=3, max_bytes=1)
    world.settle()
    first = world.core.take_batches(1, world.now)
    world.core.pause()
    world.collect()
    world.settle()
    asked = len(questions(world))
    world.core.on_timer(world.now)
    world.settle()
    assert len(questions(world)) == asked
    world.cut(1)
    again = world.connect()
    world.settle()
    assert questions(world, again) == []
    assert world.core.position == 1
    world.core.resume(world.now)
    world.collect()
    assert payloads(first + drain(world)) == [b"0", b"1", b"2"]


def test_skipped_sequences_come_as_a_gap() -> None:
    """A SKIP entry is a batch without records that names the session and the sequences."""
    world = make_world(records=1)
    world.cluster.skip(session=9, first=4, count=2)
    world.cluster.put(b"after")
    batches = drain(world)
    assert [b.gap for b in batches] == [None, Gap(GapKind.SKIPPED, 4, 6, 9), None]
    assert batches[1].index == 1


def test_entries_of_sessions_are_delivered_on_request() -> None:
    """With `control` every index comes, with its kind; without it, batches only, and the position moves likewise."""
    for control in (True, False):
        world = make_world(records=1, control=control)
        world.cluster.session_entry(EntryKind.SESSION_OPEN)
        world.cluster.put(b"after", count=2)
        world.cluster.session_entry(EntryKind.SESSION_CLOSE)
        batches = drain(world)
        world.settle()
        if control:
            kinds = [EntryKind.BATCH, EntryKind.SESSION_OPEN, EntryKind.BATCH, EntryKind.SESSION_CLOSE]
            assert [batch.kind for batch in batches] == kinds
            assert [(batch.index, batch.seq) for batch in batches] == [(0, 0), (1, 1), (2, 1), (3, 3)]
            assert batches[1].to_arrow().num_rows == 0
        else:
            assert [batch.index for batch in batches] == [0, 2]
        crc, us = payload_crc(b"0"), 1_000_000
        assert (batches[0].crc, batches[0].append_us, batches[0].flags) == (crc, us, 0)


def test_with_control_a_missing_index_is_noticed() -> None:
    """A broker that omits an entry is asked once more, then it is an error: the reader relies on every index."""
    world = make_world(records=3, control=True)
    honest = world.cluster.entries
    world.cluster.entries = lambda indices: honest([index + (index == 1) for index in indices])  # type: ignore
    assert [batch.index for batch in drain(world)] == [0]
    assert isinstance(world.core.failed, BadFrame)


def test_nothing_is_requested_from_the_stop_on() -> None:
    """The last fetch names the stop; once there, the core sends no more requests, also when more records come."""
    world = make_world(records=10, start=2, stop=7)
    assert payloads(drain(world)) == [b"2", b"3", b"4", b"5", b"6"]
    asked = len(questions(world))
    assert {question.stop for question in questions(world)} == {7}
    world.cluster.put(b"more")
    assert drain(world) == []
    assert (len(questions(world)), world.core.position) == (asked, 7)


def test_prefetch_of_batches_without_a_payload_is_bounded() -> None:
    """The bound in bytes does not limit entries without a payload: they are counted."""
    world = make_world(control=True)
    for _ in range(4 * FETCH_ENTRIES_MAX):
        world.cluster.log.append(Stored(0, 0, b"", 0, 0, 0, 0, EntryKind.SESSION_OPEN))
    world.cluster.wake()
    world.settle()
    assert world.core.ready == 2 * FETCH_ENTRIES_MAX
    assert len(drain(world, 1 << 20)) == 4 * FETCH_ENTRIES_MAX


def test_a_future_position_is_a_typed_error() -> None:
    """The broker's refusal becomes the subscriber's error, and a seek clears it."""
    world = make_world(records=2, start=10)
    assert drain(world) == []
    assert isinstance(world.core.failed, FuturePosition)
    world.core.seek("earliest", 0, world.now)
    world.collect()
    assert world.core.failed is None
    assert len(drain(world)) == 2


def test_a_retriable_refusal_is_tried_again_elsewhere() -> None:
    """While a sequencer takes over nothing can be read; the subscriber waits a little and asks the next broker."""
    world = make_world(wires=2, records=1)
    failed = m.Failed(code="Retriable", message="takes over")
    world.core.on_control(1, 1, failed, world.now)
    world.wires[1].outward.clear()
    assert world.core.next_timer_us() > world.now
    world.run(lambda: world.core.position == 0 and world.core._ahead)
    assert len(questions(world, 2)) >= 1


def test_a_filter_by_partition_leaves_out_the_others() -> None:
    """Only the wanted partitions come, and the holes between them are no error."""
    world = make_world(partitions=[1])
    for n in range(6):
        world.cluster.put(b"%d" % n, partition=n % 2)
    assert payloads(drain(world)) == [b"1", b"3", b"5"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 200)),
        st.tuples(st.just("outward"), st.integers(0, 3)),
        st.tuples(st.just("inward"), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.integers(0, 3)),
        st.tuples(st.just("connect"), st.just(0)),
        st.tuples(st.just("mute"), st.integers(0, 3)),
        st.tuples(st.just("over"), st.integers(0, 3)),
        st.tuples(st.just("trim"), st.integers(1, 3)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("time"), st.sampled_from([10_000, SILENT_US // 2, SILENT_US])),
    ),
    max_size=60,
)


def act(world: World, taken: list[Batch], action: str, value: int) -> None:
    wires = list(world.wires)
    number = wires[value % len(wires)] if wires else 0
    cluster = world.cluster
    match action:
        case "put" if value < 20:
            cluster.skip(session=1, first=value, count=1)
        case "put":
            cluster.put(b"%d." % len(cluster.log) * value, count=value % 4 + 1)
        case "outward" | "inward":
            getattr(world, action)(number)
        case "cut" if wires:
            world.cut(number)
        case "connect" if len(wires) < 3:
            world.connect()
        case "mute" if wires:
            world.wires[number].far.mute = True
        case "over" if wires:
            world.wires[number].far.serve_parked(over=True)
        case "trim":
            cluster.start_index = min(len(cluster.log), cluster.start_index + value)
        case "take":
            taken += world.core.take_batches(value, world.now)
            world.collect()
        case "time":
            world.advance(value)


@settings(deadline=None, max_examples=250)
@given(actions=ACTIONS)
def test_under_all_faults_the_reader_gets_one_unbroken_prefix(actions: list[tuple[str, int]]) -> None:
    """Under cuts, silence, trims and slow reading: each index once, in order, right bytes, or covered by a gap."""
    world = make_world(wires=2, max_bytes=300)
    taken: list[Batch] = []
    for action, value in actions:
        act(world, taken, action, value)
    for number in list(world.wires):
        world.cut(number)
    world.connect()
    for _ in range(5):
        taken += drain(world, 7)
        world.advance(SILENT_US)
    assert world.core.failed is None
    at = 0
    for batch in taken:
        assert batch.index == at
        trimmed = batch.gap is not None and batch.gap.kind == GapKind.TRIMMED
        at = batch.gap.stop if trimmed and batch.gap is not None else at + 1
        if not trimmed:
            stored = world.cluster.log[batch.index]
            assert (bytes(batch.payload), batch.seq) == (stored.payload, stored.seq)
            assert (batch.gap is not None) == (stored.kind == EntryKind.SKIP)
    assert at == len(world.cluster.log)


def test_payload_checksums_use_the_publishers_crc() -> None:
    """The check is end to end: the CRC that the publisher stamped, over the bytes that the reader got."""
    world = make_world(records=1)
    world.cluster.log[0].payload = b"other"
    world.cluster.log[0].crc = payload_crc(b"other")
    assert payloads(drain(world)) == [b"other"]


def test_a_gap_below_the_reader_names_its_losses_and_its_position_never_goes_back() -> None:
    """It had read up to 5 records that were only ordered; the lane was sealed at 3 and continues at 9."""
    world = make_world(records=5, read="ordered")
    assert len(drain(world)) == 5
    assert world.core._request.under_way is not None
    conn, request = world.core._request.under_way
    gap = FetchedReceived(request, 9, 9, Gap(GapKind.LOST, 3, 9), np.zeros(0, dtype=ORDER), [])
    world.core.on_fetched(conn, gap, world.now)
    assert world.core.position == 5
    [taken] = world.core.take_batches(10, world.now)
    assert taken.gap == Gap(GapKind.LOST, 3, 9)
    assert world.core.position == 9
