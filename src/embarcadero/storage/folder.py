"""The identity of a replica's folder, and the session checkpoints in it.

A replica writes only into its own folder: its cluster, its number, a known format. `disk` is a random id created with
the folder. A wiped disk has another id, so a replica that lost everything is never mistaken for an empty one.

A session checkpoint is a lane's session table as of a durable index, next to the lane's ranges. It has the id of its
topic, because lane numbers are reused after a restart. If a topic was deleted and a crash left its checkpoint behind,
the file may lie in the folder of the lane's next topic. The id shows that it does not belong there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from embarcadero.env import Disk, Missing
from embarcadero.errors import BadValue, DiskFailed, WrongFolder
from embarcadero.limits import KIB, LINE_BYTES, SESSIONS_FILE_BYTES_MAX
from embarcadero.storage.disk import join, read_whole, write_whole
from embarcadero.storage.layout import FORMAT_VERSION, decode_checkpoint, encode_checkpoint
from embarcadero.storage.recovery import make_folders
from embarcadero.wire.codec import payload_crc

IDENTITY_FILE: Final = "identity.json"
LOCK_FILE: Final = "lock"
_BYTES_MAX = 4 * KIB


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The identity in a replica's folder. `generation`: the newest run of the cluster that used it."""

    format: int
    cluster: str
    replica: int
    disk: str
    generation: int
    check: int
    log: str = ""  # in a restored copy: the id in its segments; empty: `cluster`


class _Version(msgspec.Struct):
    """The only field that every version of the file has."""

    format: int


def open_folder(disk: Disk, cluster: str, replica: int, generation: int) -> Identity:
    """Lock a replica's folder and check that it belongs here. An empty one is initialized. Raises WrongFolder."""
    disk.lock(LOCK_FILE)
    found = read_identity(disk)
    if found is None:
        _refuse_orphans(disk)
        made = Identity(
            format=FORMAT_VERSION,
            cluster=cluster,
            replica=replica,
            disk=disk.make_id(),
            generation=generation,
            check=0,
        )
        return _write(disk, made)
    if found.cluster != cluster:
        hint = "give each cluster its own data_dir"
        raise WrongFolder(f"the folder belongs to cluster {found.cluster}, not to {cluster}", hint)
    if found.replica != replica:
        hint = "a folder is named after its replica; move it back"
        raise WrongFolder(f"the folder belongs to replica {found.replica}, not to {replica}", hint)
    if generation > found.generation:
        found = _write(disk, msgspec.structs.replace(found, generation=generation))
    return found


def adopt_folder(disk: Disk, before: Sequence[str], after: str, log: str) -> None:
    """Set the copy's cluster id in a replica's folder that was copied with its cluster's folder. Others stay unchanged.

    Raises WrongFolder while a process uses the folder.
    """
    disk.lock(LOCK_FILE)
    try:
        found = read_identity(disk)
    except WrongFolder:
        return  # its replica will report this
    if found is not None and found.cluster in before:
        _write(disk, msgspec.structs.replace(found, cluster=after, log=log))


def read_identity(disk: Disk, path: str = IDENTITY_FILE) -> Identity | None:
    """Return a folder's identity, or None. Raises WrongFolder if it is damaged or of a newer format."""
    try:
        data = read_whole(disk, path, _BYTES_MAX)
    except Missing:
        return None
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT_VERSION:
            hint = "start the version of Embarcadero that wrote it, or a newer one"
            raise WrongFolder(f"the folder has format {version}; this version supports up to {FORMAT_VERSION}", hint)
        found = msgspec.json.decode(data, type=Identity)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise _damaged(path) from error
    if found.check != _check(found):
        raise _damaged(path)
    return found


def _damaged(path: str) -> WrongFolder:
    hint = "restore it from a backup, or empty the whole folder: the replica then gets its records from its peers"
    return WrongFolder(f"{path} is damaged", hint)


def _refuse_orphans(disk: Disk) -> None:
    """Refuse a folder with records of an unknown owner: it has no identity."""
    if any(name.startswith("lane-") for name in disk.list("")):
        hint = "restore identity.json, or empty the whole folder: the replica then gets its records from its peers"
        raise WrongFolder("the folder has records but no identity.json", hint)


def _check(identity: Identity) -> int:
    return payload_crc(msgspec.json.encode(msgspec.structs.replace(identity, check=0)))


def _write(disk: Disk, identity: Identity) -> Identity:
    whole = msgspec.structs.replace(identity, check=_check(identity))
    write_whole(disk, IDENTITY_FILE, [msgspec.json.encode(whole)])
    return whole


_NAME = re.compile(r"sessions-(\d{20})\.checkpoint")
_DRAFT = re.compile(_NAME.pattern + r"\.tmp")


def _name(index: int) -> str:
    return f"sessions-{index:020d}.checkpoint"


def write_checkpoint(disk: Disk, lane_folder: str, index: int, data: bytes, topic_id: int) -> None:
    """Write a lane's session table as of an index. It is synced on return."""
    if len(data) > SESSIONS_FILE_BYTES_MAX:
        raise BadValue(f"the checkpoint has {len(data)} bytes", f"the maximum is {SESSIONS_FILE_BYTES_MAX}")
    make_folders(disk, lane_folder)
    write_whole(disk, join(lane_folder, _name(index)), [encode_checkpoint(index, data, topic_id), data])


def checkpoints(disk: Disk, lane_folder: str) -> list[int]:
    """Return the indices of all checkpoints of a lane, oldest first."""
    try:
        names = disk.list(lane_folder)
    except Missing:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_checkpoint(disk: Disk, lane_folder: str, index: int, topic_ids: Collection[int] | None) -> bytes | None:
    """Return the checkpoint of an index, or None if it is unreadable, damaged, or of a topic with other ids.

    `topic_ids` None: of any topic. Raises BadSegment if a newer version wrote it.
    """
    path = join(lane_folder, _name(index))
    try:
        data = read_whole(disk, path, SESSIONS_FILE_BYTES_MAX + LINE_BYTES)
    except DiskFailed:  # a bad sector, or longer than a valid one: treat it as damaged and continue
        return None
    header, table = decode_checkpoint(data[:LINE_BYTES], path), data[LINE_BYTES:]
    if header is None or header[:3] != (index, len(table), payload_crc(table)):
        return None
    return table if topic_ids is None or header.topic_id in topic_ids else None


def newest_checkpoint(
    disk: Disk, lane_folder: str, at_most: int, topic_ids: Collection[int]
) -> tuple[int, bytes] | None:
    """Return the newest undamaged checkpoint at or below an index of a topic with one of these ids, and its index."""
    for index in reversed(checkpoints(disk, lane_folder)):
        if index <= at_most and (data := read_checkpoint(disk, lane_folder, index, topic_ids)) is not None:
            return index, data
    return None


def drop_foreign(disk: Disk, lane_folder: str, topic_ids: Collection[int]) -> int:
    """Remove undamaged checkpoints of topics with other ids. Returns how many."""
    gone = 0
    for index in checkpoints(disk, lane_folder):
        path = join(lane_folder, _name(index))
        with suppress(DiskFailed):
            header = decode_checkpoint(read_whole(disk, path, SESSIONS_FILE_BYTES_MAX + LINE_BYTES)[:LINE_BYTES], path)
            if header is not None and header.topic_id not in topic_ids:
                disk.remove(path)
                gone += 1
    return gone


def sweep_drafts(disk: Disk, lane_folder: str) -> None:
    """Remove unfinished checkpoints after a crash. Only their writer may call this, while it writes none."""
    with suppress(Missing):
        for name in filter(_DRAFT.fullmatch, disk.list(lane_folder)):
            disk.remove(join(lane_folder, name))


def drop_older(disk: Disk, lane_folder: str, index: int) -> int:
    """Remove checkpoints below an index. Returns how many."""
    gone = [older for older in checkpoints(disk, lane_folder) if older < index]
    for older in gone:
        disk.remove(join(lane_folder, _name(older)))
    return len(gone)
