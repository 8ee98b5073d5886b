"""Faulty files: full, read-only, failing, deleted, swapped, foreign, flipped. No wrong record is ever served."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy

import pytest

from embarcadero.errors import BadSegment, DiskFailed, DiskFull
from embarcadero.storage.layout import (
    HEADER,
    MARK_FILE,
    START_FILE,
    FilePosition,
    begun_name,
    encode_position,
    segment_name,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.recovery import remove_range
from embarcadero.storage.repair import copy_span, heal_tails, mend
from embarcadero.storage.segment import DamageKind
from embarcadero.storage.verify import verify_folder
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.bugs.table import injected
from tests.storage.copies import COUNT, Copies, scrub_all
from tests.storage.crash_disk import Died, World
from tests.storage.records import (
    FOLDER,
    LANE,
    RANGE,
    SMALL,
    START,
    START_SEQ,
    Source,
    fill,
    matches,
    open_log,
    open_reader,
)


def test_a_full_disk_stops_appending_and_nothing_else(copies: Copies) -> None:
    """DiskFull, and stored records stay correct; with free space the log continues at its end."""
    log = copies.open()
    for room in range(0, 3_000, 137):
        copies.world.room = room
        with pytest.raises(DiskFull):
            fill(log, copies.source, 60, sync=False)
        copies.world.room = None
        assert matches(open_reader(copies.world.disk()), copies.source, START, log.end)
    fill(log, copies.source, 50)
    log.close()

    assert (copies.open().end, copies.open().damage) == (log.end, [])


def test_a_read_only_disk_is_reported_as_such(copies: Copies) -> None:
    """Appending fails with a typed error; reading continues."""
    log = copies.open()
    copies.world.read_only = True
    with pytest.raises(DiskFailed):
        fill(log, copies.source, 1)

    assert matches(open_reader(copies.world.disk()), copies.source, START, copies.end)


def test_after_a_failed_sync_nothing_above_it_counts(copies: Copies) -> None:
    """No later sync vouches for bytes that the failed one may have lost.

    After a cut to the certain end, syncs count.
    """
    log = copies.open()
    fill(log, copies.source, 10, sync=False)
    copies.world.syncs_to_fail = 1
    with pytest.raises(DiskFailed):
        log.sync_job()()
    assert log.failed
    assert log.synced == copies.end
    with pytest.raises(DiskFailed):
        log.sync_job()()
    log.cut(log.synced)
    fill(log, copies.source, 10)
    copies.world.crash()

    assert open_log(copies.world.disk()).end == copies.end + 10
    assert matches(open_reader(copies.world.disk()), copies.source, START, copies.end + 10)


def test_a_restart_after_a_failed_sync_trusts_no_clean_page(copies: Copies) -> None:
    """The process ends instead: recovery writes the claimed records again, so a crash after that loses nothing."""
    log = copies.open()
    fill(log, copies.source, 10, sync=False)
    copies.world.syncs_to_fail = 1
    with pytest.raises(DiskFailed):
        log.sync_job()()
    claimed = copies.open().synced
    copies.world.crash()

    assert copies.open().end >= claimed
    assert not copies.open().damage


def test_a_file_that_cannot_be_read_is_a_typed_error(copies: Copies) -> None:
    """EIO on a finished segment: DiskFailed for its records, the others are served."""
    copies.world.unreadable.add(copies.path(1))
    reader = open_reader(copies.world.disk())
    with pytest.raises(DiskFailed):
        reader.read(copies.infos[1].base_index, copies.end, 10)

    last = copies.infos[-1]
    assert matches(reader, copies.source, last.base_index, copies.end)


@pytest.mark.parametrize("number", [0, 1, 4, -1])
def test_a_deleted_segment_is_noticed_at_start(copies: Copies, number: int) -> None:
    """By names alone: first, middle or last; it is restored from a peer."""
    del copies.world.names[copies.path(number)]
    log = copies.open()

    assert log.damage
    assert log.damage[0].first == copies.infos[number].base_index
    copies.served_right()
    copies.repair(log)


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("harm", ["deleted", "header", "entry"])
def test_readers_do_not_take_missing_records_for_dropped(copies: Copies, number: int, harm: str) -> None:
    """Lookups never answer with a later batch, and the copy does not start later, so readers ask another copy."""
    path, info = copies.path(number), copies.infos[number]
    if harm == "deleted":
        del copies.world.names[path]
    else:
        copies.flip(path, 20 if harm == "header" else 128 + 20)
    reader = open_reader(copies.world.disk())
    entries, _ = copies.source.span(START, copies.end)
    for entry in entries[entries["count"] > 0]:
        index, found = int(entry["index"]), set[str]()
        looks = {"seq": reader.find_seq, "append_us": reader.find_time}
        for field, look in looks.items():
            with suppress(BadSegment):
                at = look(int(entry[field]))
                assert at is not None
                assert at <= index, "it would be skipped"
                found.add(field)
        assert "seq" in found or info.base_index <= index < info.end_index
    if number == 0:
        with pytest.raises(BadSegment):
            reader.read(START, copies.end, 1)
        if harm == "deleted":
            with pytest.raises(BadSegment):
                assert reader.first


def test_a_first_segment_lost_with_the_start_file_was_not_dropped(copies: Copies) -> None:
    """The start of such a copy is unknown: readers, and peers that repair from it, do not get Trimmed."""
    del copies.world.names[f"{FOLDER}/{START_FILE}"]
    assert open_reader(copies.world.disk()).first == START

    del copies.world.names[copies.path(0)]
    reader = open_reader(copies.world.disk())
    with pytest.raises(BadSegment, match="start file is missing"):
        assert reader.first
    with pytest.raises(BadSegment):
        reader.read(START, copies.end, 1)
    copies.repair(copies.open())


def test_all_segments_deleted_is_not_an_empty_range(copies: Copies) -> None:
    """The start file remembers that there were records."""
    for number in range(len(copies.infos)):
        del copies.world.names[copies.path(number)]
    log = copies.open()

    assert [damage.kind for damage in log.damage] == [DamageKind.TAIL]
    copies.repair(log)


def test_swapped_segments_are_noticed_at_start(copies: Copies) -> None:
    """Two files under each other's names: both are set aside and restored from a peer."""
    names = copies.world.names
    one, two = copies.path(1), copies.path(3)
    names[one], names[two] = names[two], names[one]
    log = copies.open()

    assert len(log.damage) == 2
    copies.served_right()
    copies.repair(log)


def test_a_segment_of_another_range_is_set_aside(copies: Copies) -> None:
    """A file of another lane or range under a valid name."""
    other = World(9)
    log = RangeLog.create(other.disk(), FOLDER, LANE + 1, RANGE, START, START_SEQ, SMALL)
    fill(log, copies.source, 50)
    copies.world.names[copies.path(0)] = other.names[copies.path(0)]
    log = copies.open()

    assert (log.damage[0].first, log.damage[0].kind) == (START, DamageKind.FILE)
    copies.served_right()
    copies.repair(log)


def test_an_index_of_another_segment_is_not_used(copies: Copies) -> None:
    """Its end does not fit: readers work without it, a scrub rebuilds it."""
    names = copies.world.names
    for suffix in (".index", ".timeindex"):
        names[copies.path(1, suffix)] = deepcopy(names[copies.path(2, suffix)])
    del names[copies.path(3, ".index")]
    names[copies.path(4, ".index")].data.extend(b"xx")
    reader = open_reader(copies.world.disk())
    entries, _ = copies.source.span(START, copies.end)
    for entry in entries[entries["count"] > 0]:
        assert reader.find_seq(int(entry["seq"])) == int(entry["index"])
    log = copies.open()
    report = verify_folder(copies.world.disk())
    assert sum(finding.file.endswith("index") for finding in report.findings) == 4
    scrub_all(log)

    report = verify_folder(copies.world.disk())
    assert not [finding for finding in report.findings if finding.file.endswith("index")]


@pytest.mark.parametrize("place", range(0, 200, 23))
def test_a_flipped_bit_in_an_index_misleads_no_reader(copies: Copies, place: int) -> None:
    """A reader that follows an index entry checks its target."""
    path = copies.path(2, ".index")
    copies.flip(path, place % len(copies.world.names[path].data))
    reader = open_reader(copies.world.disk())
    entries, _ = copies.source.span(START, copies.end)
    for entry in entries[entries["count"] > 0]:
        assert reader.find_seq(int(entry["seq"])) == int(entry["index"])
        found = reader.entry(int(entry["index"]))
        assert found is not None
        assert found.tobytes() == entry.tobytes()


@pytest.mark.parametrize("number", [0, 2, -1])
@pytest.mark.parametrize("place", [0, 9, 20, 34, 41, 50, 100, 126])
def test_a_flipped_bit_in_a_header_is_repaired(copies: Copies, number: int, place: int) -> None:
    """The first record and the names contain everything that a header has."""
    copies.flip(copies.path(number), place)
    log = copies.open()

    copies.served_right()
    copies.whole(log)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.999])
def test_a_flipped_bit_in_the_active_segment_is_never_cut(copies: Copies, part: float) -> None:
    """Damage, not a torn tail, even in the last record: the file shows that it was written."""
    copies.flip(copies.path(-1), 128 + int(part * (copies.infos[-1].bytes - 129)) // 64 * 64 + 3)
    log = copies.open()

    assert log.damage
    copies.served_right()
    copies.repair(log)


@pytest.mark.parametrize("records", [1, 3])
def test_a_hole_in_synced_records_is_damage(copies: Copies, records: int) -> None:
    """Zeros look like the effect of a crash; the mark shows that the part was synced."""
    info = copies.infos[-1]
    entries, _ = copies.source.span(info.base_index, info.base_index + records)
    size = sum(64 + -(-one // 64) * 64 for one in entries["size"].tolist())
    copies.node(-1).data[128 : 128 + size] = bytes(size)
    log = copies.open()

    assert [damage[:3] for damage in log.damage] == [
        (info.base_index, info.base_index + records, DamageKind.SPAN)
    ]  # fmt: skip
    copies.repair(log)


def test_records_that_were_never_synced_are_cut_after_damage_too(copies: Copies) -> None:
    """A segment with rot in it rolled over; all but the name of the next one was lost, and none of it was promised."""
    log, active = copies.open(), copies.infos[-1]
    while log.segments[-1].base_seq == active.base_seq:
        fill(log, copies.source, 7, sync=False)
    copies.node(-1).data[active.bytes :] = bytes(len(copies.node(-1).data) - active.bytes)
    copies.flip(copies.path(-1), 128 + 3)
    del copies.world.names[f"{FOLDER}/{segment_name(log.segments[-1].base_seq)}"].data[128:]
    log = copies.open()

    assert log.end == copies.end
    assert [damage.first for damage in log.damage] == [active.base_index]
    copies.repair(log)


@pytest.mark.parametrize("torn_bytes", [0, 64])
def test_a_missing_end_after_damage_is_noticed(copies: Copies, torn_bytes: int) -> None:
    """A later segment shows that it existed. A repair of the damage alone does not complete the copy."""
    info = copies.infos[2]
    entries, _ = copies.source.span(info.base_index, info.end_index - 3)
    size = sum(64 + -(-one // 64) * 64 for one in entries["size"].tolist())
    copies.flip(copies.path(2), 128 + 3)
    del copies.node(2).data[128 + size - torn_bytes :]
    log = copies.open()
    one, two = log.damage
    assert (one.first, two.end) == (info.base_index, info.end_index)
    assert one.end < two.first
    log.damage = [one]
    assert not mend(log, copies.peer, one)
    log.damage = [one, two]
    copies.repair(log)
    assert log.segments == copies.infos


def test_a_segment_that_lacks_only_its_footer_is_known_as_before(copies: Copies) -> None:
    """Its footer is rebuilt, and belongs to none of its records."""
    info = copies.infos[2]
    del copies.node(2).data[info.bytes :]
    log = copies.open()

    assert log.segments == copies.infos
    log.close()
    copies.whole(copies.open())


def test_a_recovery_that_cuts_damage_is_detected(copies: Copies) -> None:
    """The injected bug: synced records are gone, and nothing reports it."""
    copies.flip(copies.path(-1), 128 + 3)
    with injected("damage-cut"):
        log = copies.open()

    assert not log.damage
    assert log.end == copies.infos[-1].base_index < copies.end


def test_damage_survives_restarts_until_it_is_repaired(copies: Copies) -> None:
    """A second start still knows, though the evidence was set aside."""
    copies.flip(copies.path(-1), copies.infos[-1].bytes - 3)
    first = copies.open().damage
    copies.world.crash()

    assert copies.open().damage == first
    copies.repair(copies.open())


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("part", [0.0, 0.4, 0.99])
def test_rot_in_a_finished_segment_is_found_by_a_scrub(copies: Copies, number: int, part: float) -> None:
    """It is never served meanwhile; quarantined; repaired in place."""
    copies.flip(copies.path(number), 128 + int(part * (copies.infos[number].bytes - 130)))
    log = copies.open()
    assert not log.damage
    copies.served_right()
    scrub_all(log)

    assert len(log.damage) <= 1
    for damage in log.damage:  # padding may have been hit, which belongs to no record
        assert copies.infos[number].base_index <= damage.first < damage.end <= copies.infos[number].end_index
    copies.repair(log)


@pytest.mark.parametrize("syncs", [None, *range(5)])
def test_damage_is_dropped_with_its_segment(copies: Copies, syncs: int | None) -> None:
    """Permanently: a later start does not find it either, though a crash came between a drop and its record."""
    copies.flip(copies.path(0), copies.infos[0].bytes // 2)
    log = copies.open()
    scrub_all(log)
    assert len(log.damage) == 1
    copies.world.syncs_to_live = syncs
    with suppress(Died):
        log.drop_below(copies.infos[0].end_index)
        assert not log.damage
    copies.world.syncs_to_live = None
    copies.world.crash()
    log = copies.open()
    assert not [one for one in log.damage if one.end <= log.first]
    log.drop_below(copies.infos[0].end_index)
    assert not copies.open().damage
    assert (log.first, log.end) == (copies.infos[1].base_index, copies.end)


def test_missing_records_below_a_trim_are_no_loss(copies: Copies) -> None:
    """A trimmed copy that lost its start file seems to lack its first segments: the trim shows that it does not."""
    log, first = copies.open(), copies.infos[2].base_index
    log.drop_below(first)
    log.close()
    copies.world.names[f"{FOLDER}/{START_FILE}"].data.clear()
    log = copies.open()
    assert [damage[:3] for damage in log.damage] == [(START, first, DamageKind.FILE)]
    log.drop_below(first - 1)
    assert log.damage
    log.drop_below(first)
    assert not log.damage
    assert not copies.open().damage


def test_a_lost_tail_is_not_trimmed_away(copies: Copies) -> None:
    """Its length is unknown: it may have extended above everything that is here now."""
    log = copies.open()
    log.quarantine(START + 1, START + 2, DamageKind.TAIL, b"")
    log.drop_below(copies.infos[2].base_index)
    assert log.first > START + 2
    assert [damage.kind for damage in log.damage] == [DamageKind.TAIL]
    assert [damage.kind for damage in copies.open().damage] == [DamageKind.TAIL]


@pytest.mark.parametrize("harm", ["delete", "swap", "header", "footer"])
def test_damage_to_a_finished_segment_at_run_time_is_found_by_a_scrub(copies: Copies, harm: str) -> None:
    """Deleted, swapped, or with a damaged header or footer, while the replica runs."""
    log = copies.open()
    names = copies.world.names
    if harm == "delete":
        del names[copies.path(2)]
    elif harm == "swap":
        names[copies.path(2)] = deepcopy(names[copies.path(1)])
    else:
        copies.flip(copies.path(2), 20 if harm == "header" else len(copies.node(2).data) - 20)
    copies.served_right()
    scrub_all(log)

    assert [damage.kind for damage in log.damage] == ([DamageKind.FILE] if harm in {"delete", "swap"} else [])
    copies.repair(log)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_copy_whose_folder_is_gone_is_not_mistaken_for_a_new_one(copies: Copies, emptied: bool) -> None:
    """Or whose files are all gone: it lacks records, and their number is unknown until a peer has answered."""
    names = copies.world.names
    for path in [path for path in names if path.startswith(f"{FOLDER}/") or (path == FOLDER and not emptied)]:
        del names[path]
    log = copies.open()
    assert [damage.kind for damage in log.damage] == [DamageKind.TAIL]
    assert (log.first, log.end) == (START, START)
    copies.repair(log)


@pytest.mark.parametrize("seed", range(8))
def test_a_missing_folder_is_noticed_after_a_loss_of_power(seed: int) -> None:
    """The start of the copy is recorded on the disk before any process relies on the copy."""
    world = World(seed)
    fill(open_log(world.disk()), Source(), COUNT)
    world.crash()
    for path in [path for path in world.names if path.startswith(FOLDER)]:
        del world.names[path]
    assert [damage.kind for damage in open_log(world.disk()).damage] == [DamageKind.TAIL]


def test_a_removed_copy_may_start_again(copies: Copies) -> None:
    """Removed on purpose, by its replica: then nothing is missing."""
    copies.open().close()
    remove_range(copies.world.disk(), FOLDER)
    assert not [path for path in copies.world.names if path.startswith((FOLDER, begun_name(FOLDER)))]
    assert not copies.open().damage


def test_a_copy_that_starts_later_since_the_rest_is_trimmed_forgets_nothing(copies: Copies) -> None:
    """The length of the lost tail is unknown: it is still missing. A crash during this makes no difference."""
    names = copies.world.names
    for path in [path for path in names if path.startswith(f"{FOLDER}/")]:
        del names[path]
    index = copies.infos[1].base_index
    for syncs in (0, 1, 2, 3, 4, 5, None):
        log = copies.open()
        copies.world.syncs_to_live = syncs
        with suppress(Died):
            log.begin_at(index, copies.infos[1].base_seq)
        copies.world.syncs_to_live = None
        copies.world.crash()
        assert [damage.kind for damage in copies.open().damage] == [DamageKind.TAIL] * len(copies.open().damage)
        assert copies.open().damage
    log = copies.open()
    assert (log.first, log.end) == (index, index)
    copy_span(copies.peer, log, copies.end)
    log.sync_job()()
    heal_tails(log, copies.end)
    assert not copies.open().damage
    assert matches(open_reader(copies.world.disk()), copies.source, index, copies.end)


def test_a_newer_format_is_refused(copies: Copies) -> None:
    """Not set aside, not overwritten: the hint names the remedy."""
    node = copies.node(0)
    row = bytearray(node.data[: HEADER.itemsize])
    row[8] = 2
    row[-4:] = payload_crc(bytes(row[:-4])).to_bytes(4, "little")
    node.data[: HEADER.itemsize] = row

    with pytest.raises(BadSegment, match="format version 2"):
        copies.open()
    with pytest.raises(BadSegment, match="format version 2"):
        open_reader(copies.world.disk()).read(START, START + 1, 10)


@pytest.mark.parametrize("name", [START_FILE, MARK_FILE])
@pytest.mark.parametrize("harm", [lambda data: data.clear(), lambda data: data.__setitem__(9, data[9] ^ 1)])
def test_small_files_may_be_lost(copies: Copies, name: str, harm: Callable[[bytearray], None]) -> None:
    """Start file and mark: the segments contain the same facts."""
    harm(copies.world.names[f"{FOLDER}/{name}"].data)
    copies.whole(copies.open())
    copies.whole(copies.open())


@pytest.mark.parametrize("name", [START_FILE, MARK_FILE])
def test_small_files_of_another_range_are_not_trusted(copies: Copies, name: str) -> None:
    """A disk that wrote a sector to a wrong position: it is intact, but belongs to another range."""
    other = FilePosition(START + COUNT + 9_000, START_SEQ + 900_000, 128, LANE, RANGE + 1)
    copies.world.names[f"{FOLDER}/{name}"].data[:] = encode_position(other, name)
    copies.whole(copies.open())


def test_start_file_and_mark_are_not_confused(copies: Copies) -> None:
    """Swapped names: the mark's position would be a start after everything."""
    names = copies.world.names
    start, mark = (names[f"{FOLDER}/{name}"] for name in (START_FILE, MARK_FILE))
    start.data[:], mark.data[:] = bytes(mark.data), bytes(start.data)
    copies.whole(copies.open())
    copies.whole(copies.open())


@pytest.mark.parametrize("junk", [b"\xff" * 100, b"x", bytes(1_000), b"ab" * 40_000])
def test_a_torn_tail_is_cut(copies: Copies, junk: bytes) -> None:
    """Bytes after the last record that are no record, and half a record."""
    node = copies.node(-1)
    node.data += junk
    log = copies.open()
    copies.whole(log)
    entries, payloads = copies.source.span(copies.end, copies.end + 3)
    log.append(entries, payloads)
    size = len(node.data)
    log.close()
    node.truncate(size - len(payloads[-1]) // 2 - 1)

    assert copies.open().end == copies.end + 2
    assert not copies.open().damage
