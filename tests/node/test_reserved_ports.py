"""Ports that stay reserved without a listener."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from embarcadero.errors import PortInUse
from embarcadero.node.ports import ReservedPorts

ALL_OF_THEM = """
import sys
from embarcadero.node import ports
from embarcadero.node.ports import ReservedPorts
from embarcadero.errors import PortInUse
ports._PORTS = int(sys.argv[1]), int(sys.argv[2])
had = []
try:
    while True:
        had.append(ReservedPorts(1))
except PortInUse:
    print(*(one.first for one in had))
"""


def test_no_other_process_gets_them_while_they_are_reserved() -> None:
    """Another process that takes all ports around it does not get the reserved one, though it has no listener."""
    ours = ReservedPorts(2)
    span = str(max(20_000, ours.first - 200)), str(ours.first + 220)
    told = subprocess.run([sys.executable, "-c", ALL_OF_THEM, *span], capture_output=True, text=True, check=True)
    theirs = {int(first) for first in told.stdout.split()}
    assert theirs
    assert ours.first not in theirs


def test_they_are_free_when_they_are_released() -> None:
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
    """From 32,768 on (Linux, by default) the kernel gives ports to outgoing connections."""
    assert ReservedPorts(20).first + 20 <= 32_768


def test_ports_of_other_processes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their listener keeps them; when no port remains, the error reports it."""
    ours = ReservedPorts(1)
    monkeypatch.setattr("embarcadero.node.ports._PORTS", (ours.first, ours.first + 20))
    ours.release()
    with socket.create_server(("127.0.0.1", ours.first)), pytest.raises(PortInUse, match="no 1 free ports"):
        ReservedPorts(1)


def test_more_than_a_block_is_refused() -> None:
    """Other clusters' blocks start after it."""
    with pytest.raises(ValueError, match="1 to 20"):
        ReservedPorts(21)
