"""Real processes that run out of resources: files, connections, shared memory, readers, bytes."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.config import load
from embarcadero.errors import Backpressure, FabricFull, TooMany
from embarcadero.limits import CONTROL_BYTES_MAX, MIB, SCRATCH_BYTES
from embarcadero.node.local import LocalCluster
from embarcadero.wire import messages as m
from embarcadero.wire.codec import PROTOCOL_VERSION, ControlReceived, FrameKind, FrameReceiver, control_frame

pytestmark = pytest.mark.system

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
import embarcadero as emb
with emb.local(brokers=1, log_bytes=32 << 20) as log:
    log.create_topic("t")
    print(log.address, log.cluster.pids()["broker:0"], flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def cramped() -> Iterator[tuple[str, int]]:
    """A broker whose process may have 96 open files: its address and process id."""
    child = subprocess.Popen(
        [sys.executable, "-c", FEW_FILES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    address, pid = child.stdout.readline().split()
    yield address, int(pid)
    child.stdin.close()
    child.stdout.close()
    assert child.wait(60) == 0


def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def _pushed(peer: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := peer.recv(65_536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def test_a_broker_out_of_files_refuses_with_a_typed_error_and_recovers(cramped: tuple[str, int]) -> None:
    """Connection max + 1 gets an error; a flood beyond all open files blocks no client; freed capacity is used."""
    address, pid = cramped
    with emb.connect(address) as log, log.publisher("t", linger_ms=0) as publisher:
        publisher.send(b"before").result(30)
        hello = control_frame(m.Hello(versions=[PROTOCOL_VERSION]), 1)
        peers = []
        for _ in range(47):
            peers.append(_dial(address))
            peers[-1].sendall(hello)
            assert peers[-1].recv(1)
        with pytest.raises(TooMany, match="48"):
            emb.connect(address, timeout=30)
        flood = [_dial(address) for _ in range(150)]
        publisher.send(b"meanwhile").result(30)
        for peer in flood:
            _pushed(peer)  # ends: it got an error, or was disconnected
        publisher.send(b"after").result(30)
        assert len(os.listdir(f"/proc/{pid}/fd")) < 96
        for peer in [*peers, *flood]:
            peer.close()
        with _connected(address) as other:
            assert other.read("t").num_rows == 3


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect, as soon as the broker has noticed that others left."""
    while True:
        try:
            log = emb.connect(address, timeout=30)
            break
        except TooMany:
            continue
    with log:
        yield log


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """A file system that is full, for this process and its children: no file grows beyond `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_memory_file_system_is_a_typed_error_at_the_start() -> None:
    """Processes without space report it; nothing of the cluster remains."""
    with _files_of_at_most(20 * MIB), pytest.raises(FabricFull, match=r"no space for region broker-0\.1/log"):
        LocalCluster(brokers=1, log_bytes=64 * MIB)


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    patient = load(None, {"sequencer.takeover_after_ms": 60_000})  # the first standby leads all the time
    with emb.local(brokers=1, log_bytes=64 * MIB, config=patient) as log:
        log.create_topic("t")
        yield log


def test_a_memory_file_system_that_fills_up_later_affects_only_new_topics(log: emb.Log) -> None:
    """A topic without space waits with back-pressure; topics with memory continue; freed space is used."""
    sequencer = log.cluster.pids()["sequencer"]
    with log.publisher("t") as publisher:
        publisher.send(b"before").result(30)
    before = resource.prlimit(sequencer, resource.RLIMIT_FSIZE)
    resource.prlimit(sequencer, resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        log.create_topic("late")
        late = log.publisher("late", linger_ms=0)
        with pytest.raises(Backpressure):
            late.next_session_seq(timeout=0.5)
        waiting = late.send(b"patient")
        with log.publisher("t") as publisher:
            publisher.send(b"meanwhile").result(30)
        assert not waiting.done()
    finally:
        resource.prlimit(sequencer, resource.RLIMIT_FSIZE, before)
    assert waiting.result(60).seq == 0
    assert log.cluster.pids()["sequencer"] == sequencer
    late.close()


def _memory(pid: int) -> int:
    """Memory of this process only, in bytes."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) * 1024


def test_a_subscriber_that_never_reads_costs_a_bounded_amount(log: emb.Log) -> None:
    """It asks for 32 MiB 200 times and reads nothing; the broker's memory stays, others read and write."""
    with log.publisher("t") as publisher:
        for _ in range(40):
            publisher.send(os.urandom(MIB))
        publisher.flush(60)
        pid = log.cluster.pids()["broker:0"]
        before = _memory(pid)
        with _dial(log.address) as deaf:
            lane = log.describe("t").lane
            deaf.sendall(control_frame(m.Hello(versions=[PROTOCOL_VERSION]), 1))
            for request in range(200):
                deaf.sendall(control_frame(m.Fetch(lane=lane, by="earliest", max_bytes=32 * MIB), request + 2))
            publisher.send(b"meanwhile").result(60)
            assert log.read("t").num_rows >= 41
            assert _memory(pid) - before < 200 * MIB


def _answered(peer: socket.socket, last: int) -> list[int]:
    """The requests that were answered, up to the last one."""
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    receiver = FrameReceiver(
        allowed=frozenset({FrameKind.CONTROL, FrameKind.CREDIT}), scratch=scratch, control_bytes_max=CONTROL_BYTES_MAX
    )
    found: list[int] = []
    while last not in found[-1:]:
        events = receiver.received(peer.recv_into(receiver.get_buffer()))
        found += [event.request for event in events if isinstance(event, ControlReceived)]
    return found


def test_requests_with_unread_answers_cost_a_bounded_amount(log: emb.Log) -> None:
    """1,000 requests fit one read, their answers have 47 MB. Others continue, and a late reader gets all answers."""
    log.create_topic("wide", schema=pa.schema([(f"column_{'x' * 60}_{n}", pa.int64()) for n in range(400)]))
    pid = log.cluster.pids()["broker:0"]
    before, requests = _memory(pid), range(2, 1_002)
    with ExitStack() as stack:
        deaf = [stack.enter_context(_dial(log.address)) for _ in range(4)]
        for peer in deaf:
            peer.sendall(control_frame(m.Hello(versions=[PROTOCOL_VERSION]), 1))
            peer.sendall(b"".join(bytes(control_frame(m.DescribeTopic(name="wide"), n)) for n in requests))
        for peer in deaf:
            while len(peer.recv(16_384, socket.MSG_PEEK)) < 16_384:
                pass  # the broker has not read its requests yet
        with log.publisher("t", linger_ms=0) as publisher:
            publisher.send(b"meanwhile").result(60)
        assert log.read("t").num_rows
        assert _memory(pid) - before < 50 * MIB
        assert _answered(deaf[0], requests[-1]) == [1, *requests]


def test_a_stranger_that_sends_a_byte_now_and_then_is_disconnected(log: emb.Log) -> None:
    """The hello has a time limit; meanwhile others continue."""
    with _dial(log.address) as slow:
        slow.sendall(b"E")
        assert log.topics()
        slow.sendall(b"M")
        assert _pushed(slow) == b""
