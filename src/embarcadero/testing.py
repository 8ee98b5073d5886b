"""Fixtures for pytest: a private cluster for the test session, and a new topic for each test.

In a `conftest.py`:

    pytest_plugins = ["embarcadero.testing"]

In a test:

    import pytest

    def test_records_come_back(embarcadero_log, embarcadero_topic):
        with embarcadero_log.publisher(embarcadero_topic) as publisher:
            publisher.send(b"hello")
        assert embarcadero_log.read(embarcadero_topic).column("value").to_pylist() == [b"hello"]

    @pytest.mark.embarcadero_topic(order=5, partitions=4)
    def test_with_another_kind_of_topic(embarcadero_log, embarcadero_topic):
        assert embarcadero_log.describe(embarcadero_topic).partitions == 4

Fixtures:

- `embarcadero_cluster`: the processes. `kill_broker` and `kill_sequencer` kill some of them.
- `embarcadero_address`: the addresses for `emb.connect` and `emb.aio.connect`.
- `embarcadero_log`: a client, shared by all tests.
- `embarcadero_topic`: the name of a topic, which is deleted after the test.

Override `embarcadero_options` to change the cluster:

    @pytest.fixture(scope="session")
    def embarcadero_options():
        return {"brokers": 4, "log_bytes": 64 << 20}

The cluster listens on free ports of the loopback interface. It keeps all data in memory and stops with the session.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest

from embarcadero.client.api.sync_log import Log, connect
from embarcadero.errors import UnknownTopic
from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster

_MARK = "embarcadero_topic"
_NAME_CHARS = 60


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `embarcadero_topic`."""
    config.addinivalue_line("markers", f"{_MARK}(**options): options of create_topic for the topic of this test")


@pytest.fixture(scope="session")
def embarcadero_options() -> dict[str, Any]:
    """Return the arguments of `embarcadero.local` for the cluster. Override this fixture to change them."""
    return {"brokers": 2, "log_bytes": 32 * MIB}


@pytest.fixture(scope="session")
def embarcadero_cluster(embarcadero_options: dict[str, Any]) -> Iterator[LocalCluster]:
    """Run a private cluster; `kill_broker` and `kill_sequencer` kill its processes."""
    with LocalCluster(**embarcadero_options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def embarcadero_address(embarcadero_cluster: LocalCluster) -> str:
    """Return the addresses of the brokers, in the form that `connect` accepts."""
    return ",".join(embarcadero_cluster.addresses)


@pytest.fixture(scope="session")
def embarcadero_log(embarcadero_address: str) -> Iterator[Log]:
    """Connect to the cluster. Tests close the publishers and subscribers that they open, but not this client."""
    with connect(embarcadero_address) as log:
        yield log


@pytest.fixture
def embarcadero_topic(embarcadero_log: Log, request: pytest.FixtureRequest) -> Iterator[str]:
    """Create a topic with the options of the mark `embarcadero_topic`, and return its name."""
    options: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers(_MARK))):
        options |= mark.kwargs
    readable = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")[:_NAME_CHARS]
    name = f"{readable}-{uuid4().hex[:8]}"
    embarcadero_log.create_topic(name, **options)
    yield name
    with suppress(UnknownTopic):  # the test may have deleted it
        embarcadero_log.delete_topic(name)
