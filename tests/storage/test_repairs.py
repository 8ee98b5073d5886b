"""Repairs from a peer and scrubs: damage is found, and the records are restored byte for byte."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

import pytest

from embarcadero.errors import BadSegment, DiskFailed
from embarcadero.storage.layout import (
    FOOTER_BYTES,
    HEADER_BYTES,
    encode_footer,
    encode_header,
    record_bytes,
    segment_name,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.repair import Scrub, mend, replace_segment
from embarcadero.storage.segment import DamageKind, read_footer
from tests.storage.copies import Copies, ManualClock, scrub_all
from tests.storage.crash_disk import Died, World
from tests.storage.records import (
    FOLDER,
    LANE,
    RANGE,
    SMALL,
    START,
    fill,
    matches,
    open_log,
    open_reader,
)


def test_a_leftover_of_another_repair_is_not_continued(copies: Copies) -> None:
    """It was for other records."""
    del copies.world.names[copies.path(2)]
    log = copies.open()
    first = copies.infos[1]
    parts = RangeLog.recover(log.disk, f"{FOLDER}.repair", LANE, RANGE, first.base_index, first.base_seq, SMALL)
    parts.append(*copies.source.span(first.base_index, first.end_index))
    parts.sync_job()()
    parts.close()
    assert not mend(log, copies.peer, log.damage[0])
    copies.repair(log)


def test_an_interrupted_and_damaged_repair_starts_again(copies: Copies) -> None:
    """Its remaining files are useless."""
    del copies.world.names[copies.path(1)]
    log = copies.open()
    (damage,) = log.damage
    parts = RangeLog.recover(
        log.disk, f"{FOLDER}.repair", LANE, RANGE, damage.first, copies.source.seq(damage.first), SMALL
    )
    parts.close()
    del copies.world.names[f"{FOLDER}.repair/{segment_name(copies.source.seq(damage.first))}"]
    assert not mend(log, copies.peer, damage)
    copies.repair(log)


def test_a_repair_without_a_helpful_peer_leaves_no_file_open(copies: Copies) -> None:
    """It is tried again and again, until a peer has the missing records."""
    del copies.world.names[copies.path(1)]
    log = copies.open()
    before = set(copies.world.open_files)
    with patch.object(copies.peer, "read", side_effect=BadSegment("damaged", "try another")):
        for _ in range(3):
            with pytest.raises(BadSegment):
                mend(log, copies.peer, log.damage[0])
    assert copies.world.open_files == before
    copies.repair(log)


@pytest.mark.parametrize("syncs", [None, *range(6)])
def test_a_copy_without_its_start_is_cut_to_nothing(copies: Copies, syncs: int | None) -> None:
    """All its records come after the cut. A crash during the cut leaves an incomplete copy that reports it."""
    del copies.world.names[copies.path(0)]
    del copies.world.safe_names[copies.path(0)]
    log = copies.open()
    copies.world.syncs_to_live = syncs
    with suppress(Died):
        log.cut(START)
        assert (log.first, log.end, log.synced) == (START, START, START)
        fill(log, copies.source, 5)
    copies.world.syncs_to_live = None
    copies.world.crash()
    log = copies.open()
    assert log.damage

    for damage in log.damage:
        if damage.kind is not DamageKind.TAIL and damage.end > log.end:
            log.cut(damage.first)
            log.healed(damage)
    copies.repair(log)


def test_a_copy_is_not_cut_inside_a_hole(copies: Copies) -> None:
    """The position to continue at would be unknown."""
    del copies.world.names[copies.path(0)]
    with pytest.raises(BadSegment, match="can't be cut"):
        copies.open().cut(START + 1)


def test_the_last_segment_of_a_sealed_range_comes_back_as_its_end(copies: Copies) -> None:
    """Deleted while the replica runs: a scrub misses it, and the peer's has the same bytes, its end included."""
    log = copies.open()
    log.seal(copies.end)
    path = copies.path(-1)
    before = bytes(copies.world.names.pop(path).data)
    scrub_all(log)
    assert [damage.kind for damage in log.damage] == [DamageKind.FILE]
    assert mend(log, copies.peer, log.damage[0])
    assert bytes(copies.world.names[path].data) == before
    scrub_all(log)
    assert not log.damage
    assert copies.open().sealed


@pytest.mark.parametrize("gone", [False, True])
def test_the_segment_before_an_empty_last_one_is_not_the_end(copies: Copies, gone: bool) -> None:
    """A range was sealed right after a roll-over by age: the previous segment gets its own footer back."""
    log = copies.open()
    log.roll_if_due(0)
    assert log.roll_if_due(1 << 60)
    log.sync_job()()
    log.seal(copies.end)
    assert log.segments[-1].base_index == copies.end
    path = copies.path(-1)
    before = bytes(copies.world.names[path].data)
    if gone:
        del copies.world.names[path]
    else:
        copies.flip(path, HEADER_BYTES + 8)
    scrub_all(log)
    assert mend(log, copies.peer, log.damage[0])
    assert bytes(copies.world.names[path].data) == before
    copies.whole(log)
    copies.whole(copies.open())


def test_a_segment_marked_as_the_last_is_not_if_another_follows(copies: Copies) -> None:
    """Such footers were written once: the records they cover belong to the copy nevertheless."""
    log = copies.open()
    log.seal(copies.end)
    node, info = copies.node(1), copies.infos[1]
    footer = read_footer(bytes(node.data[-FOOTER_BYTES:]), len(node.data), log.header(info))
    assert footer is not None
    node.data[-FOOTER_BYTES:] = encode_footer(footer._replace(last=True))
    node.safe = bytearray(node.data)
    log = copies.open()
    assert [one.base_seq for one in log.segments] == [one.base_seq for one in copies.infos]
    assert log.sealed
    copies.whole(log)


@pytest.mark.parametrize("number", [1, -1])
def test_a_segment_that_a_peers_records_do_not_fit_is_replaced(copies: Copies, number: int) -> None:
    """Its header belongs to this range, and the rest does not: the content belongs to another file."""
    log = copies.open()
    log.seal(copies.end)
    node, info = copies.node(number), copies.infos[number]
    before = bytes(node.data)
    first = HEADER_BYTES + record_bytes(int(copies.source.span(info.base_index, info.base_index + 1)[0]["size"][0]))
    node.data = bytearray(node.data[:HEADER_BYTES] + node.data[first:])  # its first record is missing
    footer = read_footer(before[-FOOTER_BYTES:], len(before), log.header(info))
    assert footer is not None
    node.data[-FOOTER_BYTES:] = encode_footer(footer._replace(bytes=len(node.data) - FOOTER_BYTES))
    node.safe = bytearray(node.data)
    scrub_all(log)
    assert [damage.kind for damage in log.damage] == [DamageKind.SPAN]
    assert mend(log, copies.peer, log.damage[0])
    assert (log.damage, bytes(copies.node(number).data)) == ([], before)
    scrub_all(log)
    copies.whole(log)
    copies.whole(copies.open())


def test_a_segment_that_records_do_not_fit_stays_while_the_peer_lacks_some_of_it(copies: Copies) -> None:
    """A complete segment is not set aside for a partial one."""
    log = copies.open()
    info = copies.infos[1]
    with pytest.raises(BadSegment, match="do not fit"):
        replace_segment(log, open_reader(World(3).disk()), info)
    assert (log.damage, log.segments) == ([], copies.infos)


@pytest.mark.parametrize("scrubbed", [False, True])
@pytest.mark.parametrize("lane", [LANE, LANE + 1])
def test_a_file_with_an_unreadable_header_is_not_adopted(copies: Copies, lane: int, scrubbed: bool) -> None:
    """Records do not name their lane: with its header unreadable, nothing else identifies another lane's file."""
    log = copies.open()
    node, header = copies.node(1), log.header(copies.infos[1])
    damaged = bytearray(encode_header(header._replace(lane=lane)))
    damaged[0] ^= 4
    node.data[:HEADER_BYTES] = damaged
    node.safe = bytearray(node.data)
    if scrubbed:
        scrub_all(log)
    else:
        log = copies.open()
    assert [damage.kind for damage in log.damage] == ([] if lane == LANE else [DamageKind.FILE])
    copies.repair(log)


@pytest.mark.parametrize("how", ["header", "gone", "quarantined"])
def test_a_segment_that_is_set_aside_leaves_no_indexes(copies: Copies, how: str) -> None:
    """They are useless without it, and are restored with the segment."""
    indexes = {copies.path(1, suffix) for suffix in (".index", ".timeindex")}
    assert indexes <= copies.world.names.keys()
    if how == "quarantined":
        log, info = copies.open(), copies.infos[1]
        log.quarantine(info.base_index, info.end_index, DamageKind.FILE, b"")
    elif how == "gone":
        del copies.world.names[copies.path(1)]
        log = copies.open()
    else:
        for place in (0, HEADER_BYTES):  # its header, and the first record, from which it could be rebuilt
            copies.flip(copies.path(1), place)
        log = copies.open()
    assert [damage.kind for damage in log.damage] == [DamageKind.FILE]
    assert not indexes & copies.world.names.keys()
    copies.repair(log)
    assert indexes <= copies.world.names.keys()


def test_a_scrub_continues_after_an_unreadable_part(copies: Copies) -> None:
    """A bad sector is reported; rot in later files is found nevertheless, and in earlier ones in the next round."""
    log, clock, failed, found = copies.open(), ManualClock(), 0, list[int]()
    copies.world.unreadable.add(copies.path(1))
    copies.flip(copies.path(3), 128 + 3)
    scrub = Scrub(clock)
    for _ in range(3 * len(copies.infos)):
        try:
            found += [damage.first for damage in scrub.note([log], scrub.job([log])())]
        except DiskFailed:
            failed += 1
        clock.us = scrub.due_us
    assert found == [copies.infos[3].base_index]
    assert failed == scrub.rounds + 1
    copies.world.unreadable.clear()
    copies.repair(log)


def test_a_scrub_keeps_its_rate_and_continues_where_it_stopped(copies: Copies) -> None:
    """Due times grow with the bytes read; a new scrub continues at a position."""
    log, clock = copies.open(), ManualClock()
    scrub = Scrub(clock, bytes_per_s=1_000)
    assert scrub.job([log])() == []
    assert not scrub.due
    assert scrub.due_us == scrub.checked_bytes * 1_000
    clock.us = scrub.due_us
    assert scrub.due
    again = Scrub(clock, position=scrub.position)
    again.job([log])()

    assert again.position > scrub.position
    assert not Scrub(clock, bytes_per_s=0).due
    assert Scrub(clock).job([])() == []


def test_a_hole_that_reaches_a_drop_is_still_a_hole() -> None:
    """The trimmed part is removed; the missing part above is restored: the copy does not start after the hole."""
    copies = Copies()
    del copies.world.names[copies.path(1)]
    log, gone = copies.open(), copies.infos[1]
    log.drop_below(copies.infos[0].end_index + 1)
    assert log._floor.index == gone.base_index
    assert [(damage.first, damage.end) for damage in log.damage] == [(gone.base_index, gone.end_index)]
    log.close()
    log = copies.open()
    assert [(damage.first, damage.end) for damage in log.damage] == [(gone.base_index, gone.end_index)]
    assert mend(log, copies.peer, log.damage[0])
    assert matches(open_reader(copies.world.disk()), copies.source, gone.base_index, copies.end)


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_hole_whose_start_is_trimmed_everywhere_is_repaired_from_there_on(trimmed: bool) -> None:
    """No peer has all of it any more, and it is not needed; but a peer's answer that it is trimmed is not enough."""
    copies, peers = Copies(), World(3)
    peer = open_log(peers.disk())
    fill(peer, copies.source, 200)
    del copies.world.names[copies.path(0)], copies.world.names[copies.path(1)]
    kept = copies.infos[1]
    peer.drop_below(kept.base_index)
    log = copies.open()
    [damage] = log.damage
    assert damage.first < kept.base_index < damage.end
    assert mend(log, open_reader(peers.disk()), damage, kept.base_index if trimmed else 0) is trimmed
    assert bool(log.damage) is not trimmed
    if trimmed:
        assert log.first == kept.base_index
        assert matches(open_reader(copies.world.disk()), copies.source, kept.base_index, copies.end)


def test_a_tail_does_not_hide_a_segment_that_is_missing_before_others() -> None:
    """It was recorded, and then the copy continued; when a segment of it is lost, no other check would miss it."""
    copies = Copies()
    log = copies.open()
    log.quarantine(START, copies.end, DamageKind.TAIL, b"")
    log.close()
    del copies.world.names[copies.path(1)]
    log, gone = copies.open(), copies.infos[1]
    assert {damage.kind for damage in log.damage} == {DamageKind.TAIL, DamageKind.FILE}
    copies.repair(log)
    assert gone.base_seq in [info.base_seq for info in log.segments]


def test_a_hole_in_two_pieces_is_repaired_though_peers_have_only_its_end() -> None:
    """One piece is wholly trimmed: it is not needed, and does not block the other. A new record covers the old one."""
    copies, peers = Copies(), World(3)
    peer = open_log(peers.disk())
    fill(peer, copies.source, 200)
    first, second, kept = copies.infos[0], copies.infos[1], copies.infos[2]
    log = copies.open()
    log.quarantine(first.base_index, first.end_index, DamageKind.FILE, b"")
    log.quarantine(second.base_index, kept.end_index, DamageKind.FILE, b"")
    peer.drop_below(kept.base_index)
    reader = open_reader(peers.disk())
    for damage in sorted(log.damage):
        assert mend(log, reader, damage, kept.base_index)
    assert log.damage == []
    assert (log.first, log.end) == (kept.base_index, copies.end)
    log.close()
    assert matches(open_reader(copies.world.disk()), copies.source, kept.base_index, copies.end)


def test_a_hole_that_grows_is_one_hole() -> None:
    """A record that covers an earlier one replaces it: otherwise the earlier one would be retried without end."""
    copies = Copies()
    del copies.world.names[copies.path(0)]
    copies.open().close()
    del copies.world.names[copies.path(1)]
    log = copies.open()
    assert [(one.first, one.end) for one in log.damage] == [(START, copies.infos[1].end_index)]
    copies.repair(log)


def test_a_repair_never_takes_the_name_of_an_existing_segment() -> None:
    """Files are named by their first seq: a segment without records would have the name of the next segment."""
    copies, info = Copies(), None
    log = copies.open()
    info = copies.infos[1]
    log.quarantine(info.base_index, info.end_index, DamageKind.FILE, b"")
    before = dict(copies.world.names)
    made = [info._replace(base_seq=copies.infos[2].base_seq)]
    with patch("embarcadero.storage.range_log.RangeLog.finish", lambda self, last: (self.close(), tuple(made))[1]):
        assert not mend(log, copies.peer, log.damage[0])
    assert copies.world.names[copies.path(2)] is before[copies.path(2)]
    assert [one.base_seq for one in log.segments if one.base_seq == copies.infos[2].base_seq]
    copies.repair(log)
