"""Ports that stay ours while nobody listens on them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from embarcadero.errors import PortInUse
from embarcadero.node.process import ReservedPorts

ALL_OF_THEM = """
import sys
from embarcadero.node import process
from embarcadero.node.process import ReservedPorts
from embarcadero.errors import PortInUse
process._PORTS = int(sys.argv[1]), int(sys.argv[2])
had = []
try:
    while True:
        had.append(ReservedPorts(1))
except PortInUse:
    print(*(one.first for one in had))
"""


def test_nobody_else_gets_them_while_they_are_held() -> None:
    """Another process that takes all there are around it does not get ours, though nothing listens on it."""
    ours = ReservedPorts(2)
    span = str(max(20_000, ours.first - 200)), str(ours.first + 220)
    told = subprocess.run([sys.executable, "-c", ALL_OF_THEM, *span], capture_output=True, text=True, check=True)
    theirs = {int(first) for first in told.stdout.split()}
    assert theirs
    assert ours.first not in theirs


def test_they_are_free_when_they_are_let_go() -> None:
    """The end of the object, or of its process, is the end of the reservation."""
    held = [ReservedPorts(1) for _ in range(3)]
    names = [f"\0embarcadero-ports-{ports.first}" for ports in held]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
        other.bind(names[0])
    held.clear()
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.bind(name)


def test_they_are_below_those_of_outgoing_connections() -> None:
    """From 32,768 on (Linux, unless told otherwise) the kernel gives ports to whoever connects to anything."""
    assert ReservedPorts(20).first + 20 <= 32_768


def test_ports_that_a_stranger_has_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens there keeps it; when none is left, an error says so."""
    ours = ReservedPorts(1)
    monkeypatch.setattr("embarcadero.node.process._PORTS", (ours.first, ours.first + 20))
    ours.release()
    with socket.create_server(("127.0.0.1", ours.first)), pytest.raises(PortInUse, match="no 1 free ports"):
        ReservedPorts(1)


def test_more_than_a_block_is_refused() -> None:
    """Blocks of others begin behind it."""
    with pytest.raises(ValueError, match="1 to 20"):
        ReservedPorts(21)
