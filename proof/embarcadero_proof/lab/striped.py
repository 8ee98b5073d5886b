"""A publisher for stress: it sends a session's batches out of order over all brokers.

The client library never does that; networks do. Windows of sequences are shuffled, and striped over the brokers.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from embarcadero.errors import EmbarcaderoError, from_wire
from embarcadero.limits import CONTROL_BYTES_MAX, SCRATCH_BYTES, SESSION_WINDOW
from embarcadero.types import Outcome
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    AcksReceived,
    ControlReceived,
    CreditReceived,
    FrameKind,
    FrameReceiver,
    batch_header,
    control_frame,
    payload_crc,
)
from embarcadero.wire.messages import Failed, Hello, Opened, OpenSession, Welcome

_RECEIVES = frozenset({FrameKind.CONTROL, FrameKind.ACK, FrameKind.CREDIT, FrameKind.FULL, FrameKind.FETCHED})


class _Wire(asyncio.BufferedProtocol):
    """One connection to one broker."""

    def __init__(self, session: StripedSession) -> None:
        self._session = session
        self._receiver = FrameReceiver(
            allowed=_RECEIVES, scratch=memoryview(bytearray(SCRATCH_BYTES)), control_bytes_max=CONTROL_BYTES_MAX
        )
        self.transport: Any = None
        self.sent = self.credit = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for event in self._receiver.received(nbytes):
            if isinstance(event, AcksReceived):
                self._session.acked(event.acks)
            elif isinstance(event, CreditReceived):
                self.credit = event.total
                self._session.moved.set()
            elif isinstance(event, ControlReceived) and isinstance(event.message, Opened | Failed | Welcome):
                self._session.answered(event.message)

    def send(self, *buffers: bytes) -> None:
        """Write without waiting."""
        self.transport.writelines(buffers)


class StripedSession:
    """One session into one topic. Every batch must be answered with ORDERED; any other answer is an error."""

    def __init__(self, payload: bytes, records: int, rng: random.Random) -> None:
        self._payload, self._records, self._rng = payload, records, rng
        self._crc = payload_crc(payload)
        self._wires: list[_Wire] = []
        self._answers: asyncio.Queue[Opened | Failed | Welcome] = asyncio.Queue()
        self.moved = asyncio.Event()
        self._lane = self._session = 0
        self.unacked: set[int] = set()
        self.refused: list[Outcome] = []

    async def open(self, addresses: list[str], topic: str) -> None:
        """Connect to all brokers and open the session."""
        loop = asyncio.get_running_loop()
        for address in addresses:
            host, _, port = address.rpartition(":")
            _, wire = await loop.create_connection(lambda: _Wire(self), host, int(port))
            wire.send(control_frame(Hello(versions=[PROTOCOL_VERSION], client="striped"), 1))
            await self._answer()
            self._wires.append(wire)
        self._wires[0].send(control_frame(OpenSession(topic=topic), 2))
        opened = await self._answer()
        if isinstance(opened, Opened):
            self._lane, self._session = opened.lane, opened.session

    async def _answer(self) -> Opened | Failed | Welcome:
        answer = await asyncio.wait_for(self._answers.get(), 30)
        if isinstance(answer, Failed):
            raise from_wire(answer.code, answer.message, answer.hint)
        return answer

    def answered(self, message: Opened | Failed | Welcome) -> None:
        """Take a control answer."""
        self._answers.put_nowait(message)

    def acked(self, acks: Any) -> None:
        """Take outcomes."""
        self.unacked.difference_update(acks["session_seq"].tolist())
        self.refused += [Outcome(o) for o in acks["outcome"].tolist() if o not in (Outcome.ORDERED, Outcome.DUP_OF)]
        self.moved.set()

    async def send(self, sequences: list[int]) -> None:
        """Send these sequences in this order, one broker after the other, within credit."""
        size = 64 + len(self._payload)
        for sequence in sequences:
            wire = self._wires[sequence % len(self._wires)]
            while wire.sent + size > wire.credit:
                self.moved.clear()
                await asyncio.wait_for(self.moved.wait(), 30)
            header = batch_header(
                session_seq=sequence, low=0, lane=self._lane, session=self._session, count=self._records,
                crc=self._crc, length=len(self._payload),
            )  # fmt: skip
            wire.sent += size
            self.unacked.add(sequence)
            wire.send(header, self._payload)

    async def send_shuffled(self, first: int, stop: int, window: int = SESSION_WINDOW // 2) -> None:
        """Send [first, stop) in shuffled windows; a window is acked before the second one after it starts."""
        for start in range(first, stop, window):
            sequences = list(range(start, min(start + window, stop)))
            self._rng.shuffle(sequences)
            await self.settle(window)
            await self.send(sequences)
        await self.settle(0)

    async def settle(self, most: int) -> None:
        """Wait until at most `most` batches have no ack; refused batches are an error."""
        while len(self.unacked) > most:
            self.moved.clear()
            await asyncio.wait_for(self.moved.wait(), 60)
        if self.refused:
            raise EmbarcaderoError(f"batches were refused: {sorted(set(self.refused))}", "see the broker's log")

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires:
            wire.transport.close()
