"""The process that forks nodes: exit codes come back, and its own death is survived."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import embarcadero as emb
from embarcadero.config.table import LogKeys
from embarcadero.errors import ClusterError
from embarcadero.node import children as module
from embarcadero.node.children import NODE_MODULE, Ended, ForkRequest, ForkServer, NodeForked, NotForked, serve
from embarcadero.node.local import LocalCluster


def test_a_node_is_forked_and_its_end_is_reported(tmp_path: Path) -> None:
    """A node without a cluster ends with exit code 1 and logs the reason; the fork server continues."""

    async def main() -> list[int]:
        fork_server = ForkServer(LogKeys(), NODE_MODULE)
        await fork_server.start()
        nodes = [await fork_server.fork("sequencer", tmp_path, tmp_path / f"{number}.log") for number in range(2)]
        codes = [await node.wait() for node in nodes]
        await fork_server.close()
        return codes

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [1, 1]
    assert all("NotRunning" in (tmp_path / f"{number}.log").read_text() for number in range(2))


def test_the_immediate_end_of_a_node_is_reported(tmp_path: Path) -> None:
    """Start and end arrive together, before the caller runs again: it gets the node, and the node its end."""
    news = [msgspec.json.encode(word) for word in (NodeForked(7), Ended(7, 3))]

    async def main() -> tuple[int, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fork_server = ForkServer(LogKeys(), NODE_MODULE)
        with ours, theirs:
            fork_server._socket = ours
            asking = asyncio.ensure_future(fork_server.fork("sequencer", tmp_path, tmp_path / "log"))
            await asyncio.to_thread(theirs.recv, 4_096)
            for word in news:
                theirs.send(word)
            fork_server._hear(ours)
            node = await asking
            return node.pid, await node.wait()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (7, 3)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Settings that `serve` changes are restored afterwards."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("own_signals")
def test_a_fork_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server returns the reason, and continues: the next node is forked."""
    outcomes = iter([BlockingIOError(11, "no processes left"), 7])

    def fork(*_: object) -> int:
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(module, "_fork", fork)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for _ in range(2):
            ours.send(msgspec.json.encode(ForkRequest("sequencer", "", "")))
        ours.shutdown(socket.SHUT_WR)
        serve(theirs, lambda _: 0)
        told = [msgspec.json.decode(ours.recv(4_096), type=NodeForked | NotForked) for _ in range(2)]
    assert told == [NotForked("no processes left"), NodeForked(7)]


def test_a_failed_fork_is_reported_to_its_caller(tmp_path: Path) -> None:
    """The first caller, and no other."""

    async def main() -> tuple[str, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fork_server = ForkServer(LogKeys(), NODE_MODULE)
        with ours, theirs:
            fork_server._socket = ours
            both = [fork_server.fork("sequencer", tmp_path, tmp_path / "log") for _ in range(2)]
            asking = [asyncio.ensure_future(one) for one in both]
            for _ in asking:
                await asyncio.to_thread(theirs.recv, 4_096)
            for word in (NotForked("no processes left"), NodeForked(7)):
                theirs.send(msgspec.json.encode(word))
            fork_server._hear(ours)
            with pytest.raises(ClusterError) as refused:
                await asking[0]
            return refused.value.message, (await asking[1]).pid

    assert asyncio.run(asyncio.wait_for(main(), 60)) == ("the fork server cannot fork: no processes left", 7)


def test_an_unread_request_awaits_no_answer(tmp_path: Path) -> None:
    """The fork server died, which was not noticed yet.

    The caller gets an error, and the next request starts another one.
    """

    async def main() -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fork_server = ForkServer(LogKeys(), NODE_MODULE)
        with ours:
            fork_server._socket = ours
            theirs.close()
            with pytest.raises(OSError, match="Broken pipe"):
                await fork_server.fork("sequencer", tmp_path, tmp_path / "log")
            assert not fork_server._asked
            fork_server._hear(ours)
        again = await fork_server.fork("sequencer", tmp_path, tmp_path / "log")
        code = await again.wait()
        await fork_server.close()
        return code

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 1


def test_a_signal_is_reported_as_such(tmp_path: Path) -> None:
    """A killed node's code is the negative signal; when the fork server is killed, so are its nodes."""

    async def main() -> tuple[int, int, int]:
        fork_server = ForkServer(LogKeys(), NODE_MODULE)
        await fork_server.start()
        os.mkfifo(tmp_path / "waits.log")  # opening it for writing waits for a reader: nodes that do nothing
        first, second = [await fork_server.fork("sequencer", tmp_path, tmp_path / "waits.log") for _ in range(2)]
        first.send_signal(signal.SIGTERM)
        code = await first.wait()
        assert fork_server._process is not None
        fork_server._process.kill()
        gone = await second.wait()
        again = await fork_server.fork("sequencer", tmp_path, tmp_path / "again.log")
        last = await again.wait()
        await fork_server.close()
        return code, gone, last

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (-signal.SIGTERM, -signal.SIGKILL, 1)


def test_a_cluster_survives_the_death_of_its_fork_server() -> None:
    """All nodes die with it, and all are restarted; published records are still in the fabric."""
    with LocalCluster(brokers=2) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        with log.publisher("t") as publisher:
            publisher.send(b"before").result(timeout=30)
            pid = cluster.pids()["sequencer"]
            fork_server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(fork_server, signal.SIGKILL)
            publisher.send(b"after").result(timeout=60)
        assert log.read("t").column("value").to_pylist() == [b"before", b"after"]
