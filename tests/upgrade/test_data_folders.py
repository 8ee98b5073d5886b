"""Data folders of earlier versions open: records, positions, sessions and trims are as they were.

The archives were written by version 0.1.0 (commit 5897205): two brokers, two replicas, five topics with 200 records
each (`typed`: 100) of which `total` was trimmed below seq 20, one topic that was deleted, and one without replicas.
Records of raw topics are `<topic>-<number>` under ten keys; `total` and `strong` were written by a session named
"import". `clean` was stopped in order, `killed` lost all processes and its memory.

`before-structure` has the same, written by commit d56fa65. Its `mirror` has a mirror of the fabric, too: both replicas
were stopped, seven more records of `strong` were ordered, and then all processes and the fabric were lost.
"""

from __future__ import annotations

import tarfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.node.local import RestartableCluster
from embarcadero.placement.store import Put, SqliteStore
from embarcadero.types import GapKind

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
SEQUENCED = ("total", "strong")
TRIMMED_BELOW = 20
BATCHES = 20
"""Of the session named "import", in each of the two topics."""
ORDERED = 207
"""Records that were ordered in `strong` of `mirror`; the replicas have 200 of them."""


@pytest.fixture(params=["0.1.0-clean", "0.1.0-killed", "before-structure-clean", "before-structure-killed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A data folder of an earlier version."""
    return unpacked(request.param, tmp_path)


def unpacked(name: str, into: Path) -> Path:
    """Unpack an archive; its folder is named for how the cluster ended."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into / name.rpartition("-")[2]


def records(log: emb.Log, topic: str) -> list[bytes]:
    """All values of a topic, in its order."""
    return log.read(topic).column("value").to_pylist()


def strong_of(values: list[bytes], key: int) -> list[int]:
    """The numbers of one key's records in the topic `strong`, in their order."""
    return [number for value in values if (number := int(value.removeprefix(b"strong-"))) % 10 == key]


def test_every_topic_of_an_earlier_version_reads_as_before(folder: Path) -> None:
    """Order, trims, schemas and lists of topics survive the upgrade, and so they do after one more restart."""
    for _start in range(2):
        with emb.local(brokers=2, replicas=2, data_dir=folder) as log:
            assert [topic.name for topic in log.topics()] == ["local", "memory", "none", "strong", "total", "typed"]
            strong = records(log, "strong")
            for key in range(10):
                assert strong_of(strong, key) == list(range(key, 200, 10))
            assert sorted(records(log, "none")) == sorted(b"none-%d" % number for number in range(200))
            assert sorted(records(log, "local")) == sorted(b"local-%d" % number for number in range(200))
            total = records(log, "total")
            assert len(total) == 200 - TRIMMED_BELOW
            assert len(set(total)) == len(total)
            assert log.tail("total").start_seq == TRIMMED_BELOW
            assert log.read("typed").column("id").to_pylist() == list(range(100))


def test_topics_of_an_earlier_version_take_more_records(folder: Path) -> None:
    """Publishing continues in each topic, also with a schema; deleting one works, and its name is free again."""
    with emb.local(brokers=2, replicas=2, data_dir=folder) as log:
        before = {name: log.read(name).num_rows for name in ("none", "local", "total", "strong")}
        for name in before:
            with log.publisher(name, ack=2) as publisher:
                publisher.send(b"more", key=b"user-1").result(60)
        with log.publisher("typed", ack=2) as publisher:
            publisher.publish(pa.table({"id": [100], "city": ["Recife"]})).result(60)

        assert {name: log.read(name).num_rows for name in before} == {name: n + 1 for name, n in before.items()}
        assert log.read("typed").column("id").to_pylist() == list(range(101))
        log.delete_topic("typed")
        log.create_topic("typed", replicas=2)
        assert log.read("typed").num_rows == 0


@pytest.mark.parametrize("topic", SEQUENCED)
def test_named_sessions_of_an_earlier_version_continue(folder: Path, topic: str) -> None:
    """The session continues at the sequence after its last stored batch, and again after that."""
    with emb.local(brokers=2, replicas=2, data_dir=folder) as log:
        rows = log.read(topic).num_rows
        with log.publisher(topic, ack=2, session="import") as publisher:
            following = publisher.next_session_seq()
            publisher.publish(pa.table({"value": [b"next"]}), session_seq=following).result(60)
        with log.publisher(topic, ack=2, session="import") as publisher:
            assert publisher.next_session_seq() == following + 1

        assert following == BATCHES
        assert log.read(topic).num_rows == rows + 1


def test_a_mirror_of_an_earlier_version_contains_the_end_of_the_order(tmp_path: Path) -> None:
    """The fabric is lost: the next position follows the last ordered one, and a gap is reported."""
    folder = unpacked("before-structure-mirror", tmp_path)
    with closing(SqliteStore(folder / "data" / "store.db")) as store:  # the folder was elsewhere then
        for item in store.list(""):
            moved = item.value.replace(b"/tmp/fixture/mirror", str(folder).encode())
            assert moved == item.value or store.transact([], [Put(item.key, moved)])
    cluster = RestartableCluster(
        folder / "data", 2, 2, fabric__mirror=folder / "module", fabric__log_bytes=1 << 20,
        fabric__chunk_bytes=1 << 17, fabric__order_slots=1024, fabric__round_entries=64,
    )  # fmt: skip
    cluster.start()
    try:
        with emb.connect(cluster.addresses) as log, log.subscribe("strong", start="earliest") as reader:
            with log.publisher("strong", ack=2) as publisher:
                position = publisher.send(b"after").result(60)
            batches = list(iter(lambda: reader.poll(timeout=5), None))
    finally:
        cluster.end()

    gap = next(batch.gap for batch in batches if batch.gap is not None)
    assert position is not None
    assert position.seq == ORDERED  # without the mirror: far above, at the ceiling
    assert gap.kind is GapKind.NEVER_DURABLE
    assert batches[-1].to_arrow().column("value").to_pylist() == [b"after"]
