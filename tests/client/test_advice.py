"""Mistakes that the client used to accept, to pass on, or to report badly: each is named, with a way out."""

from __future__ import annotations

import asyncio
import http.server
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client import results
from embarcadero.client.arguments import parse_addresses
from embarcadero.client.encoding import fitted, given_bytes, to_arrow
from embarcadero.client.results import LoneWaits
from embarcadero.errors import BadSchema, BadValue, Unreachable
from embarcadero.watch.endpoints import Endpoint, EndpointFiles
from embarcadero.wire.codec import check_message
from embarcadero.wire.messages import CreateTopic
from embarcadero.wire.schemas import RAW
from tests.client.fake_server import FakeServer

NAIVE = datetime(2026, 1, 31, 12)
AWARE = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def log() -> Iterator[Any]:
    with FakeServer(order=5, partitions=4) as server, emb.connect(server.addresses) as log:
        yield log


# --- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.create_topic("x", partitions="8"), "partitions='8'"),
        (lambda log: log.create_topic("x", replicas=1.5), r"replicas=1\.5"),
        (lambda log: log.create_topic("x", on_gap=3), "on_gap=3"),
        (lambda log: log.create_topic("x", order=[5]), r"order \[5\]"),
        (lambda log: log.create_topic("x", order=object()), "order <object"),
        (lambda log: log.create_topic(7), "name=7"),
        (lambda log: log.describe(7), "name=7"),
        (lambda log: log.create_topic("x", gap_timeout_ms="soon"), "gap_timeout_ms: 'soon'"),
        (lambda log: log.create_topic("x", partitions=object()), "unsupported"),
        (lambda log: log.publisher("t", order={}), "order {}"),
    ],
)
def test_wrong_types_are_refused_before_they_travel(log: Any, call: Callable[[Any], object], message: str) -> None:
    """They reached the broker, and came back as a protocol error."""
    with pytest.raises(BadValue, match=message):
        call(log)
    assert log.describe("t").name == "t"


def test_right_types_pass() -> None:
    """None stands for the cluster's default."""
    check_message(CreateTopic(name="x", order=5, columns=b"1"))


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("http://localhost:9092", "localhost:9092"),
        ("https://log.example.com/path", "log.example.com:9092"),
        ("tcp://10.0.0.1:9093", "10.0.0.1:9093"),
        ("kafka://user@host:1", "host:1"),
    ],
)
def test_a_url_is_no_broker_address(address: str, right: str) -> None:
    """It was looked up as the name of a host."""
    with pytest.raises(BadValue, match=f"is a URL.*such as {right}"):
        parse_addresses(address)


def test_a_metrics_port_is_no_broker() -> None:
    """It waited for a request in HTTP, and the client for a broker."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            endpoint = Endpoint("0", EndpointFiles(Path("nowhere")))
            async with await endpoint.serve(sock):
                address = f"127.0.0.1:{sock.getsockname()[1]}"
                with pytest.raises(Unreachable, match=r"speaks HTTP.*give the port of a broker, 9092"):
                    await emb.aio.connect(address, timeout=10)

    asyncio.run(main())


def test_a_web_server_is_no_broker() -> None:
    """Any answer in HTTP is recognised."""

    class Teapot(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.request.recv(1)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Teapot) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with pytest.raises(Unreachable, match="speaks HTTP"):
            emb.connect(f"127.0.0.1:{server.server_port}", timeout=10)
        server.shutdown()


@pytest.mark.parametrize("partitions", [[9], [-1], [0, 4], ["1"], [True]])
def test_partitions_that_do_not_exist_are_refused(log: Any, partitions: list[Any]) -> None:
    """A reader of partition 9 of 4 waited forever, without a word."""
    with pytest.raises(BadValue, match="has partitions 0 to 3, and no partition"):
        log.subscribe("t", partitions=partitions)
    with pytest.raises(BadValue, match="no partition"):
        list(log.scan("t", partitions=partitions))


def test_no_partitions_at_all_are_refused(log: Any) -> None:
    """A reader of them would wait forever, too."""
    with pytest.raises(BadValue, match="reads nothing"):
        log.subscribe("t", partitions=[])


# --- records ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ({"a": 1}, r"json\.dumps.*publish\(\[row"),
        ([1, 2], r"json\.dumps"),
        ("text", r"text\.encode\(\)"),
        (5, r"str\(value\)\.encode\(\)"),
        (None, 'b""'),
    ],
)
def test_a_value_that_is_not_bytes_has_a_way_out(value: Any, way_out: str) -> None:
    """`send({"a": 1})` only heard that values are bytes."""
    with pytest.raises(BadValue, match=way_out):
        given_bytes("value", value)


def test_optional_columns_are_not_reported_as_missing() -> None:
    """The error for a row without `value` also asked for `timestamp`, which is optional."""
    with pytest.raises(BadSchema) as caught:
        fitted([{"a": 1}], RAW, 5)
    assert "'value' is missing" in caught.value.message
    assert "timestamp" not in caught.value.message
    assert "create the topic with schema=..." in caught.value.hint


TIMES = {"at": pa.timestamp("us", "UTC"), "all": pa.list_(pa.timestamp("ms", "UTC"))}


@pytest.mark.parametrize(
    "rows",
    [
        [{"at": AWARE}, {"at": NAIVE}],
        {"at": [AWARE, NAIVE]},
        [{"all": [NAIVE]}],
        pd.DataFrame({"at": [NAIVE]}),
        pd.DataFrame({"at": pd.Series([NAIVE], dtype=object)}),
        pl.DataFrame({"at": [NAIVE]}),
        pl.DataFrame({"all": [[NAIVE]]}),
    ],
    ids=["rows", "columns", "nested", "pandas", "pandas-objects", "polars", "polars-nested"],
)
def test_times_without_a_zone_are_refused(rows: Any) -> None:
    """They were taken as UTC without a word."""
    with pytest.raises(BadSchema, match="has times without a time zone") as caught:
        to_arrow(rows, TIMES)
    assert "UTC" in caught.value.hint


@pytest.mark.parametrize(
    "rows",
    [
        [{"at": AWARE}, {"at": None}],
        pd.DataFrame({"at": [AWARE, pd.NaT]}),
        pd.DataFrame({"at": pd.Series([AWARE, pd.NaT], dtype=object)}),
        pl.DataFrame({"at": [AWARE, None]}),
    ],
    ids=["rows", "pandas", "pandas-objects", "polars"],
)
def test_times_with_a_zone_and_missing_ones_are_taken(rows: Any) -> None:
    """A missing time has no zone, and needs none."""
    assert to_arrow(rows, TIMES).column("at").to_pylist() == [AWARE, None]


# --- logs -------------------------------------------------------------------------------------------------------------
def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_client_without_any_broker_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """Once when it begins, and again when it is over; not when the program closes the client."""
    caplog.set_level(logging.INFO, "embarcadero.client")
    with FakeServer(order=5) as server, emb.connect(server.addresses) as log:
        log.describe("t")
        for broker in (0, 1):
            server.stop(broker)
        until(lambda: "lost the connection to all brokers" in caplog.text)
        server.start(0)
        until(lambda: "connected again after" in caplog.text)
    assert caplog.text.count("lost the connection to all brokers") == 1


def test_waiting_for_every_record_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """`send().result()` in a loop costs the linger each time."""
    hint = "open the publisher with linger_ms=0"
    with FakeServer(order=5) as server, emb.connect(server.addresses) as log:
        with log.publisher("t", linger_ms=1) as publisher:
            for _ in range(results._LONE_WAITS_MAX + 5):
                publisher.send(b"1").result(10)
        assert caplog.text.count(hint) == 1
        caplog.clear()
        with log.publisher("t", linger_ms=0) as publisher:
            for _ in range(results._LONE_WAITS_MAX + 5):
                publisher.send(b"1").result(10)
        with log.publisher("t", linger_ms=1) as publisher:
            for _ in range(results._LONE_WAITS_MAX + 5):
                publisher.publish([{"value": b"1"}]).result(10)
    assert hint not in caplog.text


def test_batches_of_several_records_are_no_lone_waits(caplog: pytest.LogCaptureFixture) -> None:
    """One batch with company begins the count again."""
    waits = LoneWaits("t", 2)
    for number in range(3 * results._LONE_WAITS_MAX):
        waits.waited(1 + (number % 10 == 0))
    assert not caplog.records
