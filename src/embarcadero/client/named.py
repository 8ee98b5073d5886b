"""Sessions by their name: moved on without sending anything, and what an earlier holder has done."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from embarcadero.client.arguments import AS_CONFIGURED, PublisherOptions, Timeout, check_timeout
from embarcadero.errors import BadFrame, NotAvailable
from embarcadero.types import NO_SESSION, Order
from embarcadero.wire import messages as m

if TYPE_CHECKING:
    from embarcadero.client import aio
    from embarcadero.client.publish.pump import Pump
    from embarcadero.client.thread import LoopThread

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Answer = TypeVar("Answer", bound=m.Message)


class _Asks(Protocol):
    async def _ask(self, message: m.Message, kind: type[Answer], timeout: Timeout, *, again: bool = True) -> Answer: ...


class HeldName(NamedTuple):
    """Which session holds a name, and the sequence that it expects next."""

    session: int
    expected: int


class SessionCalls:
    """The part of a Log about named sessions."""

    async def held_name(
        self: _Asks, topic: str, name: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Look at a named session without taking its name. A name that no session holds is opened, at sequence 0.

            held = await log.held_name("orders", "job-7/progress")
        """
        return await _ask_for_name(self, topic, name, None, NO_SESSION, topic_id, timeout)

    async def move_name(
        self: _Asks, topic: str, name: str, at: int, holder: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Move a named session on to the sequence `at` if the session `holder` still holds the name: compare and move.

        Returns what holds the name afterwards. It is at `at` if the call moved it, or another caller moved it there.

            held = await log.held_name("orders", "job-7/progress")
            won = (await log.move_name("orders", "job-7/progress", 42, held.session)).expected == 42
        """
        return await _ask_for_name(self, topic, name, at, holder, topic_id, timeout)

    async def open_session(
        self: _Asks, topic: str, name: str, at: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> tuple[int, int]:
        """Move a named session on to the sequence `at`; (where it was before, where it is now).

        It never goes back, so a name alone is a number that only grows, kept in the log for as long as sessions are.

            before, now = await log.open_session("orders", "job-7/progress", 42)
        """
        PublisherOptions(session=name, session_at=at)  # checks both
        ask = m.OpenSession(topic=topic, name=name, at=at, topic_id=topic_id, order=int(Order.STRONG))
        opened = await self._ask(ask, m.Opened, timeout)
        return opened.reached, opened.expected


async def _ask_for_name(
    log: _Asks, topic: str, name: str, at: int | None, holder: int, topic_id: int, timeout: Timeout
) -> HeldName:
    PublisherOptions(session=name, session_at=at)  # checks both
    ask = m.OpenSession(topic=topic, name=name, at=at, holder=holder, topic_id=topic_id, order=int(Order.STRONG))
    answer = await log._ask(ask, m.Message, timeout)
    if isinstance(answer, m.Opened):
        return HeldName(answer.session, answer.expected)
    if not isinstance(answer, m.NameHeld):
        raise BadFrame(f"OpenSession was answered with {type(answer).__name__}", "report it: a bug")
    if answer.expected is None:
        raise NotAvailable("a broker of an earlier version can't tell where a named session is", "upgrade all brokers")
    return HeldName(answer.session, answer.expected)


class SyncSessionCalls:
    """The same for the synchronous client."""

    _log: aio.Log
    thread: LoopThread

    @property
    def twin(self) -> aio.Log:
        """The asyncio client that does the work. Its coroutines run on the background thread: `thread.wait(...)`."""
        return self._log

    def open_session(self, topic: str, name: str, at: int, *, timeout: Timeout = AS_CONFIGURED) -> tuple[int, int]:
        """Move a named session on to the sequence `at`; (where it was before, where it is now).

        It never goes back, so a name alone is a number that only grows, kept in the log for as long as sessions are.

            before, now = log.open_session("orders", "job-7/progress", 42)
        """
        return self.thread.wait(self._log.open_session(topic, name, at, timeout=timeout))


class PublisherCalls:
    """The part of a Publisher about its session's earlier holders."""

    _pump: Pump

    async def already_in(self, timeout: float | None = None) -> int:
        """How many sequences from `session_at` on an earlier holder of this session has used.

            async with await log.publisher("orders", session="job-7", session_at=4096) as publisher:
                done = await publisher.already_in()           # batches 4096 to 4096 + done are in, or some of them
        """
        check_timeout(timeout)
        return await self._pump.already_in(timeout)


class SyncPublisherCalls:
    """The same for the synchronous client."""

    pump: Pump
    _thread: LoopThread

    def already_in(self, timeout: float | None = None) -> int:
        """How many sequences from `session_at` on an earlier holder of this session has used.

            with log.publisher("orders", session="job-7", session_at=4096) as publisher:
                done = publisher.already_in()           # batches 4096 to 4096 + done are in, or some of them
        """
        check_timeout(timeout)
        return self._thread.wait(self.pump.already_in(timeout))
