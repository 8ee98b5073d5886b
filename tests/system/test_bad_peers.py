"""Invalid and hostile clients at a real broker: each gets an error or is disconnected, and no other client notices."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

import embarcadero as emb
from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster
from embarcadero.types import Outcome
from embarcadero.wire import messages as m
from embarcadero.wire.codec import PROTOCOL_VERSION, FrameKind, batch_header, control_frame, decode_control, payload_crc

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    """A cluster with one broker and a well-behaved client."""
    with LocalCluster(brokers=1, log_bytes=32 * MIB) as cluster, emb.connect(cluster.addresses) as log:
        log.create_topic("t", order=5)
        yield log


def _dial(log: emb.Log) -> socket.socket:
    host, _, port = log.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def _hello() -> bytes:
    return control_frame(m.Hello(versions=[PROTOCOL_VERSION], client="vandal"), 1)


def _frame(peer: socket.socket) -> bytes:
    """One frame with a short header."""
    header = peer.recv(16, socket.MSG_WAITALL)
    length = int.from_bytes(header[4:8], "little")
    return header + (peer.recv(length, socket.MSG_WAITALL) if length else b"")


def _greet(peer: socket.socket) -> bytes:
    """Say hello and wait for the welcome and the first credit."""
    peer.sendall(_hello())
    return _frame(peer) + _frame(peer)


def _read_to_end(peer: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := peer.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def _last_failure(data: bytes) -> m.Failed:
    """The last control message in a broker's output."""
    found = None
    while data:
        kind, length = data[3], int.from_bytes(data[4:8], "little")
        header = 64 if kind in (2, 6) else 16
        if kind == 1:
            found = decode_control(data[header : header + length])
        data = data[header + length :]
    assert isinstance(found, m.Failed)
    return found


VANDALS = {
    "http": (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", "BadMagic"),
    "tls": (bytes.fromhex("16030100c8010000c40303") + bytes(200), "BadMagic"),
    "version": (b"EM\x63\x01" + bytes(12), "BadVersion"),
    "kind": (b"EM\x01\x63" + bytes(12), "BadFrame"),
    "length bomb before hello": (struct.pack("<HBBIQ", 0x4D45, 1, 1, 0xFFFF_FFFF, 1), "FrameTooLarge"),
    "hello that is not msgpack": (struct.pack("<HBBIQ", 0x4D45, 1, 1, 4, 1) + b"\xc1\xc1\xc1\xc1", "BadFrame"),
    "question before hello": (control_frame(m.ListTopics(), 1), "BadFrame"),
    "hello of the future": (control_frame(m.Hello(versions=[99]), 1), "BadVersion"),
    "length bomb after hello": (_hello() + struct.pack("<HBBIQ", 0x4D45, 1, 1, 0x7FFF_FFFF, 1), "FrameTooLarge"),
    "batch bomb": (
        _hello() + batch_header(session_seq=0, low=0, lane=0, session=0, count=1, crc=0, length=2**32 - 1),
        "FrameTooLarge",
    ),
    "batch with a wrong checksum": (
        _hello() + batch_header(session_seq=0, low=0, lane=0, session=0, count=1, crc=1, length=3) + b"abc",
        "ChecksumMismatch",
    ),
    "server's frame": (_hello() + struct.pack("<HBBIQ", 0x4D45, 1, 4, 0, 99), "BadFrame"),
}


@pytest.mark.parametrize("name", VANDALS)
def test_a_hostile_client_gets_the_reason_and_a_good_client_notices_nothing(log: emb.Log, name: str) -> None:
    """One typed error with a hint, then the end of the connection; publishing continues."""
    noise, code = VANDALS[name]
    with log.publisher("t") as publisher:
        before = publisher.send(b"before").result(timeout=30)
        with _dial(log) as peer:
            greeting = _greet(peer) if noise.startswith(_hello()) else b""
            peer.sendall(noise.removeprefix(_hello()))
            failure = _last_failure(greeting + _read_to_end(peer))
        after = publisher.send(b"after").result(timeout=30)

    assert failure.code == code
    assert failure.hint
    assert before is not None
    assert after is not None
    assert after.seq == before.seq + 1


def test_random_bytes_end_the_connection(log: emb.Log) -> None:
    """Whatever arrives, the broker disconnects and stays up."""
    with _dial(log) as peer:
        peer.sendall(os.urandom(100_000))
        data = _read_to_end(peer)

    assert len(data) < 4096
    assert log.tail("t").lane == log.describe("t").lane


def test_a_peer_that_never_finishes_its_hello_is_disconnected(log: emb.Log) -> None:
    """Half a hello, then silence: the broker stops waiting, and sends nothing."""
    with _dial(log) as peer:
        peer.sendall(_hello()[:10])

        assert _read_to_end(peer) == b""


def test_a_batch_for_a_session_never_opened_is_answered(log: emb.Log) -> None:
    """The connection lives; the batch gets its outcome."""
    payload = b"stray"
    with _dial(log) as peer:
        _greet(peer)
        lane = log.describe("t").lane
        peer.sendall(
            batch_header(session_seq=0, low=0, lane=lane, session=4_000_000, count=1, crc=payload_crc(payload),
                         length=len(payload)) + payload
        )  # fmt: skip
        while (ack := _frame(peer))[3] != FrameKind.ACK:
            pass
        peer.sendall(control_frame(m.Ping(), 7))
        while int.from_bytes((pong := _frame(peer))[8:16], "little") != 7:
            pass

    assert Outcome(ack[16 + 40]) == Outcome.UNKNOWN_SESSION
    assert decode_control(pong[16:]) == m.Pong()
