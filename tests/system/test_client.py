"""The client against a real cluster: processes on loopback, some of which are killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadName, BadValue, FuturePosition, SessionFenced, TopicExists, UnknownTopic

pytestmark = pytest.mark.system
LOG_BYTES = 64 << 20


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    with emb.local(brokers=3, log_bytes=LOG_BYTES) as log:
        yield log


def values(log: Any, topic: str) -> list[bytes]:
    return log.read(topic).column("value").to_pylist()


@pytest.mark.parametrize("order", [2, 5])
def test_records_are_read_at_the_positions_of_their_futures(log: Any, order: int) -> None:
    """Every future's position names the record that was sent, for every reader."""
    topic = f"positions-{order}"
    log.create_topic(topic, order=order)
    with log.publisher(topic, batch_bytes=2_000) as publisher:
        sent = {n: publisher.send(b"%d" % n, key=b"k", headers={"n": b"%d" % n}) for n in range(2_000)}
        positions = {n: future.result(30) for n, future in sent.items()}
    end, found = log.tail(topic), {}
    with log.subscribe(topic) as subscriber:
        while len(found) < 2_000:
            batch = subscriber.poll(30)
            assert batch is not None
            for record in batch.records():
                found[record.seq] = (batch.index, record.value, record.headers)
    assert end.seq == 2_000
    for n, position in positions.items():
        assert found[position.seq] == (position.index, b"%d" % n, {"n": b"%d" % n})
    if order == 5:
        assert [positions[n].seq for n in range(2_000)] == list(range(2_000))


def test_the_cluster_refuses_with_typed_errors(log: Any) -> None:
    """Each refusal has a named error, and no other effect."""
    log.create_topic("refusals")
    for wrong, error in (
        ({"name": "refusals"}, TopicExists),
        ({"name": "no/slash"}, BadName),
        ({"name": "x", "replicas": 3}, BadValue),
        ({"name": "x", "order": 3}, BadValue),
    ):
        with pytest.raises(error):
            log.create_topic(**wrong)
    with pytest.raises(UnknownTopic):
        log.publisher("nobody")
    with pytest.raises(FuturePosition):
        log.read("refusals", 0, 5)
    with log.subscribe("refusals", start=99) as subscriber, pytest.raises(FuturePosition):
        subscriber.poll(30)


def test_a_named_session_is_taken_over(log: Any) -> None:
    """The second holder continues; the first one is fenced, and its later records are not stored."""
    log.create_topic("names", order=5)
    first = log.publisher("names", session="one", linger_ms=0)
    first.publish([{"value": b"first"}]).result(30)
    with log.publisher("names", session="one", linger_ms=0) as second:
        second.publish([{"value": b"second"}]).result(30)
        with pytest.raises(SessionFenced):
            first.publish([{"value": b"late"}]).result(30)
        second.publish([{"value": b"third"}]).result(30)
    with pytest.raises(SessionFenced):
        first.close()
    assert values(log, "names") == [b"first", b"second", b"third"]


def test_a_table_larger_than_a_frame_comes_back_whole(log: Any) -> None:
    """It is cut into batches, and one future completes when all of it is stored."""
    log.create_topic("tables", order=5)
    table = pa.table({"value": [bytes([n]) * 1_000_000 for n in range(20)]})
    with log.publisher("tables") as publisher:
        assert publisher.publish(table).result(60).seq == 0
    assert values(log, "tables") == table.column("value").to_pylist()


def test_a_filter_by_partition_shares_a_topic(log: Any) -> None:
    """Readers of different partitions together see every record once."""
    log.create_topic("shared", partitions=4)
    with log.publisher("shared", linger_ms=0) as publisher:
        for n in range(100):
            publisher.send(b"%d" % n, key=b"%d" % n)
    end, seen = log.tail("shared"), []
    for half in ([0, 1], [2, 3]):
        with log.subscribe("shared", partitions=half) as subscriber:
            while (subscriber.position() or 0) < end.index:
                if (batch := subscriber.poll(0.2)) is not None:
                    assert batch.partition in half
                    seen += [record.value for record in batch]
    assert sorted(seen) == sorted(b"%d" % n for n in range(100))


def test_the_asyncio_twin_does_the_same(log: Any) -> None:
    """Publish, wait, subscribe, read: over the same cluster."""

    async def main() -> None:
        async with await emb.aio.connect(log.address) as twin:
            await twin.create_topic("twin", order=5)
            async with await twin.publisher("twin") as publisher:
                futures = [await publisher.send(b"%d" % n) for n in range(100)]
                assert [(await future).seq for future in futures] == list(range(100))
            async with await twin.subscribe("twin", start=50) as subscriber:
                batch = await subscriber.poll(30)
                assert batch is not None
                assert batch.seq <= 50 < batch.seq + batch.count
            assert (await twin.read("twin")).num_rows == 100

    asyncio.run(main())


@pytest.mark.parametrize("victim", ["broker", "sequencer"])
def test_nothing_is_lost_or_duplicated_when_a_process_is_killed(victim: str) -> None:
    """kill -9 in the middle: every future gets its position, each record is there once and in the session's order."""
    count = 3_000
    with emb.local(brokers=3, log_bytes=LOG_BYTES) as log:
        log.create_topic("killed", order=5)
        read: list[bytes] = []

        def follow() -> None:
            with log.subscribe("killed") as subscriber:
                while len(read) < count and (batch := subscriber.poll(60)) is not None:
                    read.extend(record.value for record in batch)

        reader = threading.Thread(target=follow)
        reader.start()
        with log.publisher("killed", batch_bytes=1_000, linger_ms=0) as publisher:
            futures = []
            for n in range(count):
                futures.append(publisher.send(b"%d" % n))
                if n == count // 3:
                    futures[0].result(60)
                    log.cluster.kill_broker(0) if victim == "broker" else log.cluster.kill_sequencer()
            seqs = [future.result(100).seq for future in futures]
        reader.join(60)
        assert seqs == list(range(count))
        assert read == [b"%d" % n for n in range(count)]
        assert values(log, "killed") == read


ELSEWHERE = """
import asyncio, os, signal, socket, sys, sysconfig

import numpy, pyarrow  # they have builds of their own for other systems

sysconfig.get_config_vars()

for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
    delattr(socket, name)
for name in ("writev", "register_at_fork", "fork", "pidfd_open", "memfd_create", "sched_setaffinity", "O_CLOEXEC"):
    delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "pidfd_send_signal"):
    delattr(signal, name)
for name in ("uvloop", "fcntl", "resource", "pwd"):
    sys.modules[name] = None
sys.platform = "darwin"  # on "win32", the standard library would look for modules of Windows

import embarcadero as emb

with emb.connect(sys.argv[1:]) as log:
    log.create_topic("elsewhere")
    with log.publisher("elsewhere", ack=1) as publisher:
        publisher.send(b"hello")
    print(log.read("elsewhere", read="ordered").column("value").to_pylist())

async def main():
    async with emb.aio.connect(sys.argv[1:]) as log:
        async with log.publisher("elsewhere") as publisher:
            await (await publisher.send(b"twin"))
        print((await log.read("elsewhere", read="ordered")).num_rows)

asyncio.run(main())

from embarcadero.cli.main import main as command_line

sys.argv = ["embarcadero", "tail", "elsewhere", "--read", "ordered", "--brokers", ",".join(sys.argv[1:])]
command_line()
"""


def test_a_client_needs_nothing_that_only_linux_has(log: Any) -> None:
    """No uvloop, forks and modules for Unix (Windows), none of Linux's socket options (macOS)."""
    command = [sys.executable, "-c", ELSEWHERE, *log.cluster.addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[b'hello']\n2\nhello\ntwin\n", "")
