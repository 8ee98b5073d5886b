"""Whole conversations: a broker with a hostile client, a publisher with a hostile broker, and HTTP."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import numpy as np

from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.session import PublisherSettings
from embarcadero.limits import (
    BROKER_LANES_FIRST,
    CONTROL_BYTES_MAX,
    FETCH_BYTES_MAX,
    FRAME_BYTES_MAX,
    MIB,
    SCRATCH_BYTES,
)
from embarcadero.types import LanePosition, Order, StagedBatch
from embarcadero.watch.endpoints import Endpoint, EndpointFiles
from embarcadero.wire import codec, messages
from embarcadero.wire.codec import (
    ACK,
    AcksReceived,
    ControlReceived,
    CreditReceived,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
)
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import MESSAGES, acks, batch_frame, raw_payload, reference_frame
from embarcadero_proof.fuzz.target import Inputs, Target, agree
from embarcadero_proof.fuzz.targets.wire import FROM_BROKERS, mend_frames
from embarcadero_proof.fuzz.tree import tree_mutation
from embarcadero_proof.fuzz.world import World, send

_BODY_AT: Final = 16
_tree = tree_mutation(msgspec.msgpack)


# --- a broker and any client ------------------------------------------------------------------------------------------
def _conversations() -> Inputs:
    asked = [codec.control_frame(message, number) for number, message in enumerate(MESSAGES, 9)]
    lane: dict[str, Any] = {"lane": 0, "max_bytes": 1 << 20}
    good = [
        codec.control_frame(messages.OpenSession(topic="total", name="n"), 2), batch_frame(raw_payload(1), session=2),
        codec.control_frame(messages.Fetch(**lane, by="earliest", read="ordered"), 3),
        codec.control_frame(messages.Fetch(**lane, by="seq", start=1, partitions=[0, 1], read="ordered"), 4),
        codec.control_frame(messages.Fetch(**lane, by="time", start=5, control=True, read="ordered", stop=3), 5),
        codec.control_frame(messages.Measure(lane=0, start=0, stop=3, piece_bytes=100, pieces_max=4), 6),
        codec.control_frame(messages.Trim(lane=1, by="index", before=1), 7),
        codec.control_frame(messages.Find(lane=1, by="seq", start=1), 8),
        codec.control_frame(messages.GetTail(lane=0), 9),
        codec.control_frame(messages.NoteProgress(topic="total", reader="r", places={0: LanePosition(1, 2)}), 10),
        codec.control_frame(messages.CreateTopic(name="new", order=5, partitions=3), 11),
        codec.control_frame(messages.AlterTopic(name="total", gap_timeout_ms=50), 12),
        codec.control_frame(messages.GetLanes(lane=2), 13), batch_frame(raw_payload(1), lane=2, session=0),
        codec.control_frame(messages.CloseSession(lane=0, session=0), 14),
    ]  # fmt: skip
    at, staged = (BROKER_LANES_FIRST, 0, _topic_id("loose")), raw_payload(1)
    wrong = [(at[0], 1, at[2]), (at[0], 0, 9), (at[0] + 1, 0, at[2])]
    session = {"session": 0, "count": 1}
    refer = [
        reference_frame(staged, at, **session, session_seq=8), batch_frame(staged, **session, session_seq=9),
        *(reference_frame(staged, each, **session, session_seq=10) for each in wrong),
        reference_frame(raw_payload(2), at, **session, session_seq=11),
        reference_frame(staged, at, session=0, count=2, session_seq=12),
        codec.control_frame(messages.DeleteTopic(name="loose"), 15),
        reference_frame(staged, at, **session, session_seq=13),
    ]
    some = [b"".join(asked[at : at + 6]) for at in range(0, len(asked), 6)]  # few inputs: each one takes a while
    some += [b"".join(refer), refer[0] + refer[1]]
    return [b"".join(good), *some, good[0] + good[1], good[0] + good[14], *good[2:6]]


def _topic_id(name: str) -> int:
    """Return the id of a topic, which is the same in each run."""
    return next(topic.id for topic in World().directory.topics.all() if topic.name == name)


def _talk(data: bytes, rng: Random, pool: Inputs) -> bytes:
    """Make mostly messages that are well formed and meaningless."""
    choice = rng.random()
    if choice < 0.2:
        return data + rng.choice(pool)
    if choice < 0.3 or len(data) <= _BODY_AT:
        return mutated(data, rng, pool)
    at = rng.choice(_frame_starts(data))
    length = int.from_bytes(data[at + 4 : at + 8], "little")
    body_at, after = at + _BODY_AT, at + _BODY_AT + length
    body = _tree(data[body_at:after], rng, [b"\xc0"])
    return data[: at + 4] + len(body).to_bytes(4, "little") + data[at + 8 : body_at] + body + data[after:]


def _frame_starts(data: bytes) -> list[int]:
    """Return the starts of the control frames at the beginning of an input."""
    starts, at = [0], 0
    while len(data) > at + _BODY_AT and data[at + 3] == FrameKind.CONTROL:
        starts.append(at)
        at += _BODY_AT + int.from_bytes(data[at + 4 : at + 8], "little")
    return starts


def _broker(data: bytes) -> str:
    """Check that a broker survives any input of one client, and still serves another one."""
    world = World()
    world.work()
    send(world.connect(), batch_frame(raw_payload(1), lane=2, session=0, count=1))  # for references
    hostile = world.connect()
    hostile.peer.take_output()
    send(hostile, data)
    world.turn(3)
    answers = _answers(hostile.peer.take_output())
    hostile.closed()
    other = world.connect()
    send(other, codec.control_frame(messages.GetTail(lane=0), 77))
    world.turn(2)
    agree(any(isinstance(one, messages.TailIs | messages.Failed) for one in _messages(other.peer.take_output())),
          "a broker that no longer answers others")  # fmt: skip
    return answers


def _events(chunks: list[Any]) -> list[Any]:
    receiver = FrameReceiver(
        allowed=FROM_BROKERS, scratch=memoryview(bytearray(SCRATCH_BYTES)), control_bytes_max=CONTROL_BYTES_MAX
    )
    found: list[Any] = []
    data = memoryview(b"".join(bytes(chunk) for chunk in chunks))
    while data:
        buffer = receiver.get_buffer()
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        found += receiver.received(size)
        data = data[size:]
    return found


def _messages(chunks: list[Any]) -> list[Any]:
    return [event.message for event in _events(chunks) if isinstance(event, ControlReceived)]


def _answers(chunks: list[Any]) -> str:
    found = []
    for event in _events(chunks):
        if isinstance(event, ControlReceived):
            message = event.message
            found.append(
                f"{message.code} {message.message}" if isinstance(message, messages.Failed) else type(message).__name__
            )
        elif isinstance(event, AcksReceived):
            found += [f"outcome {outcome}" for outcome in event.acks["outcome"].tolist()[:3]]
        else:
            found.append(type(event).__name__)
    return " ".join(found[:6])


# --- a publisher and any broker ---------------------------------------------------------------------------------------
def _broker_says() -> Inputs:
    opened = messages.Opened(lane=0, session=3, index=9, expected=0, low=0)
    made = np.zeros(3, dtype=ACK)
    made["session"], made["outcome"] = 3, 1
    made["session_seq"], made["index"], made["seq"] = range(3), range(10, 13), range(50, 53)
    others = [codec.control_frame(message, 1) for message in MESSAGES]
    start = codec.control_frame(opened, 1) + codec.credit_frame(1 << 24)
    talks = [start + codec.ack_frame(made), start + codec.ack_frame(acks(30)), *others, start + codec.full_frame(),
            start + others[4] + codec.ack_frame(made)]  # fmt: skip
    return [bytes([order]) + each for each in talks for order in (0, 2)]


def _publisher(data: bytes) -> str:
    """Check that a publisher settles each batch at most once, with a position or a typed error, after any frames."""
    core = PublisherCore(PublisherSettings(
        topic="t", window_bytes=1 << 20, resend_after_us=5_000, delivery_timeout_us=10**9,
        order=data[0] % 3 if data else Order.TOTAL, durable=len(data) % 2 == 0, replicated=len(data) % 3 == 0,
    ))  # fmt: skip
    link = Link(1, 0)
    link.references = len(data) % 5 > 0
    core.on_connected(link, 0)
    batches = [core.add(raw_payload(1), 1, 0, 0, 0) for _ in range(3)]
    batches.insert(1, core.add_reference(StagedBatch(1, BROKER_LANES_FIRST, 0, 100, 1, 7), 0, 0))
    settled: list[Any] = []
    now = 0
    for event in _events([data[1:]]):
        now += 3_000
        if isinstance(event, ControlReceived):
            core.on_control(1, event.request, event.message, now)
        elif isinstance(event, AcksReceived):
            core.on_acks(1, event.acks, now)
        elif isinstance(event, CreditReceived):
            core.on_credit(1, event.total, now)
        elif not isinstance(event, FetchedReceived):
            core.on_full(1, now)
        core.on_timer(now)
        core.take_output(), core.take_losses(), core.take_abandoned()
        settled += core.take_settled()
    agree(len(settled) == len({id(batch) for batch in settled}) <= len(batches), "a batch is settled twice")
    return f"{len(settled)} settled, {core.failed and type(core.failed).__name__}"


# --- HTTP -------------------------------------------------------------------------------------------------------------
def _requests() -> Inputs:
    return [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /health HTTP/1.0\r\n\r\n", b"GET /\r\n\r\n",
        b"GET /ready?x=1 HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    ]  # fmt: skip


class _Writer:
    """Collects an endpoint's answer."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _http(data: bytes) -> str:
    """Check that an answer is HTTP, if there is one."""
    writer = _Writer()

    async def serve() -> None:
        reader = asyncio.StreamReader(limit=8_192)
        reader.feed_data(data)
        reader.feed_eof()
        await Endpoint("1", EndpointFiles(Path(os.devnull)))._serve_one(reader, writer)  # type: ignore[arg-type]

    _loop().run_until_complete(serve())
    head = writer.data.partition(b"\r\n")[0]
    agree(not writer.data or head.startswith(b"HTTP/1.1 "), "an answer that is not HTTP")
    return head.decode()


_FETCHED_BYTES: Final = FETCH_BYTES_MAX + FRAME_BYTES_MAX + MIB
_words: Final = (
    b"GET ", b"HEAD ", b"/metrics", b"/health", b"/ready", b"/targets", b"\r\nHost: ",
    b"\r\n", b"\r\n\r\n", b" HTTP/1.1", b"?", b" " * 9_000,
)  # fmt: skip
SERVING: Final = (
    Target("broker", "a broker with a hostile client", _conversations, _broker, _talk, mend_frames,
           memory_bytes=64 * MIB),
    Target("publisher", "answers of brokers to a publisher: each batch is settled once", _broker_says, _publisher,
           mend=lambda data, rng: data[:1] + mend_frames(data[1:], rng), memory_bytes=_FETCHED_BYTES),
    Target("http", "the metrics port", _requests, _http, words=_words),
)  # fmt: skip
