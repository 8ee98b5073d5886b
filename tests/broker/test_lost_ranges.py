"""Lanes that lost their records in memory: gaps between ranges, trims next to them, lanes in recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embarcadero.client.reads import tail_of, with_lags
from embarcadero.types import Gap, GapKind, Range, ReaderProgress
from embarcadero.wire import messages as m
from embarcadero_proof.bugs.table import injected
from tests.broker.disks import DiskWorld, Hand, Later, fill, payload, scan, texts
from tests.broker.harness import Client


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    """Two brokers, three replicas."""
    return DiskWorld(tmp_path)


def test_lost_positions_are_a_gap_and_lookups_skip_them(world: DiskWorld) -> None:
    """After a restart the lane continues at its ceiling: sealed part from files, a LOST gap, then new records."""
    old = world.topic()
    fill(world, old, 20, size=100)
    new = world.restart(old, 18, 36)
    lane, (writer, reader) = new.lane, (Client(broker) for broker in world.brokers)
    assert scan(world, reader, lane, by="earliest")[0] == [payload(sequence, 100) for sequence in range(18)]
    world.publish(writer, world.open(writer), 100, 2)
    for replica in world.of(new)[:2]:
        replica.copy(new, new.start + 2)
    world.run()
    found, gaps = scan(world, reader, lane)
    assert found == [*(payload(sequence, 100) for sequence in range(18)), payload(100), payload(101)]
    assert gaps == [Gap(GapKind.LOST, 18, new.start)]
    for start, read in ((19, "durable"), (20, "ordered"), (new.start - 1, "ordered")):
        inside = world.fetch(reader, lane, start=start, read=read)
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)
    for by, value in (("seq", 36), ("seq", 40), ("index", 18), ("index", new.start - 1)):
        place = world.ask(reader, m.Find(lane=lane, by=by, start=value))
        assert (place.index, place.seq) == (new.start, new.start_seq)
    assert texts(world.fetch(reader, lane, by="seq", start=36, max_bytes=1)) == [payload(100)]
    assert world.ask(reader, m.Find(lane=lane, by="seq", start=35)).index == 17
    tail = world.ask(reader, m.GetTail(lane=lane))
    assert (tail.index, tail.durable_index, tail.start_index) == (new.start + 2, new.start + 2, 0)


def lose_and_go_on(world: DiskWorld, old: Range) -> tuple[Range, Client, Client]:
    """A lane with 20 batches, of which 18 survive a loss, and two new ones above the ceiling; a writer, a reader."""
    fill(world, old, 20, size=100)
    new = world.restart(old, 18, 36)
    writer, reader = (Client(broker) for broker in world.brokers)
    world.publish(writer, world.open(writer), 100, 2)
    for replica in world.of(new)[:2]:
        replica.copy(new, new.start + 2)
    world.run()
    return new, writer, reader


@pytest.mark.parametrize("start", [18, 19, 1_000])
def test_losses_above_a_trim_are_still_reported_as_lost(world: DiskWorld, start: int) -> None:
    """Only the trimmed part is TRIMMED. The rest of a LOST gap stays LOST, although its range is removed."""
    new, writer, reader = lose_and_go_on(world, world.topic())
    lane = new.lane
    world.directory.topics.trim("t", lane, start)
    world.run()
    found, gaps = scan(world, reader, lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, start), Gap(GapKind.LOST, start, new.start)]
    inside = world.fetch(reader, lane, start=2_000)
    assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, start, new.start), new.start)
    assert (opened := world.open(writer)).lost_to == new.start
    assert opened.lost_from == 18
    for by, value in (("earliest", 0), ("seq", 3), ("seq", 36), ("time", 0)):
        assert texts(world.fetch(reader, lane, by=by, start=value, max_bytes=1)) == [payload(100)]
    assert world.ask(reader, m.GetTail(lane=lane)).start_index == new.start


def test_a_lane_that_was_trimmed_to_its_end_before_a_loss(world: DiskWorld) -> None:
    """All durable records are trimmed, then the rest is lost: each gap keeps its kind, and every lookup continues."""
    old = world.topic()
    world.directory.topics.trim("t", old.lane, 18)
    new, _, reader = lose_and_go_on(world, old)
    found, gaps = scan(world, reader, new.lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, 18), Gap(GapKind.LOST, 18, new.start)]
    for by, value in (("earliest", 0), ("seq", 3), ("seq", 36), ("time", 0)):
        assert texts(world.fetch(reader, new.lane, by=by, start=value, max_bytes=1)) == [payload(100)]


def test_records_dropped_below_lost_positions_are_trimmed_up_to_them(world: DiskWorld) -> None:
    """A broker that does not know of the trim uses the files, whose start is above all of their records."""
    old = world.topic()
    new, _, reader = lose_and_go_on(world, old)
    for replica in world.of(old):
        log = replica.log(old)
        log.cut(18)
        assert not log.roll_if_due(0)
        assert log.roll_if_due(10**15)
        log.sync_job()()
        assert log.drop_below(18)
    found, gaps = scan(world, reader, new.lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, 18), Gap(GapKind.LOST, 18, new.start)]


def test_trimming_less_than_before_changes_nothing_after_files_were_removed(world: DiskWorld) -> None:
    """An index whose range was forgotten is below the start, and not at the durable end."""
    new, _, reader = lose_and_go_on(world, world.topic())
    lane, start = new.lane, new.start + 1
    for before in (start, 5, 0, 18, start - 1):
        place = world.ask(reader, m.Trim(lane=lane, by="index", before=before))
        assert (place.index, world.directory.topics.trims()[lane]) == (start, start)
    for index in (0, 5, 18, start - 1):
        assert world.ask(reader, m.Find(lane=lane, by="index", start=index)).code == "Trimmed"
    assert texts(world.fetch(reader, lane, by="earliest")) == [payload(101)]


@pytest.mark.parametrize("trim", [19, 30, 1_000])
def test_a_trim_does_not_hide_records_that_were_taken_back(world: DiskWorld, trim: int) -> None:
    """The reader read records above the sealed end: they are all reported as lost, including those below the trim."""
    new, _, reader = lose_and_go_on(world, world.topic())
    world.directory.topics.trim("t", new.lane, trim)
    world.run()
    for start in (19, 25, 30):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)


def test_two_losses_in_a_row_are_one_gap_and_a_reader_between_them_gets_the_second(world: DiskWorld) -> None:
    """No record became durable between the two: a new reader gets one gap from the sealed end."""
    old = world.topic()
    fill(world, old, 20, size=100)
    between = world.restart(old, 18, 36)
    new = world.restart(between, between.start, between.start_seq)
    reader = Client(world.brokers[1])
    for start in (18, 19, between.start - 1):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)
    for start in (between.start, between.start + 3):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, between.start, new.start), new.start)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_durable_reader_gets_lost_only_if_durable_records_may_be_lost(world: DiskWorld, accepted: bool) -> None:
    """Enough disks answered: no record above the end was durable, unless an operator accepted a loss.

    Clients of earlier versions, which do not know the kind, and readers of ordered records get LOST.
    """
    old = world.topic()
    fill(world, old, 20, size=100)
    if accepted:
        world.directory.ranges.accept_loss(old.lane)
    new = world.restart(old, 18, 36)
    reader = Client(world.brokers[1])
    kinds = {
        (read, known): world.fetch(reader, new.lane, start=18, read=read, never_durable=known).gap.kind
        for read in ("durable", "ordered")
        for known in (False, True)
    }
    kind = GapKind.LOST if accepted else GapKind.NEVER_DURABLE
    assert kinds.pop(("durable", True)) is kind
    assert set(kinds.values()) == {GapKind.LOST}
    world.directory.topics.trim("t", new.lane, 1_000)
    world.run()
    gap = world.fetch(reader, new.lane, start=1_000, never_durable=True).gap
    assert gap == Gap(kind, 1_000, new.start)


def test_a_tail_and_the_lag_of_readers_do_not_count_seqs_that_a_restart_skipped(world: DiskWorld) -> None:
    """36 records survived, 4 came later; seqs between are a hole of billions."""
    new, _, reader = lose_and_go_on(world, world.topic())
    tail = tail_of(world.directory.topics.all()[0], world.ask(reader, m.GetTail(lane=new.lane)))
    assert tail.holes == ((36, new.start_seq),)
    assert tail.records(0, tail.seq) == 36 + 4
    places = (0, 0), (18, 36), (new.start, tail.seq)
    readers = [ReaderProgress(reader="r", places={new.lane: place}) for place in places]
    assert [progress.lag for progress in with_lags(readers, tail)] == [40, 4, 0]
    assert world.fetch(reader, new.lane, start=16, max_bytes=1).next_index == 17
    assert world.brokers[1].reader_lags() == {new.lane: [1 + 2]}
    world.directory.topics.trim("t", new.lane, new.start + 1)
    world.run()
    tail = tail_of(world.directory.topics.all()[0], world.ask(reader, m.GetTail(lane=new.lane)))
    assert (tail.holes, tail.records(tail.start_seq, tail.seq)) == ((), 2)


def test_a_clean_restart_between_two_losses_keeps_the_gap_never_durable(world: DiskWorld) -> None:
    """The cluster was killed, started, stopped cleanly, started, and killed again, without a publish in between."""
    old = world.topic()
    fill(world, old, 20, size=100)
    between, refs = world.restart(old, 18, 36), [replica.member.ref for replica in world.replicas]
    start = between.start, between.start_seq
    assert world.directory.ranges.seal_clean(old.lane, between.number, *start, world.hand.epoch)
    again = world.directory.ranges.reopen(old.lane, refs, world.hand.epoch)
    assert again is not None
    new = world.restart(again, *start)
    gap = world.fetch(Client(world.brokers[1]), new.lane, start=18, never_durable=True).gap
    assert gap == Gap(GapKind.NEVER_DURABLE, 18, new.start)


class Recovering:
    """A lane of 20 durable batches whose recovery happens while a broker searches its files for an answer."""

    def __init__(self, path: Path) -> None:
        self.workers: list[Later] = []
        self.world = DiskWorld(path, workers=self._later)
        self.old = self.world.topic()
        client = Client(self.world.brokers[0])
        self.world.publish(client, self.world.open(client), 0, 20)
        for replica in self.world.of(self.old):
            replica.copy(self.old, 20)
        self.world.brokers = [self.world.start_broker(0), self.world.start_broker(1)]
        self.world.hand = Hand(self.world)
        self.world.hand.start()
        self.world.hand.word(self.old.lane, self.old.number, closing=True)
        self.world.run()
        self.reader = Client(self.world.brokers[1])

    def _later(self) -> Later:
        self.workers.append(Later())
        return self.workers[-1]

    def answer(self, message: m.Message) -> Any:
        """Send a request, search the files, recover the lane, and only then pass the result to the broker."""
        request = self.reader.ask(message)
        job, done = self.workers[-1].jobs.pop(0)
        result = job()
        new = self.world.lose_memory(self.old, 20, 40)
        self.world.hand.open_lane(new.lane, new.start, new.start_seq)
        self.world.hand.word(new.lane, new.number)
        for replica in self.world.of(new):
            replica.say(new, new.start)
        self.world.run()
        done(result)
        self.reader.pump()
        return self.reader.answers[request]


@pytest.mark.parametrize("bug", [False, True])
def test_a_start_that_was_searched_before_a_recovery_is_not_reported_after_it(tmp_path: Path, bug: bool) -> None:
    """The broker read the ranges before the recovery and memory after it: the lane seemed to start at its ceiling."""
    lane = Recovering(tmp_path)
    with injected(*["start-unsearched"][: int(bug)]):
        tail = lane.answer(m.GetTail(lane=lane.old.lane))
    if bug:
        assert tail.start_index == tail.index > 20
        return
    assert tail.code == "Retriable"
    request = lane.reader.ask(m.GetTail(lane=lane.old.lane))
    lane.workers[-1].step()
    lane.world.run(3, lane.reader)
    tail = lane.reader.answers[request]
    assert (tail.start_index, tail.start_seq) == (0, 0)


def test_a_restarted_lane_without_new_records_reports_its_end(world: DiskWorld) -> None:
    """The ring is empty; both ends are where the new range starts."""
    old = world.topic()
    fill(world, old, 20, size=100)
    new = world.restart(old, 20, 40)
    reader = Client(world.brokers[1])
    tail = world.ask(reader, m.GetTail(lane=new.lane))
    assert (tail.index, tail.seq) == (tail.durable_index, tail.durable_seq) == (new.start, new.start_seq)
    assert (tail.start_index, tail.start_seq) == (0, 0)
    late = world.fetch(reader, new.lane, by="time", start=world.clock.wall_us())
    assert (late.payloads, late.gap) == ([], None)


def test_the_sealed_part_is_readable_while_a_lane_recovers(world: DiskWorld) -> None:
    """Without an order ring, and with the last range undecided, sealed ranges are served and the rest waits."""
    old = world.topic()
    fill(world, old, 20, size=100)
    refs = [replica.member.ref for replica in world.replicas]
    last = world.directory.ranges.seal_and_open(old.lane, old.number, 15, 30, refs, world.hand.epoch)
    assert last is not None
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    world.hand = type(world.hand)(world)
    world.hand.start()
    world.hand.word(old.lane, last.number, closing=True)
    world.run()
    reader = Client(world.brokers[1])
    answer = world.fetch(reader, old.lane, by="earliest")
    assert texts(answer) == [payload(sequence, 100) for sequence in range(15)]
    assert answer.next_index == 15
    request = reader.ask(m.Fetch(lane=old.lane, start=15, max_bytes=1_000, wait_ms=30_000))
    world.run(3, reader)
    assert request not in reader.fetched
    assert request not in reader.answers
    assert world.ask(reader, m.GetTail(lane=old.lane)).code == "Retriable"


@pytest.mark.parametrize("read", ["durable", "ordered"])
def test_a_seq_above_the_sealed_part_waits_for_the_lane_and_starts_there(world: DiskWorld, read: str) -> None:
    """Not at the start of the range in recovery: the reader did not ask for the earlier records."""
    old = world.topic()
    fill(world, old, 20, size=100)
    refs = [replica.member.ref for replica in world.replicas]
    last = world.directory.ranges.seal_and_open(old.lane, old.number, 15, 30, refs, world.hand.epoch)
    assert last is not None
    for replica in world.of(last):
        replica.copy(last, 18)
        replica.log(old).cut(15)
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    world.hand = type(world.hand)(world)
    world.hand.start()
    world.hand.word(old.lane, last.number, closing=True)
    world.run()
    reader = Client(world.brokers[1])

    def ask(seq: int, wait_ms: int) -> m.Fetch:
        return m.Fetch(lane=old.lane, by="seq", start=seq, max_bytes=1, read=read, wait_ms=wait_ms)

    waiting = {seq: reader.ask(ask(seq, 30_000)) for seq in (29, 30, 33)}
    world.run(3, reader)
    assert texts(reader.fetched[waiting[29]]) == [payload(14, 100)]
    assert not {waiting[30], waiting[33]} & (reader.fetched.keys() | reader.answers.keys())
    assert world.ask(reader, ask(33, 0)).code == "Retriable"

    new = world.lose_memory(last, 18, 36)
    world.hand.open_lane(new.lane, new.start, new.start_seq)
    world.hand.word(new.lane, new.number)
    world.run(3, reader)
    assert texts(reader.fetched[waiting[30]]) == [payload(15, 100)]
    assert texts(reader.fetched[waiting[33]]) == [payload(16, 100)]
