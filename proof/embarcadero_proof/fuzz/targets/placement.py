"""The store: records with meaningless values, and a damaged file."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from random import Random
from typing import Final

import msgspec

from embarcadero.placement.directory import Directory, read_stored, stored
from embarcadero.placement.records import ReaderNote
from embarcadero.placement.store import MemoryStore, Put, SqliteStore, Store
from embarcadero.types import LanePosition
from embarcadero.wire.schemas import encode_schema
from embarcadero_proof.fuzz.archive import Files, pack, unpack
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import TYPED_SCHEMA, US
from embarcadero_proof.fuzz.scratch import folder
from embarcadero_proof.fuzz.target import Inputs, Target
from embarcadero_proof.fuzz.tree import tree_mutation


def _fill(store: Store) -> Directory:
    """Fill a store with some records of each kind; return its directory."""
    directory = Directory(store, "0badcafe")
    member = directory.members.register(0, "127.0.0.1", 9092, 1)
    for replica in (0, 1):
        directory.replicas.register(replica, f"{replica}" * 32, f"/data/replica-{replica}", "here", 1)
    for name, order, columns in (("total", 2, b""), ("strong", 5, encode_schema(TYPED_SCHEMA)), ("loose", 0, b"")):
        directory.topics.create(
            name, order=order, partitions=2, replicas=1, durable_on=1, on_gap="fence", gap_timeout_ms=None,
            columns=columns,
        )  # fmt: skip
    directory.lanes.make(directory.topics.get("loose"), member)
    epoch = directory.elections.next_epoch()
    directory.elections.start_epoch(epoch, {0: 0, 1: 5})
    directory.ranges.raise_ceiling(0, 1_000, 9_000, epoch)
    directory.topics.trim("total", 0, 0)
    directory.readers.note({("total", "r"): ReaderNote(reader="r", places={0: LanePosition(1, 2)}, at_us=US)}, US)
    return directory


@cache
def _values() -> Files:
    store = MemoryStore()
    _fill(store)
    return {item.key: item.value for item in store.list("")}


def _records() -> Inputs:
    return [pack(_values())]


_json = tree_mutation(msgspec.json)


def _mutate(data: bytes, rng: Random, _pool: Inputs) -> bytes:
    values = unpack(data) or dict(_values())
    for _ in range(1 + (rng.random() < 0.3)):
        key = rng.choice(list(values))
        if rng.random() < 0.05:
            del values[key]
            if not values:
                return pack(_values())
        elif rng.random() < 0.1:
            values[key] = values[rng.choice(list(values))]
        else:
            values[key] = _json(values[key], rng, [values[key]])
    return pack(values)


def _ask(directory: Directory) -> str:
    """Make the calls of roles and tools."""
    stored(directory)
    topics = directory.topics.all()
    for topic in topics:
        directory.topics.get(topic.name)
        directory.topics.described(topic.name)
        directory.tiers.get(topic.name)
        directory.readers.of(topic.name, US)
    lanes = [topic.lane for topic in topics]
    for lane in lanes[:4]:
        directory.ranges.ceiling(lane)
        directory.ranges.open_range(lane)
        directory.ranges.loss_accepted(lane)
    directory.members.all(), directory.members.newest(), directory.replicas.all(), directory.members.last_port(0)
    epoch = directory.elections.started_epoch()
    directory.elections.epoch_ends(epoch)
    directory.members.register(1, "127.0.0.1", 1, 1)
    directory.elections.next_epoch()
    return f"{min(len(topics), 4)} topics, {min(len(directory.ranges.all()), 4)} ranges"


def _store(data: bytes) -> str:
    """Use a directory over meaningless values: typed errors, also when a new generation begins."""
    store = MemoryStore()
    values = unpack(data)
    store.transact([], [Put(key, value) for key, value in values.items()])
    directory = Directory(store)
    summary = _ask(directory)
    directory.begin_generation()
    return summary


def _files() -> Inputs:
    path = folder() / "real.sqlite"
    for old in folder().glob("real.sqlite*"):
        old.unlink()
    with closing(SqliteStore(path)) as store:
        _fill(store)
    return [pack({"store": path.read_bytes(), "witness": path.with_name("real.sqlite-revision").read_bytes()})]


def _mutate_file(data: bytes, rng: Random, _pool: Inputs) -> bytes:
    files = unpack(data)
    name = "store" if rng.random() < 0.85 or "witness" not in files else "witness"
    files[name] = mutated(files.get(name, b""), rng, [files.get("store", b"x")])
    return pack(files)


def _file(data: bytes) -> str:
    """Open a damaged store: it is refused, or its contents are whole."""
    files = unpack(data)
    for old in folder().glob("hostile.sqlite*"):
        old.unlink()
    path = folder() / "hostile.sqlite"
    path.write_bytes(files.get("store", b""))
    path.with_name("hostile.sqlite-revision").write_bytes(files.get("witness", b""))
    read_stored(path)
    with closing(SqliteStore(path)) as store:
        return _ask(Directory(store))


PLACEMENT: Final = (
    Target("store-records", "a directory over meaningless records", _records, _store, _mutate, archive=True),
    Target("store-files", "the store's SQLite file, damaged", _files, _file, _mutate_file, archive=True),
)  # fmt: skip
