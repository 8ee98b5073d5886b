"""Whose folder this is. A replica writes only into its own: right cluster, right number, a format it knows.

`disk` is a random id made with the folder. A wiped disk has another one, so a replica that forgot everything is never
taken for one that has nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from embarcadero.env import Disk, Missing
from embarcadero.errors import WrongFolder
from embarcadero.limits import KIB
from embarcadero.storage.disk import read_whole, write_whole
from embarcadero.storage.layout import FORMAT_VERSION
from embarcadero.wire.codec import payload_crc

IDENTITY_FILE: Final = "identity.json"
LOCK_FILE: Final = "lock"
_BYTES_MAX = 4 * KIB


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica's folder says about itself. `generation`: the newest run of the cluster that used it."""

    format: int
    cluster: str
    replica: int
    disk: str
    generation: int
    check: int
    log: str = ""  # the id that segments carry, in a restored copy; empty: `cluster`


class _Version(msgspec.Struct):
    """The one thing that every version of the file says."""

    format: int


def open_folder(disk: Disk, cluster: str, replica: int, generation: int) -> Identity:
    """Lock a replica's folder and make sure that it is ours; an empty one becomes ours. WrongFolder says why not."""
    disk.lock(LOCK_FILE)
    found = read_identity(disk)
    if found is None:
        _refuse_orphans(disk)
        made = Identity(
            format=FORMAT_VERSION, cluster=cluster, replica=replica, disk=disk.make_id(), generation=generation,
            check=0,
        )  # fmt: skip
        return _write(disk, made)
    if found.cluster != cluster:
        hint = "give each cluster its own data_dir"
        raise WrongFolder(f"the folder belongs to cluster {found.cluster}, this is cluster {cluster}", hint)
    if found.replica != replica:
        hint = "folders are named for their replica; move it back"
        raise WrongFolder(f"the folder belongs to replica {found.replica}, this is replica {replica}", hint)
    if generation > found.generation:
        found = _write(disk, msgspec.structs.replace(found, generation=generation))
    return found


def adopt_folder(disk: Disk, before: Sequence[str], after: str, log: str) -> None:
    """Give a replica's folder, copied with its cluster's folder, the copy's cluster id; leave any other as it is.

    WrongFolder while a process uses the folder.
    """
    disk.lock(LOCK_FILE)
    try:
        found = read_identity(disk)
    except WrongFolder:
        return  # its replica will say so
    if found is not None and found.cluster in before:
        _write(disk, msgspec.structs.replace(found, cluster=after, log=log))


def read_identity(disk: Disk, path: str = IDENTITY_FILE) -> Identity | None:
    """A folder's identity; None if it has none. WrongFolder if it is damaged or of a newer format."""
    try:
        data = read_whole(disk, path, _BYTES_MAX)
    except Missing:
        return None
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT_VERSION:
            hint = "start the version of embarcadero that wrote it, or a newer one"
            raise WrongFolder(f"the folder has format {version}, this program knows {FORMAT_VERSION}", hint)
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
    """Records without an identity: somebody's, and we do not know whose."""
    if any(name.startswith("lane-") for name in disk.list("")):
        hint = "restore identity.json, or empty the whole folder: the replica then gets its records from its peers"
        raise WrongFolder("the folder has records but no identity.json", hint)


def _check(identity: Identity) -> int:
    return payload_crc(msgspec.json.encode(msgspec.structs.replace(identity, check=0)))


def _write(disk: Disk, identity: Identity) -> Identity:
    whole = msgspec.structs.replace(identity, check=_check(identity))
    write_whole(disk, IDENTITY_FILE, [msgspec.json.encode(whole)])
    return whole
