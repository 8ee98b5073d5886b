"""Frames on a socket: short ones immediately, but after all earlier bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import pytest

from embarcadero.wire.sockets import prepare, write_frames


class Transport(asyncio.Transport):
    """Records the bytes it was given."""

    def __init__(self, sock: socket.socket | None, waiting: int = 0) -> None:
        super().__init__(extra={"socket": sock})
        self.written: list[bytes] = []
        self._waiting = waiting

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def writelines(self, list_of_data: Any) -> None:
        self.written += [bytes(part) for part in list_of_data]


def test_a_short_frame_is_sent_immediately() -> None:
    """The transport has nothing to do."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Transport(ours)
        write_frames(transport, prepare(transport), [b"head", memoryview(b"body")])

        assert theirs.recv(100) == b"headbody"
        assert not transport.written


@pytest.mark.parametrize("buffers", [[bytes(17 * 1024)], [b"x"] * 5], ids=["long", "many"])
def test_other_frames_are_left_to_the_transport(buffers: list[bytes]) -> None:
    """There they are sent together with later ones."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Transport(ours)
        write_frames(transport, prepare(transport), buffers)

        assert transport.written == buffers


def test_no_frame_overtakes_waiting_bytes() -> None:
    """A transport that has bytes to write gets these, too; and so does one without a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for transport in (Transport(ours, waiting=1), Transport(None)):
            write_frames(transport, prepare(transport), [b"frame"])

            assert transport.written == [b"frame"]


def test_bytes_that_a_full_socket_refuses_are_left_to_the_transport() -> None:
    """In one piece, whatever part of it the socket accepted."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(ours.fileno(), bytes(1000))
        transport = Transport(ours)
        write_frames(transport, prepare(transport), [b"a" * 100, b"b" * 100])

        assert transport.written == [b"a" * 100, b"b" * 100]


def test_half_a_frame_is_finished_by_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is sent twice."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(os, "writev", lambda descriptor, buffers: os.write(descriptor, buffers[0][:3]))
        transport = Transport(ours)
        write_frames(transport, prepare(transport), [b"head", b"body"])

        assert theirs.recv(100) + b"".join(transport.written) == b"headbody"


def test_a_peer_that_vanished_is_noticed_by_the_system() -> None:
    """Within a minute or so: 30 s of silence, then three probes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert prepare(Transport(sock)) == sock.fileno()
        asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in asked] == [30, 10, 3]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert prepare(Transport(None)) == -1
