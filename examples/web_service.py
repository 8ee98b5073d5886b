"""A web service that publishes and reads orders, with FastAPI.

    pip install fastapi uvicorn
    embarcadero up --brokers 2 --detach
    python examples/web_service.py      # several processes: uvicorn --app-dir examples web_service:app --workers 4

    curl localhost:8000/orders --json '{"item": "two coffees", "table": 4}'
    curl localhost:8000/orders/0
    curl "localhost:8000/orders?start=0&wait=10"

One client and one publisher serve all requests. Orders of the same moment travel in one batch, and share one sync.

The service answers 201 once the order is on disk (`ack=2`), with its position. 503 means that nothing was stored, and
the caller can try again. 504 means that the order may be stored: the caller reads the log before it tries again.

The cluster is the one of the configuration: `EMBARCADERO_BROKERS=host:9092` names another one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import embarcadero as emb

TOPIC = "web-orders"
ANSWER_S = 10.0  # how long a caller waits for an outcome
FOREVER_S = 7 * 86_400.0  # the publisher keeps trying while the cluster is away; each caller has its own limit


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connect before the first request. After the last one, wait until every order has its outcome."""
    async with emb.aio.connect() as log:
        with suppress(emb.errors.TopicExists):  # another process of this service was faster
            if TOPIC not in [topic.name for topic in await log.topics()]:
                await log.create_topic(TOPIC)
        # Orders of different callers are independent: with order="total" none waits for another one.
        async with log.publisher(TOPIC, ack=2, order="total", delivery_timeout=FOREVER_S) as publisher:
            app.state.log, app.state.publisher = log, publisher
            yield


app = FastAPI(title="Orders", lifespan=lifespan)


class Order(BaseModel):
    """An order of a table."""

    item: str
    table: int


@app.post("/orders", status_code=201)
async def publish(order: Order, request: Request) -> dict[str, int]:
    """Publish an order, and return its position."""
    value, key = order.model_dump_json().encode(), b"table %d" % order.table
    async with asyncio.timeout(ANSWER_S):
        future = await request.app.state.publisher.send(value, key=key, timeout=ANSWER_S / 2)
        position = await future
    return {"seq": position.seq}


@app.get("/orders/{seq}")
async def order_at(seq: int, request: Request) -> dict[str, Any]:
    """Return one order."""
    try:
        found = await request.app.state.log.read(TOPIC, seq, seq + 1)
    except emb.errors.Trimmed as error:
        raise HTTPException(410, error.message) from None
    except (emb.errors.FuturePosition, emb.UsageError) as error:
        raise HTTPException(404, error.message) from None
    if not found.num_rows:
        raise HTTPException(404, f"no order has seq {seq}: a crash of the cluster skipped this number")
    return shown(seq, found.column("value")[0].as_py())


@app.get("/orders")
async def orders_from(
    request: Request, start: Annotated[int, Query(ge=0)] = 0, wait: Annotated[float, Query(gt=0, le=30)] = 1.0
) -> list[dict[str, Any]]:
    """Return some orders from `start` on. Without new ones, wait up to `wait` seconds: callers need no tight loop."""
    async with request.app.state.log.subscribe(TOPIC, start=start) as subscriber:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                async for batch in subscriber:
                    if orders := [shown(record.seq, record.value) for record in batch if record.seq >= start]:
                        return orders
    return []


def shown(seq: int, value: bytes) -> dict[str, Any]:
    """Return an order with its seq."""
    return {"seq": seq, **json.loads(value)}


@app.exception_handler(emb.Retriable)
async def not_stored(_: Request, error: emb.Retriable) -> JSONResponse:
    """Answer 503: the cluster is full or unreachable."""
    return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})


@app.exception_handler(emb.OutcomeUnknown)
@app.exception_handler(TimeoutError)
async def maybe_stored(_: Request, error: Exception) -> JSONResponse:
    """Answer 504: the outcome is unknown."""
    return JSONResponse({"detail": f"the order may be stored: {error or 'no answer in time'}"}, 504)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app)
