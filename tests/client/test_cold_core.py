"""The reader's core with a topic that has a table: each position once, whichever store drops records at any time."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from embarcadero.client import reads
from embarcadero.client.link import Link
from embarcadero.client.reads import no_progress
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.client.subscriber import SubscriberCore, TableAsk
from embarcadero.errors import BadTable, BadValue, Corrupt, NotAvailable, TierUnavailable, Unreachable
from embarcadero.fabric.layout import ORDER
from embarcadero.limits import TABLE_RETRY_S
from embarcadero.types import EntryKind, Gap, GapKind, Tier
from embarcadero.wire import messages as m
from embarcadero.wire.codec import FetchedReceived
from tests.client.fake_cluster import LANE, FakeCluster, World, subscriber_core

SILENT_US = 3_000_000


class Table:
    """A table of the fake cluster's log, as a driver would read it: below `frontier`, from `start` on."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.frontier = self.start = 0

    def batches(self, start: int, stop: int) -> list[Batch]:
        found = []
        if start < min(self.start, stop):
            found.append(Batch.of_gap(LANE, Gap(GapKind.TRIMMED, start, min(self.start, stop)), None))
        for index in range(max(start, self.start), stop):
            entry = OrderEntry._make(self._cluster.entries([index]).tolist()[0])
            found.append(Batch.of_entry(LANE, entry, self._cluster.log[index].payload, {}))
        return found


def make_world(records: int = 0, **options: Any) -> tuple[World, Table]:
    core = subscriber_core(silent_after_us=SILENT_US, table=True, **options)
    world = World(core, FakeCluster(), 1)
    for number in range(records):
        world.cluster.put(b"%d" % number, count=number % 3 + 1)
    return world, Table(world.cluster)


def answer(world: World, table: Table, ask: TableAsk, at_once: int = 2) -> None:
    """Do what a driver does with a question: a few batches at a time, then the end."""
    core, reached = world.core, max(ask.start, min(ask.stop, table.frontier))
    batches = table.batches(ask.start, reached)
    for first in range(0, len(batches), at_once):
        core.on_table_batches(ask, batches[first : first + at_once])
    core.on_table_end(ask, reached, world.now)
    world.collect()


def drain(world: World, table: Table) -> list[Batch]:
    """Every batch that can be read now."""
    taken: list[Batch] = []
    while True:
        world.settle()
        for ask in world.core.take_table_asks():
            answer(world, table, ask)
            world.settle()
        found = world.core.take_batches(1_000, world.now)
        world.collect()
        if not found and not world.core._table.asked:
            return taken
        taken += found


def test_batches_that_brokers_dropped_come_from_the_table() -> None:
    """Batches of the table, then those of brokers, as one log; the seq continues across the boundary."""
    world, table = make_world(records=10)
    table.frontier, world.cluster.start_index = 7, 5
    found = drain(world, table)
    assert [batch.index for batch in found] == list(range(10))
    assert [batch.gap for batch in found] == [None] * 10


def test_batches_missing_from_the_table_are_a_gap() -> None:
    """Without a table, or above its frontier, the brokers' gap counts; below its start, the user's trim does."""
    world, table = make_world(records=10)
    world.cluster.start_index = 5
    assert drain(world, table)[0].gap == Gap(GapKind.TRIMMED, 0, 5)
    world, table = make_world(records=10)
    table.frontier, table.start, world.cluster.start_index = 4, 2, 6
    found = drain(world, table)
    assert [batch.gap for batch in found[:4]] == [
        Gap(GapKind.TRIMMED, 0, 2), None, None, Gap(GapKind.TRIMMED, 4, 6)
    ]  # fmt: skip
    assert [batch.index for batch in found[4:]] == [6, 7, 8, 9]


def test_a_table_that_fails_unexpectedly_fails_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was raised: the reader does not hang, and the error names the topic and the position."""
    world, _ = make_world(records=10)
    world.cluster.start_index = 5
    world.settle()

    async def described(*_: Any) -> Any:
        return SimpleNamespace(tier=Tier(id="", warehouse="", table="t", frontiers={LANE: (7, 14)}))

    def opened(*_: Any) -> Any:
        raise ArithmeticError("an unexpected bug")

    async def main() -> None:
        told = asyncio.Event()
        asked = reads.TableReads(cast("Any", None), "t", told.set)
        asked.begin(world.core.take_table_asks())
        async with asyncio.timeout(10):
            await told.wait()

    monkeypatch.setattr(reads, "describe", described)
    monkeypatch.setattr(reads, "open_table", opened)
    asyncio.run(main())
    assert isinstance(world.core.failed, BadTable)
    assert re.search(r"table of 't'.*lane 7, span 0: .*an unexpected bug", world.core.failed.message)


def test_a_stop_applies_to_the_table_too() -> None:
    """Nothing at or above it is requested from the table, and nothing after it from brokers."""
    world, table = make_world(records=10, start=1, stop=4)
    table.frontier, world.cluster.start_index = 9, 8
    world.settle()
    (ask,) = world.core.take_table_asks()
    assert (ask.start, ask.stop) == (1, 4)
    answer(world, table, ask)
    assert [batch.index for batch in drain(world, table)] == [1, 2, 3]
    assert world.core.position == 4


def test_a_seek_makes_older_answers_void() -> None:
    """Batches that the table still sends are not delivered."""
    world, table = make_world(records=10)
    table.frontier, world.cluster.start_index = 9, 8
    world.settle()
    (ask,) = world.core.take_table_asks()
    world.core.on_table_batches(ask, table.batches(0, 2))
    world.core.seek("index", 1, world.now)
    world.collect()
    assert not world.core.wants(ask)
    world.core.on_table_batches(ask, table.batches(2, 4))
    world.core.on_table_end(ask, 8, world.now)
    assert [batch.index for batch in drain(world, table)] == list(range(1, 10))


def test_positions_are_resolved_in_the_table_of_a_topic_that_has_one() -> None:
    """earliest, a seq and a time become an index first; None leaves it to brokers; latest always does."""
    for by, start in (("earliest", 0), ("seq", 5), ("time", 1_000_003)):
        world, table = make_world(records=10, by=by, start=start, tiered=True)
        table.frontier, world.cluster.start_index = 7, 5
        world.settle()
        (ask,) = world.core.take_table_asks()
        assert (ask.by, ask.start) == (by, start)
        world.core.on_table_position(ask, 3, world.now)
        world.collect()
        assert [batch.index for batch in drain(world, table)] == list(range(3, 10))
    world, table = make_world(records=10, by="seq", start=5, tiered=True)
    world.settle()
    (ask,) = world.core.take_table_asks()
    world.core.on_table_position(ask, None, world.now)
    world.collect()
    assert drain(world, table)[0].seq == 3
    world, table = make_world(records=10, by="latest", tiered=True)
    world.settle()
    assert world.core.take_table_asks() == []
    assert world.core.position == 10


def test_a_table_that_does_not_answer_is_retried_and_wrong_content_is_an_error() -> None:
    """Delivered batches stay delivered; reading continues from there. Inconsistent content is never delivered."""
    world, table = make_world(records=10)
    table.frontier, world.cluster.start_index = 9, 8
    world.settle()
    (ask,) = world.core.take_table_asks()
    world.core.on_table_batches(ask, table.batches(0, 3))
    world.core.on_table_failed(ask, Unreachable("no answer"), world.now)
    assert world.core.failed is None
    assert world.core.trouble is not None
    assert world.core.trouble.message == "no answer"
    assert "no answer" in no_progress(world.core, 5.0).message
    world.now += 1_000_000
    world.core.on_timer(world.now)
    world.collect()
    assert [batch.index for batch in drain(world, table)] == list(range(10))
    for wrong in (table.batches(2, 3) + table.batches(1, 2), table.batches(0, 1) + table.batches(4, 5)):
        world, table = make_world(records=10)
        world.cluster.start_index = 8
        world.settle()
        (ask,) = world.core.take_table_asks()
        world.core.on_table_batches(ask, wrong)
        assert isinstance(world.core.failed, Corrupt)
        assert len(world.core.take_batches(10, world.now)) == 1
    world, _ = make_world(records=10)
    world.cluster.start_index = 8
    world.settle()
    (ask,) = world.core.take_table_asks()
    world.core.on_table_failed(ask, BadValue("nonsense"), world.now)
    assert isinstance(world.core.failed, BadValue)


def test_a_store_that_stays_away_is_reported_and_the_reader_continues_on_request() -> None:
    """Attempts are spaced out for some seconds; then it is a typed error, not silence. The position is kept."""
    world, table = make_world(records=10)
    table.frontier, world.cluster.start_index = 9, 8
    for failures in (1, 2):  # it may happen again
        tries, since = 0, world.now
        while world.core.failed is None:
            world.settle()
            for ask in world.core.take_table_asks():
                tries += 1
                world.core.on_table_failed(ask, TierUnavailable("s3 is away", "start it"), world.now)
            assert tries < 100
            world.advance(50_000)
        assert isinstance(world.core.failed, TierUnavailable), failures
        assert 4 <= tries <= 20
        assert world.now - since >= TABLE_RETRY_S * 1e6
        world.core.retry(world.now)
        world.collect()
        assert world.core.failed is None
    assert [batch.index for batch in drain(world, table)] == list(range(10))
    assert world.core.trouble is None


def offered(**options: Any) -> tuple[SubscriberCore, Link]:
    """A reader whose one broker reads tables for its clients."""
    core, link = subscriber_core(silent_after_us=SILENT_US, table=True, **options), Link(1, 0)
    link.tables = True
    core.on_connected(link, 0)
    return core, link


def asked(core: SubscriberCore) -> bool:
    """Whether the outgoing Fetch requests records of the table, too."""
    ((_, [frame]),) = core.take_output()
    return b"table" in bytes(frame)


def refuse(core: SubscriberCore, request: int, error: str, now_us: int) -> None:
    """Answer that the broker can't read the table."""
    core.on_control(1, request, m.Failed(code=error, message=f"{error} of a broker"), now_us)


def test_brokers_that_offer_it_are_asked_for_records_of_the_table() -> None:
    """A TRIMMED answer of such a broker is final: no other source is asked."""
    core, _ = offered()
    assert asked(core)
    nothing: Any = np.zeros(0, dtype=ORDER)
    core.on_fetched(1, FetchedReceived(1, 5, 9, Gap(GapKind.TRIMMED, 0, 5), nothing, []), 1)
    assert core.take_table_asks() == []
    assert core.take_batches(1, 2)[0].gap == Gap(GapKind.TRIMMED, 0, 5)


def test_a_broker_that_cannot_read_the_table_leaves_it_to_the_client() -> None:
    """The client reads it itself; if it can't either, the more specific of the two errors is reported."""
    for refused, unable, reported in (
        ("NotAvailable", NotAvailable("no PyIceberg here"), NotAvailable),
        ("BadTable", NotAvailable("no PyIceberg here"), BadTable),
        ("BadTable", TierUnavailable("away"), None),
        ("TierUnavailable", NotAvailable("no PyIceberg here"), None),
    ):
        core, link = offered()
        assert asked(core)
        refuse(core, 1, refused, 1)
        core.on_timer(1_000_000)
        assert not asked(core)
        nothing: Any = np.zeros(0, dtype=ORDER)
        core.on_fetched(1, FetchedReceived(2, 5, 9, Gap(GapKind.TRIMMED, 0, 5), nothing, []), 1_000_001)
        (ask,) = core.take_table_asks()
        core.on_table_failed(ask, unable, 1_000_002)
        if reported is None:  # both ways are tried again
            assert core.failed is None
            core.on_timer(3_000_000)
            assert asked(core)
            refuse(core, 3, "TierUnavailable", 9_000_000)
            assert isinstance(core.failed, TierUnavailable)
        else:
            assert type(core.failed) is reported
        assert link.tables


TRIMMED = Gap(GapKind.TRIMMED, 0, 5)
NOTHING: Any = np.zeros(0, dtype=ORDER)
RETRY_US = int(TABLE_RETRY_S * 1e6)


def test_a_store_that_hangs_is_reported_once_both_ways_were_tried_and_the_time_is_over() -> None:
    """Each attempt takes long to fail. Time runs from the first request.

    Attempts are not counted beyond one by a broker and one by this client.
    """
    core, _ = offered()
    assert asked(core)
    refuse(core, 1, "TierUnavailable", RETRY_US)
    assert core.failed is None  # this client may reach the store
    core.on_timer(RETRY_US + 100_000)
    core.take_output()
    core.on_fetched(1, FetchedReceived(2, 5, 9, TRIMMED, NOTHING, []), RETRY_US + 100_001)
    core.on_table_failed(core.take_table_asks()[0], TierUnavailable("s3://w hangs"), 2 * RETRY_US)
    assert isinstance(core.failed, TierUnavailable)
    assert "s3://w" in core.failed.message


def failing_then_waiting() -> tuple[SubscriberCore, Link]:
    """A reader that waits for its broker's second try; the first one failed, and this client has no PyIceberg."""
    core, link = offered()
    assert asked(core)
    refuse(core, 1, "TierUnavailable", 1_000_000)
    core.on_timer(1_100_000)
    core.take_output()
    core.on_fetched(1, FetchedReceived(2, 5, 9, TRIMMED, NOTHING, []), 1_100_001)
    core.on_table_failed(core.take_table_asks()[0], NotAvailable("no PyIceberg here"), 1_100_002)
    core.on_timer(1_400_000)
    assert asked(core)
    return core, link


def test_a_broker_that_waits_for_a_store_is_waited_for_as_long_as_the_store_is_tried() -> None:
    """The earlier failure is reported then. The answer that comes too late is ignored; polling asks again."""
    core, link = failing_then_waiting()
    times = []
    while core.failed is None:
        times.append(core.next_timer_us() or 0)
        core.on_timer(times[-1])
        link.heard(times[-1])  # it answers each Ping
        assert len(times) < 100
    assert times[-1] == RETRY_US  # not later, and from the first question on
    assert isinstance(core.failed, TierUnavailable)
    core.take_output()
    core.on_fetched(1, FetchedReceived(3, 5, 9, TRIMMED, NOTHING, []), 9_000_000)
    assert core.take_batches(9, 9_000_000) == []
    core.retry(9_000_000)
    assert core.failed is None
    assert asked(core)


def test_a_reader_past_the_table_does_not_fail_for_it() -> None:
    """An answer without records counts, too: afterwards a reader may wait at the end of the log without limit."""
    core, _ = failing_then_waiting()
    core.on_fetched(1, FetchedReceived(3, 5, 9, TRIMMED, NOTHING, []), 1_500_000)
    core.take_output()
    core.on_timer(100 * RETRY_US)
    assert (core.failed, core.trouble) == (None, None)


def test_without_replicas_a_trim_is_a_gap_at_once() -> None:
    """Such topics have no table: nobody is asked."""
    core = subscriber_core(silent_after_us=SILENT_US)
    world = World(core, FakeCluster(), 1)
    for number in range(5):
        world.cluster.put(b"%d" % number)
    world.cluster.start_index = 3
    world.settle()
    assert core.take_table_asks() == []
    assert core.take_batches(1, world.now)[0].gap == Gap(GapKind.TRIMMED, 0, 3)


STEPS = st.lists(st.tuples(st.sampled_from("ptfuradc"), st.integers(1, 6)), max_size=60)


@settings(deadline=None, max_examples=300)
@given(STEPS, st.booleans())
@example([("p", 1), ("p", 2), ("r", 1), ("p", 1), ("u", 4), ("c", 1)], False)
def test_every_position_comes_once_whatever_happens_in_between(steps: list[tuple[str, int]], control: bool) -> None:
    """Publishing, tiering, forgetting, trims by a user, slow tables, lost connections: a reader from 0 gets each index
    in a batch or in a TRIMMED gap, and a gap only where the user had trimmed.
    """
    world, table = make_world(control=control, max_bytes=40)
    cluster, found, asks, cleared = world.cluster, [], [], 0
    for step, many in [*steps, *([("a", 6), ("r", 6)] * 60)]:
        if step == "p":
            for _ in range(many):
                cluster.put(b"x" * 10) if many % 2 else cluster.session_entry(EntryKind.SESSION_OPEN)
        elif step == "t":
            table.frontier = max(table.frontier, min(len(cluster.log), table.frontier + many))
        elif step == "f":
            cluster.start_index = max(cluster.start_index, min(table.frontier, cluster.start_index + many))
        elif step == "u":
            cleared = max(cleared, min(len(cluster.log), cluster.start_index + many))
            cluster.start_index, table.start = max(cluster.start_index, cleared), cleared
        elif step == "c":
            world.cut(world.made)
            world.connect()
        elif step == "r":
            world.settle()
            found += world.core.take_batches(many, world.now)
            world.collect()
        asks += world.core.take_table_asks()
        if asks and step in "ad":
            answer(world, table, asks.pop(0), at_once=many)
            world.settle()
    assert world.core.failed is None
    at = 0
    for batch in found:
        assert batch.index == at or (batch.index > at and not control)
        passed_over = {entry.kind for entry in cluster.log[at : batch.index]}  # also when a gap follows
        assert passed_over <= {EntryKind.SESSION_OPEN}
        at = batch.index + 1 if batch.gap is None else batch.gap.stop
        if batch.gap is not None:
            assert (batch.gap.kind, batch.gap.start) == (GapKind.TRIMMED, batch.index)
            assert at <= cleared
    left = [entry.kind for entry in cluster.log[at:]]
    assert left == [] if control else EntryKind.BATCH not in left
