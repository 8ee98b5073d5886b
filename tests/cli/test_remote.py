"""Metrics of a cluster on another machine: found through its brokers, never confused with those of this machine."""

from __future__ import annotations

import pytest

from embarcadero.cli import inspect
from embarcadero.watch.endpoints import NodeEndpoint


def place(host: str) -> NodeEndpoint:
    return NodeEndpoint(roles="broker:0", pid=0, host=host, port=9101)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pages that were requested; each names a process on loopback and another on an address of its own."""
    urls: list[str] = []

    def ask(url: str) -> list[NodeEndpoint]:
        urls.append(url)
        return [place("127.0.0.1"), place("10.0.0.7")]

    monkeypatch.setattr(inspect, "_ask", ask)
    return urls


@pytest.mark.parametrize("metrics", ["127.0.0.1:9100", "127.1.2.3:9100", "[::1]:9100", "localhost:9100"])
def test_loopback_of_another_machine_is_not_asked(asked: list[str], metrics: str) -> None:
    """It is this machine's loopback, where another cluster may serve metrics."""
    assert inspect.remote_endpoints([{"address": "10.0.0.7:9092", "metrics": metrics}]) == []
    assert asked == []


def test_processes_on_loopback_of_another_machine_are_left_out(asked: list[str]) -> None:
    """Although the broker that was asked is reachable."""
    status = {"address": "10.0.0.7:9092", "metrics": "0.0.0.0:9101"}
    assert inspect.remote_endpoints([status]) == [place("10.0.0.7")]
    assert asked == ["http://10.0.0.7:9101/targets"]


@pytest.mark.parametrize("broker", ["127.0.0.1:9092", "localhost:9092", "[::1]:9092"])
def test_loopback_is_queried_for_brokers_on_loopback(asked: list[str], broker: str) -> None:
    """A cluster on this machine, with the defaults."""
    found = inspect.remote_endpoints([{"address": broker, "metrics": "127.0.0.1:9101"}])
    assert found == [place("127.0.0.1"), place("10.0.0.7")]
    assert asked == ["http://127.0.0.1:9101/targets"]
