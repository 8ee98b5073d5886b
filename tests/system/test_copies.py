"""Copies of a data folder beside their original: refused, or given an identity of their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import embarcadero as emb
from embarcadero.errors import NotRunning, WrongFolder
from embarcadero.limits import MIB
from embarcadero.node.background import stop
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import LocalCluster
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore

pytestmark = pytest.mark.system

Start = Callable[..., LocalCluster]


@pytest.fixture
def start_in(tmp_path: Path) -> Iterator[Start]:
    """Start clusters in folders; all are stopped afterwards."""
    made: list[LocalCluster] = []

    def start_one(folder: str, *, restore: bool = False) -> LocalCluster:
        cluster = LocalCluster(
            brokers=1, standbys=0, replicas=1, data_dir=tmp_path / folder, log_bytes=32 * MIB, restore=restore
        )
        made.append(cluster)
        return cluster

    yield start_one
    for cluster in made:
        cluster.close()


def publish(cluster: LocalCluster, first: int, count: int) -> None:
    with emb.connect(cluster.addresses) as log, log.publisher("orders", ack=2) as publisher:
        for number in range(first, first + count):
            publisher.send(b"%d" % number)


def records(cluster: LocalCluster) -> list[bytes]:
    with emb.connect(cluster.addresses) as log:
        return log.read("orders").column("value").to_pylist()


def numbers(*spans: tuple[int, int]) -> list[bytes]:
    """The records published in these spans."""
    return [b"%d" % number for span in spans for number in range(*span)]


def made(start_in: Start) -> LocalCluster:
    """A cluster with ten records."""
    cluster = start_in("original")
    with emb.connect(cluster.addresses) as log:
        log.create_topic("orders", order=5, replicas=1)
    publish(cluster, 0, 10)
    return cluster


def test_a_copy_beside_the_running_original_is_refused(tmp_path: Path, start_in: Start) -> None:
    """Neither `up` nor `down` in the copy touches the original, which continues."""
    original = made(start_in)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    with pytest.raises(WrongFolder, match=r"is a copy of .*original, which is still there"):
        start_in("copy")
    with pytest.raises(NotRunning):
        stop(ClusterFolder(tmp_path / "copy"))
    assert Path(original.report().fabric).is_dir()
    publish(original, 10, 10)
    assert records(original) == numbers((0, 20))


def test_the_fabric_of_a_running_cluster_is_not_taken(tmp_path: Path, start_in: Start) -> None:
    """Also if nothing else shows that the folder is a copy: the lock on the fabric decides."""
    original = made(start_in)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    (tmp_path / "copy" / "cluster.json").unlink()
    with pytest.raises(WrongFolder, match=f"is in use by the cluster in {tmp_path}/original"):
        start_in("copy")
    publish(original, 10, 10)
    assert records(original) == numbers((0, 20))


def test_a_restored_copy_runs_beside_its_original(tmp_path: Path, start_in: Start) -> None:
    """Other id, other fabric, other ports, the same records; from then on each has its own records, and restarts."""
    made(start_in).close()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    original, copy = start_in("original"), start_in("copy", restore=True)
    one, other = original.report(), copy.report()
    assert one.cluster != other.cluster
    assert one.fabric != other.fabric
    assert {*one.addresses}.isdisjoint(other.addresses)
    assert [replica.folder for replica in other.replicas] == [str(tmp_path / "copy" / "replica-0")]
    publish(original, 100, 10)
    publish(copy, 200, 10)
    assert records(original) == numbers((0, 10), (100, 110))
    assert records(copy) == numbers((0, 10), (200, 210))
    copy.close()
    copy = start_in("copy")
    assert copy.report().cluster == other.cluster
    assert records(copy) == numbers((0, 10), (200, 210))
    assert records(original) == numbers((0, 10), (100, 110))


def test_a_restore_that_was_killed_halfway_is_finished(tmp_path: Path, start_in: Start) -> None:
    """The store has the new id, replicas' folders still the old one: the next start gives it to them."""
    made(start_in).close()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    with closing(SqliteStore(tmp_path / "copy" / "store.db")) as store:
        before, after = Directory(store).restore()
    assert json.loads((tmp_path / "copy" / "replica-0" / "identity.json").read_bytes())["cluster"] == before
    shutil.rmtree(tmp_path / "original")
    copy = start_in("copy")
    assert copy.report().cluster == after
    assert records(copy) == numbers((0, 10))


def test_a_folder_may_be_moved_while_nothing_runs(tmp_path: Path, start_in: Start) -> None:
    """By renaming it, or by copying it and removing the original: the cluster keeps its id."""
    original = made(start_in)
    cluster = original.report().cluster
    original.close()
    (tmp_path / "original").rename(tmp_path / "renamed")
    renamed = start_in("renamed")
    assert (renamed.report().cluster, records(renamed)) == (cluster, numbers((0, 10)))
    renamed.close()
    shutil.copytree(tmp_path / "renamed", tmp_path / "carried")
    shutil.rmtree(tmp_path / "renamed")
    carried = start_in("carried")
    assert (carried.report().cluster, records(carried)) == (cluster, numbers((0, 10)))


def test_replicas_that_are_links_are_not_restored(tmp_path: Path, start_in: Start) -> None:
    """The link leads to the original's disk."""
    made(start_in).close()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "replica-0")
    (tmp_path / "copy" / "replica-0").symlink_to(tmp_path / "original" / "replica-0")
    with pytest.raises(WrongFolder, match=r"symbolic link to .*belongs to the original"):
        start_in("copy", restore=True)
    assert records(start_in("original")) == numbers((0, 10))


def identities(folder: Path) -> tuple[str, str]:
    """The ids of the cluster that the store and the folder of replica 0 have."""
    with closing(SqliteStore(folder / "store.db")) as store:
        known = Directory(store).cluster_id
    return known, json.loads((folder / "replica-0" / "identity.json").read_bytes())["cluster"]


@pytest.mark.parametrize("shared", ["store.db", "lock", "replica-0"])
def test_copies_with_hard_links_are_not_restored(tmp_path: Path, start_in: Start, shared: str) -> None:
    """A write to such a file is a write to the original's."""
    made(start_in).close()
    original, copy = tmp_path / "original", tmp_path / "copy"
    before = identities(original)

    def copied(source: str, target: str) -> None:
        is_shared = Path(target).relative_to(copy).parts[0] == shared
        (os.link if is_shared else shutil.copy2)(source, target)

    shutil.copytree(original, copy, copy_function=copied)
    with pytest.raises(WrongFolder, match=r"is a hard link to a file with 2 names"):
        start_in("copy", restore=True)
    assert identities(original) == before
    assert records(start_in("original")) == numbers((0, 10))


def test_the_original_itself_is_not_restored(tmp_path: Path, start_in: Start) -> None:
    """It would lose its id, its mirrors and its tables by mistake."""
    made(start_in).close()
    before = identities(tmp_path / "original")
    with pytest.raises(WrongFolder, match=r"original is not a copy"):
        start_in("original", restore=True)
    assert identities(tmp_path / "original") == before
    assert records(start_in("original")) == numbers((0, 10))


def test_a_copy_that_replaced_its_original_may_be_restored(tmp_path: Path, start_in: Start) -> None:
    """The path is that of the original, the folder is not."""
    cluster = made(start_in)
    before = cluster.report().cluster
    cluster.close()
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    (tmp_path / "original").rename(tmp_path / "elsewhere")
    (tmp_path / "copy").rename(tmp_path / "original")
    restored = start_in("original", restore=True)
    assert restored.report().cluster != before
    assert records(restored) == numbers((0, 10))
