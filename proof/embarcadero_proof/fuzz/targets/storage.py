"""A replica's files after an accident, or after changes by hand: recovery, readers, verification, repair."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Final

import msgspec
import numpy as np

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries, seal
from embarcadero.limits import LINE_BYTES, SCAN_BYTES, SESSIONS_PER_TOPIC_MAX
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import CheckpointWriter, parse_checkpoint, read_checkpoint, restore
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable
from embarcadero.storage import folder, layout
from embarcadero.storage.folder import IDENTITY_FILE, Identity, open_folder, read_identity
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.repair import copy_span, heal_tails, mend
from embarcadero.storage.segment import RangeSettings
from embarcadero.storage.verify import verify_folder
from embarcadero.types import EntryKind, Topic
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.fuzz.archive import MENDED, Files, archive_mutation, pack, unpack
from embarcadero_proof.fuzz.disk import PlainDisk
from embarcadero_proof.fuzz.samples import US
from embarcadero_proof.fuzz.target import Inputs, Target, agree
from embarcadero_proof.fuzz.world import PlainFabric

LANE, NUMBER = 7, 2
FOLDER: Final = layout.range_folder(LANE, NUMBER)
CLUSTER: Final = "0badcafe"
START, START_SEQ, COUNT = 100, 1_000, 48
TOPIC_ID = 11
SETTINGS: Final = RangeSettings(cluster=CLUSTER, segment_bytes=4_096, index_every_bytes=512)


# --- the one true order -----------------------------------------------------------------------------------------------
@cache
def truth() -> tuple[Entries, list[bytes]]:
    """Return records of the true order: every served record must be one of these, at its position."""
    rng = Random(5)
    entries, payloads, seq = np.zeros(COUNT, dtype=ORDER), [], START_SEQ
    for number in range(COUNT):
        control = rng.random() < 0.2
        payload = b"" if control else rng.randbytes(rng.randrange(1, 400))
        entries["index"][number], entries["seq"][number] = START + number, seq
        entries["append_us"][number], entries["size"][number] = US + number // 2, len(payload)
        entries["kind"][number] = EntryKind.SESSION_OPEN if control else EntryKind.BATCH
        entries["count"][number] = 0 if control else rng.randrange(1, 9)
        entries["crc"][number] = payload_crc(payload)
        payloads.append(payload)
        seq += int(entries["count"][number])
    return seal(entries), payloads


def _log(disk: PlainDisk) -> RangeLog:
    return RangeLog.recover(disk, FOLDER, LANE, NUMBER, START, START_SEQ, SETTINGS)


def _written(count: int, sealed: bool = False, dropped: int = 0) -> PlainDisk:
    disk = PlainDisk()
    open_folder(disk, CLUSTER, 0, 1)
    log = _log(disk)
    entries, payloads = truth()
    for first in range(0, count, 5):
        stop = min(first + 5, count)
        log.append(entries[first:stop].copy(), payloads[first:stop])
        log.sync_job()()
    if sealed:
        log.seal(START + count)
    if dropped:
        log.drop_below(START + dropped)
    log.close()
    folder.write_checkpoint(disk, layout.lane_folder(LANE), START + 3, session_table(), TOPIC_ID)
    return disk


@cache
def session_table() -> bytes:
    """Return a real checkpoint of a lane's sessions."""
    fabric = PlainFabric()
    order = LaneOrder(Topic(name="t", lane=LANE), SessionTable(16), ReorderBuffer(8))
    for handle in (0, 1):
        order.table.open(handle, 40 + handle, US, None, False)
    CheckpointWriter(fabric, "checkpoint", 16).write(order, US)
    found = read_checkpoint(fabric, "checkpoint")
    return found.data() if found is not None else b""


def _folders() -> Inputs:
    whole = [_written(COUNT), _written(COUNT, sealed=True), _written(7), _written(COUNT, dropped=20)]
    return [pack(disk.files) for disk in whole]


# --- mending ----------------------------------------------------------------------------------------------------------
def mend_file(name: str, data: bytes, rng: Random) -> bytes:
    """Correct the checksums of a changed file: of headers, footers, entries, start and mark files, identities."""
    if name.endswith(layout.LOG):
        return _mend_segment(data, rng)
    if name.endswith(IDENTITY_FILE):
        return _mend_identity(data)
    if name.endswith(".checkpoint"):
        return _mend_checkpoint(data)
    if name.endswith((layout.START_FILE, layout.MARK_FILE)) and len(data) >= LINE_BYTES:
        return _checked(data[: LINE_BYTES - 4])
    return data


def _checked(data: bytes) -> bytes:
    return data + payload_crc(data).to_bytes(4, "little")


def _mend_segment(data: bytes, rng: Random) -> bytes:
    made = bytearray(data)
    if len(made) >= layout.HEADER_BYTES and rng.random() < 0.5:
        made[: layout.HEADER_BYTES] = _checked(bytes(made[: layout.HEADER_BYTES - 4]))
    if len(made) % LINE_BYTES == layout.FOOTER_BYTES % LINE_BYTES and rng.random() < 0.7:
        made[-layout.FOOTER_BYTES :] = _checked(bytes(made[-layout.FOOTER_BYTES : -4]))
    position = layout.HEADER_BYTES
    while position + LINE_BYTES <= len(made):
        entry = np.frombuffer(bytes(made[position : position + LINE_BYTES]), dtype=ORDER).copy()
        size = int(entry["size"][0])
        if not entry["index"][0] or size > len(made):
            position += LINE_BYTES
            continue
        if rng.random() < 0.8:
            entry["crc"] = payload_crc(bytes(made[position + LINE_BYTES : position + LINE_BYTES + size]))
            made[position : position + LINE_BYTES] = seal(entry).tobytes()
        position += layout.record_bytes(size)
    return bytes(made)


def _mend_identity(data: bytes) -> bytes:
    try:
        found = msgspec.json.decode(data, type=Identity)
    except (msgspec.MsgspecError, ValueError):
        return data
    bare = msgspec.structs.replace(found, check=0)
    return msgspec.json.encode(msgspec.structs.replace(bare, check=payload_crc(msgspec.json.encode(bare))))


def _mend_checkpoint(data: bytes) -> bytes:
    """Correct both headers: the file's, and the table's in it."""
    if len(data) < LINE_BYTES + 128:
        return data
    head, table = bytearray(data[:LINE_BYTES]), bytearray(data[LINE_BYTES:])
    rows = table[128:]
    table[12:16] = (len(rows) // 128).to_bytes(4, "little")
    table[64:68] = payload_crc(bytes(rows)).to_bytes(4, "little")
    table[:128] = _checked(bytes(table[:124]))
    head[12:16], head[24:32] = payload_crc(bytes(table)).to_bytes(4, "little"), len(table).to_bytes(8, "little")
    return _checked(bytes(head[:-4])) + bytes(table)


# --- recovery ---------------------------------------------------------------------------------------------------------
def _serve(reader: RangeReader, first: int, end: int, true: bool) -> tuple[set[int], set[str]]:
    """Read with a reader; each record must be the true one. Missing records must be typed errors."""
    entries, payloads = truth()
    given: set[int] = set()
    refused: set[str] = set()
    index = first
    while index < end:
        try:
            found, contents = reader.read(index, end, 4_000)
        except EmbarcaderoError as error:
            refused.add(type(error).__name__)
            index += 1
            continue
        if not len(found):
            index += 1
            continue
        for number, entry in enumerate(found):
            row = index - START + number
            agree(int(entry["index"]) == index + number, f"asked for {index + number}, got {entry['index']}")
            if true:
                same = 0 <= row < COUNT and entry.tobytes() == entries[row].tobytes()
                same = same and bytes(contents[number]) == payloads[row]
                agree(same, f"record {index + number} is not the true one")
            given.add(index + number)
        index += len(found)
    return given, refused


def _recover(data: bytes) -> str:
    """Check that recovery serves true records, and records the rest below its end as damage, which a peer repairs."""
    files = unpack(data)
    disk, true = PlainDisk(files), MENDED not in files
    log = _log(disk)
    low, high = log.first, min(log.end, START + 2 * COUNT)
    given, refused = _serve(RangeReader(disk, FOLDER, LANE, NUMBER, START), max(START, low), high, true)
    intact = true and _footers_intact(files)
    if intact:  # after damage in an unfinished segment a reader may find nothing until the repair
        missing = set(range(max(START, low), high)) - given
        hurt = min((one.first for one in log.damage), default=high)
        agree(not missing or min(missing) >= hurt, f"{sorted(missing)[:4]} are neither served nor recorded as damage")
    again = _log(disk)
    agree((again.end, again.first) == (log.end, log.first), "a second recovery has another result")
    healed = true and _repaired(disk, again, intact)
    return f"{len(log.damage)} damaged, {sorted(refused)}, {log.sealed}, {healed}"


def _footers_intact(files: Files) -> bool:
    """Return whether no segment with a footer was changed: those are trusted until they are read or scrubbed.

    A damaged header that can be rebuilt from the first record counts as whole.
    """
    whole = [unpack(one) for one in _pristine()]
    for name, data in files.items():
        if name.endswith(layout.LOG) and data and all(other.get(name) != data for other in whole):
            head = data[: layout.HEADER_BYTES]
            right = [other[name][: layout.HEADER_BYTES] for other in whole if name in other]
            headers = [layout.decode_header(one, name) for one in right]
            known = layout.decode_header(head, name) or any(layout.was_header(head, one) for one in headers if one)
            if known and layout.decode_footer(data[-layout.FOOTER_BYTES :]) is not None:
                return False
    return True


@cache
def _pristine() -> tuple[bytes, ...]:
    return tuple(_folders())


def _repaired(disk: PlainDisk, log: RangeLog, intact: bool) -> bool:
    """Return whether a copy becomes whole with a good peer; otherwise it must still report its missing records."""
    peer = RangeReader(PlainDisk(unpack(_pristine()[1])), FOLDER, LANE, NUMBER, START)
    try:
        for damage in list(log.damage):
            if damage.end <= START + COUNT:
                mend(log, peer, damage)
        if not log.sealed and log.end <= START + COUNT:
            copy_span(peer, log, START + COUNT)
            log.sync_job()()
            heal_tails(log, START + COUNT)
    except EmbarcaderoError:
        return False
    finally:
        log.close()
    first, end = max(START, log.first), min(START + COUNT, log.end)
    given, _ = _serve(RangeReader(disk, FOLDER, LANE, NUMBER, START), first, end, true=True)
    if intact and not log.damage:
        agree(len(given) == max(0, end - first), "a repaired copy lacks records, and does not report it")
    return not log.damage


def _read(data: bytes) -> str:
    """Read as in another process, over files that were not recovered, and search by seq and time."""
    files = unpack(data)
    disk, true = PlainDisk(files), MENDED not in files
    reader = RangeReader(disk, FOLDER, LANE, NUMBER, START)
    given, refused = _serve(reader, START - 1, START + COUNT + 2, true)
    entries, _ = truth()
    for number in (0, 1, COUNT // 2, COUNT - 1):
        seq, us = int(entries["seq"][number]), int(entries["append_us"][number])
        for ask, value in ((reader.find_seq, seq), (reader.find_time, us), (reader.find_time, 0), (reader.find_seq, 1)):
            try:
                ask(value)
            except EmbarcaderoError as error:
                refused.add(type(error).__name__)
    try:
        points, _ = reader.points(START, START + COUNT, 700, SCAN_BYTES)
        agree(all(point.bytes >= 0 for point in points), "a piece with a negative size")
    except EmbarcaderoError as error:
        refused.add(type(error).__name__)
    return f"{len(given) // 12} dozen, {sorted(refused)}"


def _verify(data: bytes) -> str:
    """Verify a replica's folder offline, which finds damage and never fails."""
    report = verify_folder(PlainDisk(unpack(data)), "")
    return f"{min(report.errors, 3)} errors"


def _identity(data: bytes) -> str:
    disk = PlainDisk({IDENTITY_FILE: data})
    found = open_folder(disk, CLUSTER, 0, 2)
    agree(read_identity(disk) == found and found.generation >= 2, "an identity that does not read back")
    return "ours"


def _mend_identity_target(data: bytes, _rng: Random) -> bytes:
    return _mend_identity(data)


def _sessions(data: bytes) -> str:
    """Restore a checkpoint file: its table becomes a lane's sessions, or it is damaged."""
    lane = layout.lane_folder(LANE)
    disk = PlainDisk({f"{lane}/sessions-{START + 3:020d}.checkpoint": data})
    found = folder.newest_checkpoint(disk, lane, START + 9, (TOPIC_ID,))
    if found is None:
        return "damaged"
    checkpoint = parse_checkpoint(found[1])
    if checkpoint is None:
        return "no table"
    agree(len(checkpoint.rows) <= SESSIONS_PER_TOPIC_MAX, "more sessions than there may be")
    for order in (2, 5):
        lane_order = LaneOrder(Topic(name="t", lane=LANE, order=order), SessionTable(16), ReorderBuffer(8))
        restore(lane_order, checkpoint, US + 1)
    return f"{len(checkpoint.rows)} sessions"


def _checkpoint_files() -> Inputs:
    return [next(data for name, data in unpack(one).items() if name.endswith(".checkpoint")) for one in _folders()[:1]]


_folder_mutation = archive_mutation(mend_file)
STORAGE: Final = (
    Target("recovery", "a range's folder, recovered, read, repaired from a peer", _folders, _recover, _folder_mutation,
           archive=True),
    Target("segments", "a reader over files that were not recovered; indexes by seq and time", _folders, _read,
           _folder_mutation, archive=True),
    Target("verify", "offline verification of a replica's folder", _folders, _verify, _folder_mutation, archive=True),
    Target("session-checkpoints", "session tables on disk, restored", _checkpoint_files, _sessions,
           mend=lambda data, _rng: _mend_checkpoint(data)),
    Target("identities", "the identity of a replica's folder", lambda: [_written(0).files[IDENTITY_FILE]], _identity,
           mend=_mend_identity_target),
)  # fmt: skip
