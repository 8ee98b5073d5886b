"""Ports and hellos."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from embarcadero.errors import ClusterError, PortInUse, ProtocolError, Unreachable
from embarcadero.node.process import answers, check_ports, hello, listen
from embarcadero.wire.codec import control_frame
from embarcadero.wire.messages import Pong, Welcome

WELCOME = Welcome(version=1, cluster="0000000a", broker=3, incarnation=9, brokers=[])


def ask(reply: bytes, *, wait: bool = False) -> Welcome:
    """Say hello to a server that sends these bytes and then closes, or waits for the client to close."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(reply)
            if wait:
                connection.recv(1024)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return asyncio.run(hello("127.0.0.1", server.getsockname()[1], timeout_s=0.2 if wait else 60.0))
        finally:
            thread.join()


def test_port_zero_is_a_free_port() -> None:
    """Two listeners with port 0 get two real ports."""
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as two:
        assert 0 < one.getsockname()[1] != two.getsockname()[1] > 0


def test_a_port_in_use_is_named() -> None:
    """Binding a port twice is an error with the port and the remedy."""
    with listen("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*--port"):
            check_ports("127.0.0.1", [port])
    check_ports("127.0.0.1", [port])


def test_an_address_of_another_machine_is_refused() -> None:
    """Listening on an address of another machine is a typed error."""
    with pytest.raises(ClusterError, match="--host"):
        listen("192.0.2.1", 0)


def test_a_broker_identifies_itself() -> None:
    """A hello is answered with a welcome."""
    assert ask(control_frame(WELCOME, 1)) == WELCOME


@pytest.mark.parametrize("reply", [b"", b"EM", control_frame(WELCOME, 1)[:-3]])
def test_a_partial_answer_is_no_answer(reply: bytes) -> None:
    """A server that closes before its answer is complete is unreachable."""
    with pytest.raises(Unreachable):
        ask(reply)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n" * 3, control_frame(Pong(), 1), b"\xff" * 64])
def test_another_kind_of_server_is_recognized(reply: bytes) -> None:
    """A server with another protocol is a protocol error, not a broker."""
    with pytest.raises(ProtocolError):
        ask(reply)


def test_a_silent_server_does_not_block_the_client() -> None:
    """A server that accepts and sends nothing is unreachable when the time is over."""
    with pytest.raises(Unreachable):
        ask(b"", wait=True)


def test_a_closed_port_has_no_broker() -> None:
    """`answers` is False without a listener."""
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    assert asyncio.run(answers("127.0.0.1", port, 1.0)) is False
