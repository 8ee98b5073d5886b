"""The web service publishes, reads, waits for new orders, and answers failures with the right status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType

import httpx
import pytest

import embarcadero as emb
from tests.examples.test_examples import load

pytestmark = pytest.mark.system

ORDERS = [{"item": "two coffees", "table": 4}, {"item": "tea", "table": 7}]


@pytest.fixture(scope="module")
def log() -> Iterator[emb.Log]:
    """The cluster behind the service."""
    with emb.local(brokers=2, replicas=1) as log:
        yield log


@pytest.fixture
def service(log: emb.Log, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the service, configured for the cluster."""
    monkeypatch.setenv("EMBARCADERO_BROKERS", log.address)
    return load("web_service")


@asynccontextmanager
async def running(service: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    """Start the service in this process, and connect a client to it."""
    app = service.app
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        yield client


def test_orders_are_published_and_read(service: ModuleType, log: emb.Log) -> None:
    """Concurrent requests get positions of their own; an order is on disk when the caller has the answer."""

    async def main() -> None:
        async with running(service) as client:
            answers = [await client.post("/orders", json=order) for order in ORDERS]
            assert [(answer.status_code, answer.json()) for answer in answers] == [(201, {"seq": 0}), (201, {"seq": 1})]
            assert log.tail("web-orders").durable_seq == 2
            assert (await client.get("/orders/1")).json() == {"seq": 1, **ORDERS[1]}
            many = await asyncio.gather(*(client.post("/orders", json=ORDERS[0]) for _ in range(50)))
            assert sorted(answer.json()["seq"] for answer in many) == list(range(2, 52))
            assert (await client.get("/orders/52")).status_code == 404
            assert (await client.get("/orders/-1")).status_code == 404
            assert (await client.post("/orders", json={"item": "tea"})).status_code == 422
            log.trim("web-orders", before_seq=1)
            assert (await client.get("/orders/0")).status_code == 410

    asyncio.run(main())


def test_a_caller_waits_for_new_orders(service: ModuleType, log: emb.Log) -> None:
    """An answer comes as soon as there is an order, and is empty when there is none in time."""

    async def main() -> None:
        async with running(service) as client:
            end = log.tail("web-orders").seq
            assert (await client.get("/orders", params={"start": end, "wait": 0.1})).json() == []
            waiting = asyncio.create_task(client.get("/orders", params={"start": end, "wait": 30}))
            await asyncio.sleep(0)
            await client.post("/orders", json=ORDERS[1])
            assert (await waiting).json() == [{"seq": end, **ORDERS[1]}]
            assert (await client.get("/orders", params={"start": end})).json() == [{"seq": end, **ORDERS[1]}]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (emb.errors.Backpressure("the cluster is full"), 503),
        (emb.errors.TimedOut("no outcome"), 504),
        (TimeoutError(), 504),
    ],
    ids=["full", "unknown", "timeout"],
)
def test_failures_have_a_status(service: ModuleType, error: Exception, status: int) -> None:
    """503: nothing was stored. 504: the order may be stored."""

    async def fails(*_: object, **__: object) -> None:
        raise error

    async def main() -> None:
        async with running(service) as client:
            real = service.app.state.publisher
            service.app.state.publisher = type("Failing", (), {"send": staticmethod(fails)})
            answer = await client.post("/orders", json=ORDERS[0])
            service.app.state.publisher = real
            assert answer.status_code == status
            assert answer.headers.get("retry-after") == ("1" if status == 503 else None)

    asyncio.run(main())
