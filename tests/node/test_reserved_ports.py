"""Ports that stay reserved without a listener."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from embarcadero.errors import PortInUse
from embarcadero.node import process
from embarcadero.node.local import RestartableCluster
from embarcadero.node.process import ReservedPorts, wait_until_free

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


def test_they_are_outside_of_those_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel gives these to any program that connects to anything; they are read, for operators change them."""
    setting = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(process, "_OUTGOING", setting)
    for first, last in ((32_768, 60_999), (20_000, 29_950), (20_047, 65_535)):
        setting.write_text(f"{first}\t{last}\n")
        own = ReservedPorts(20).first
        assert not set(range(own, own + 20)) & set(range(first, last + 1))
    for text in ("1024\t65535\n", "", "not numbers"):  # no port is outside, or the range is not known
        setting.write_text(text)
        assert ReservedPorts(20).first >= 20_000


def test_a_cluster_does_not_start_while_another_program_has_its_port(tmp_path: Path) -> None:
    """The error names the port, and nothing was started."""
    cluster = RestartableCluster(tmp_path / "cluster", 2, 0)
    cluster.ports_patience_s = 0.0
    with (
        socket.create_server(("127.0.0.1", cluster.port + 1)),
        pytest.raises(PortInUse, match=f"port {cluster.port + 1} on 127.0.0.1 is in use"),
    ):
        cluster.start()
    assert not (tmp_path / "cluster").exists()


def test_a_port_that_is_given_back_is_waited_for() -> None:
    """As one of an outgoing connection of another program."""
    own = ReservedPorts(1)
    with socket.create_server(("127.0.0.1", own.first)) as taken:
        timer = threading.Timer(0.1, taken.close)
        timer.start()
        wait_until_free("127.0.0.1", [own.first], 60.0)
    timer.join()


def test_ports_of_other_processes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their listener keeps them; when no port remains, the error reports it."""
    ours = ReservedPorts(1)
    monkeypatch.setattr("embarcadero.node.process._PORTS", (ours.first, ours.first + 20))
    ours.release()
    with socket.create_server(("127.0.0.1", ours.first)), pytest.raises(PortInUse, match="1 consecutive free ports"):
        ReservedPorts(1)


def test_more_than_a_block_is_refused() -> None:
    """Other clusters' blocks start after it."""
    with pytest.raises(ValueError, match="1 to 20"):
        ReservedPorts(21)
