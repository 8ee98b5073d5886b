"""Repairs from a peer and scrubs: what is damaged is found, and comes back with the same bytes."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

import pytest

from embarcadero.errors import BadSegment, DiskFailed
from embarcadero.storage.layout import (
    FOOTER_BYTES,
    HEADER_BYTES,
    encode_footer,
    record_bytes,
    segment_name,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.repair import mend, take_anew
from embarcadero.storage.scrub import Scrub
from embarcadero.storage.segment import read_footer
from embarcadero.storage.writing import DamageKind
from tests.storage.copies import Copies, ManualClock, scrub_all
from tests.storage.crash_disk import Died, World
from tests.storage.records import (
    FOLDER,
    LANE,
    RANGE,
    SMALL,
    START,
    fill,
    open_reader,
)


def test_a_repair_that_another_one_left_behind_is_not_gone_on_with(copies: Copies) -> None:
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


def test_a_repair_that_was_interrupted_and_damaged_begins_anew(copies: Copies) -> None:
    """What is left of it is of no use to anybody."""
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


def test_a_repair_for_which_a_peer_is_no_help_leaves_no_file_open(copies: Copies) -> None:
    """It is tried again and again, until a peer has what is missing."""
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
    """All that is here comes after the cut. A crash on the way leaves a copy that lacks something, and says so."""
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


def test_a_copy_is_not_cut_in_what_is_missing(copies: Copies) -> None:
    """Nobody could say where to go on."""
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
def test_what_an_empty_last_segment_follows_is_not_the_end(copies: Copies, gone: bool) -> None:
    """A range that was sealed right after a segment was rolled over by age: the one before gets its own footer back."""
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


def test_a_segment_that_says_it_is_the_last_is_not_if_another_follows(copies: Copies) -> None:
    """Such footers were written once: what they vouch for is a part of the copy all the same."""
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
def test_a_segment_in_which_a_peers_records_do_not_fit_is_taken_anew(copies: Copies, number: int) -> None:
    """Its header is ours, and what follows is not: what was written there belongs to another file."""
    log = copies.open()
    log.seal(copies.end)
    node, info = copies.node(number), copies.infos[number]
    before = bytes(node.data)
    first = HEADER_BYTES + record_bytes(int(copies.source.span(info.base_index, info.base_index + 1)[0]["size"][0]))
    node.data = bytearray(node.data[:HEADER_BYTES] + node.data[first:])  # its first record is not there
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


def test_a_segment_in_which_records_do_not_fit_stays_while_the_peer_lacks_some_of_it(copies: Copies) -> None:
    """Nothing is put aside for a part."""
    log = copies.open()
    info = copies.infos[1]
    with pytest.raises(BadSegment, match="do not fit"):
        take_anew(log, open_reader(World(3).disk()), info)
    assert (log.damage, log.segments) == ([], copies.infos)


def test_a_scrub_goes_on_behind_what_cannot_be_read(copies: Copies) -> None:
    """A bad sector is told of; rot in later files is found all the same, and in earlier ones in the next round."""
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


def test_a_scrub_keeps_to_its_rate_and_goes_on_where_it_was(copies: Copies) -> None:
    """Due times grow with the bytes read; a new scrub continues from a place."""
    log, clock = copies.open(), ManualClock()
    scrub = Scrub(clock, bytes_per_s=1_000)
    assert scrub.job([log])() == []
    assert not scrub.due
    assert scrub.due_us == scrub.checked_bytes * 1_000
    clock.us = scrub.due_us
    assert scrub.due
    again = Scrub(clock, place=scrub.place)
    again.job([log])()

    assert again.place > scrub.place
    assert not Scrub(clock, bytes_per_s=0).due
    assert Scrub(clock).job([])() == []
