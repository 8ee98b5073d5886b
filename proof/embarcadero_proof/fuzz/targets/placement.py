"""The store: its records as values that make no sense, and its file, damaged."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from random import Random
from typing import Final

import msgspec

from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore
from embarcadero.placement.memory import MemoryStore
from embarcadero.placement.offline import read_stored, stored
from embarcadero.placement.progress import ReaderNote
from embarcadero.placement.store import Put, Store
from embarcadero.wire.schemas import encode_schema
from embarcadero_proof.fuzz.archive import Files, pack, unpack
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import TYPED_SCHEMA, US
from embarcadero_proof.fuzz.scratch import folder
from embarcadero_proof.fuzz.target import Inputs, Target
from embarcadero_proof.fuzz.tree import tree_mutation


def _fill(store: Store) -> Directory:
    """A directory with some of everything in it."""
    directory = Directory(store, "0badcafe")
    member = directory.register_broker(0, "127.0.0.1", 9092, 1)
    for replica in (0, 1):
        directory.register_replica(replica, f"{replica}" * 32, f"/data/replica-{replica}", "here", 1)
    for name, order, columns in (("total", 2, b""), ("strong", 5, encode_schema(TYPED_SCHEMA)), ("loose", 0, b"")):
        directory.create_topic(
            name, order=order, partitions=2, replicas=1, durable_on=1, on_gap="fence", gap_timeout_ms=None,
            columns=columns,
        )  # fmt: skip
    directory.make_lane(directory.topic("loose"), member)
    epoch = directory.next_epoch()
    directory.start_epoch(epoch, {0: 0, 1: 5})
    directory.raise_ceiling(0, 1_000, 9_000, epoch)
    directory.trim("total", 0, 0)
    directory.note_progress({("total", "r"): ReaderNote(reader="r", places={0: (1, 2)}, at_us=US)}, US)
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
    """What roles and tools ask for."""
    stored(directory)
    topics = directory.topics()
    for topic in topics:
        directory.topic(topic.name)
        directory.described(topic.name)
        directory.tier(topic.name)
        directory.readers(topic.name, US)
    lanes = [topic.lane for topic in topics]
    for lane in lanes[:4]:
        directory.ceiling(lane)
        directory.open_range(lane)
        directory.loss_accepted(lane)
    directory.members(), directory.newest_members(), directory.replicas(), directory.last_port(0)
    epoch = directory.started_epoch()
    directory.epoch_ends(epoch)
    directory.register_broker(1, "127.0.0.1", 1, 1)
    directory.next_epoch()
    return f"{min(len(topics), 4)} topics, {min(len(directory.ranges()), 4)} ranges"


def _store(data: bytes) -> str:
    """A directory over values that make no sense: typed errors, also when it is started anew."""
    store = MemoryStore()
    values = unpack(data)
    store.transact([], [Put(key, value) for key, value in values.items()])
    directory = Directory(store)
    told = _ask(directory)
    directory.begin_generation()
    return told


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
    """A damaged store is refused, or what it tells is whole."""
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
    Target("store-records", "a directory over records that make no sense", _records, _store, _mutate, archive=True),
    Target("store-files", "the store's SQLite file, damaged", _files, _file, _mutate_file, archive=True),
)  # fmt: skip
