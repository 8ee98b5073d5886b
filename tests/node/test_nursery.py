"""The process that forks nodes: exit codes come back, and its own death is survived."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec

import embarcadero as emb
from embarcadero.node.local import LocalCluster
from embarcadero.node.nursery import Born, Ended, Nursery


def test_a_node_is_forked_and_its_end_is_told(tmp_path: Path) -> None:
    """A node without a cluster ends with exit code 1 and says why in its log; the nursery goes on."""

    async def main() -> list[int]:
        nursery = Nursery()
        await nursery.start()
        nodes = [await nursery.bear("sequencer", tmp_path, tmp_path / f"{number}.log") for number in range(2)]
        codes = [await node.wait() for node in nodes]
        await nursery.close()
        return codes

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [1, 1]
    assert all("NotRunning" in (tmp_path / f"{number}.log").read_text() for number in range(2))


def test_a_node_that_ends_at_once_is_still_told(tmp_path: Path) -> None:
    """Birth and end are heard in one breath, before who asked runs again: it gets the node, and the node its end."""
    news = [msgspec.json.encode(word) for word in (Born(7), Ended(7, 3))]

    async def main() -> tuple[int, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        nursery = Nursery()
        with ours, theirs:
            nursery._socket = ours
            asking = asyncio.ensure_future(nursery.bear("sequencer", tmp_path, tmp_path / "log"))
            await asyncio.to_thread(theirs.recv, 4_096)
            for word in news:
                theirs.send(word)
            nursery._hear(ours)
            node = await asking
            return node.pid, await node.wait()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (7, 3)


def test_a_signal_is_told_as_such(tmp_path: Path) -> None:
    """A killed node's code is the signal, below zero; when the nursery is killed, so are its nodes."""

    async def main() -> tuple[int, int, int]:
        nursery = Nursery()
        await nursery.start()
        os.mkfifo(tmp_path / "waits.log")  # opening it for writing waits for a reader: nodes that do nothing
        first, second = [await nursery.bear("sequencer", tmp_path, tmp_path / "waits.log") for _ in range(2)]
        first.send_signal(signal.SIGTERM)
        code = await first.wait()
        assert nursery._process is not None
        nursery._process.kill()
        gone = await second.wait()
        again = await nursery.bear("sequencer", tmp_path, tmp_path / "again.log")
        last = await again.wait()
        await nursery.close()
        return code, gone, last

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (-signal.SIGTERM, -signal.SIGKILL, 1)


def test_a_cluster_survives_the_death_of_its_nursery() -> None:
    """All nodes die with it, and all are started again; what was published is still in the fabric."""
    with LocalCluster(brokers=2) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        with log.publisher("t") as publisher:
            publisher.send(b"before").result(timeout=30)
            pid = cluster.pids()["sequencer"]
            nursery = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(nursery, signal.SIGKILL)
            publisher.send(b"after").result(timeout=60)
        assert log.read("t").column("value").to_pylist() == [b"before", b"after"]
