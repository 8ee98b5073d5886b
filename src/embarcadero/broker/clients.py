"""Memory for answers that clients have not read yet: bounded in total, and a slow reader slows only itself.

Theory of operation. An answer stays in the broker's memory until the client's socket has taken it, so a client that
asks and does not read holds memory. Four rules bound that:

1. A connection that holds more than an eighth of `broker.send_queue_bytes` gets no further answer to a fetch.
2. An answer to a fetch has at most an eighth of the free part of `broker.unread_bytes`. Slow readers therefore get less
   the more of them there are, and never all of it. A quarter is kept for connections that read their last answer
   promptly.
3. Other requests are often much smaller than their answers. While a connection holds more than `UNREAD_PAUSE_BYTES`, or
   more than an eighth of the free part, its requests stay unparsed, and its reads of indexes do not start.
4. While something waits for memory, connections that did not read an answer within `broker.unread_s` are ended.

An answer to a fetch has at least one batch, so a fetch waits until the largest batch fits. A read of a file or a table
counts for as much, at least, from when it begins until its result is there.

Whatever is sent counts, acks and credit too, once a connection holds more than SMALL_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from embarcadero.config.table import Broker as BrokerSettings
from embarcadero.env import Clock
from embarcadero.limits import KIB, UNREAD_PAUSE_BYTES

if TYPE_CHECKING:
    from embarcadero.broker.net.connection import Connection

SMALL_BYTES: Final = 4 * KIB
"""A connection that holds no more than this is not counted: acks of clients that read are not worth the work."""

_SHARE: Final = 8  # an answer may have one part in so many of the free memory
_KEPT: Final = 4  # one part in so many is for connections that read promptly
_PROMPT_US: Final = 1_000_000


@dataclass(slots=True)
class _Holder:
    mark: int  # bytes that the connection had been given at `since_us`; once it has read them, the next mark is set
    since_us: int


class UnreadBytes:
    """What all connections of one broker hold: what was sent to them, and room for reads of files and tables."""

    def __init__(self, settings: BrokerSettings, batch_bytes: int, clock: Clock) -> None:
        self.total_bytes = max(settings.unread_bytes, _KEPT * batch_bytes)
        self._batch_bytes, self._patience_us = batch_bytes, int(settings.unread_s * 1_000_000)
        self._pause_bytes = min(UNREAD_PAUSE_BYTES, settings.send_queue_bytes // _SHARE)
        self._clock = clock
        self._holders: dict[Connection, _Holder] = {}
        self._stopped: dict[Connection, None] = {}  # connections whose requests wait, in the order in which they came
        self.used = 0  # as of the last look, and what was added since
        self.refused = 0  # fetches and requests that had to wait for memory since the last look
        self.waits = 0  # how often a fetch had to, ever

    # --- before an answer ---------------------------------------------------------------------------------------------
    def allowed(self, connection: Connection, wanted: int) -> int:
        """How many bytes the next answer of a connection to a fetch may have; 0: not now."""
        free = self._free(connection)
        if free < self._batch_bytes:
            self.refused += 1
            self.waits += 1
            return 0
        return max(1, min(wanted, free // _SHARE))

    def full(self, connection: Connection) -> bool:
        """Whether the requests of a connection wait until it has read more."""
        unread = connection.unread_bytes()
        if unread <= SMALL_BYTES:
            return False
        free = self._free(connection)
        if unread <= min(free // _SHARE, self._pause_bytes):
            return False
        self.refused += free < self._batch_bytes
        return True

    def stops(self, connection: Connection) -> bool:
        """The same. If so, the connection goes on by itself later: see `go_on`."""
        if not self.full(connection):
            return False
        self._stopped[connection] = None
        self.hold(connection)
        return True

    def go_on(self) -> bool:
        """Take the requests of connections that have read enough since. True if there were any."""
        stopped, self._stopped = self._stopped, {}
        went_on = False
        for connection in stopped:
            if not connection.closing and not self.stops(connection):
                connection.go_on()
                went_on = True
        return went_on

    def _free(self, connection: Connection) -> int:
        free = self.total_bytes - self.used
        return free if connection.prompt else free - self.total_bytes // _KEPT

    # --- what is held -------------------------------------------------------------------------------------------------
    def given(self, connection: Connection, size: int) -> None:
        """Count `size` bytes that were sent."""
        self.used += size
        self.hold(connection)

    def reserve(self, connection: Connection, asked: int) -> None:
        """Count room for the result of a read of a file or a table that begins."""
        size = self.most(asked)
        connection.reading_bytes += asked
        connection.reserved_bytes += size
        self.given(connection, size)

    def release(self, connection: Connection, asked: int) -> None:
        """The result is there, or will not be: from now on it counts as what is sent."""
        size = self.most(asked)
        connection.reading_bytes -= asked
        connection.reserved_bytes -= size
        self.used -= size

    def most(self, asked: int) -> int:
        """How many bytes the result of a read that asks for `asked` may have: it has at least one batch."""
        return max(asked, self._batch_bytes)

    def hold(self, connection: Connection) -> None:
        """See from now on whether a connection reads: it has an answer to a fetch, or holds memory."""
        if connection not in self._holders:
            self._holders[connection] = _Holder(connection.given_bytes, self._clock.now_us())

    def look(self, now_us: int) -> Connection | None:
        """Count again what is unread. Returns a connection to end: the one that has not read for longest.

        None while nothing waits for memory, or while all connections read.
        """
        used, slowest, slowest_us = 0, None, now_us - self._patience_us
        for connection, holder in list(self._holders.items()):
            unread, held = connection.unread_bytes(), connection.held_bytes
            if connection.gone or not held:
                del self._holders[connection]
                connection.prompt |= not connection.gone
                continue
            used += held
            if connection.given_bytes - unread >= holder.mark:
                connection.prompt = connection.prompt or now_us - holder.since_us < _PROMPT_US
                holder.mark, holder.since_us = connection.given_bytes, now_us
            elif now_us - holder.since_us >= _PROMPT_US:
                connection.prompt = False
                if holder.since_us <= slowest_us and not connection.closing:
                    slowest, slowest_us = connection, holder.since_us
        short, self.used, self.refused = self.refused > 0, used, 0
        return slowest if short else None

    @property
    def holders(self) -> int:
        """Connections that hold memory."""
        return len(self._holders)
