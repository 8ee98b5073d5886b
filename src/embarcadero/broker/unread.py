"""Memory for answers that clients have not read yet: bounded in total, and a slow reader slows only itself.

Theory of operation. The answer to a fetch stays in the broker's memory until the client's socket has taken it, so a
client that asks and does not read holds memory. Three rules bound that:

1. A connection that holds more than an eighth of `broker.send_queue_bytes` gets no further answer.
2. An answer has at most an eighth of the free part of `broker.unread_bytes`. Slow readers therefore get less the more
   of them there are, and never all of it. A quarter is kept for connections that read their last answer promptly.
3. While a fetch waits for memory, connections that did not read an answer within `broker.unread_s` are ended.

An answer has at least one batch, so a fetch waits until the largest batch fits. Reads of segment files are counted from
when they are asked for: their results would otherwise all come at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from embarcadero.broker.connection import Connection

_SHARE: Final = 8  # an answer may have one part in so many of the free memory
_KEPT: Final = 4  # one part in so many is for connections that read promptly
_PROMPT_US: Final = 1_000_000


@dataclass(slots=True)
class _Holder:
    mark: int  # bytes that the connection had been given at `since_us`; once it has read them, the next mark is set
    since_us: int


class UnreadBytes:
    """What all connections of one broker hold: answers on their way, and room for reads of files."""

    def __init__(self, total_bytes: int, batch_bytes: int, patience_s: float) -> None:
        self.total_bytes = max(total_bytes, _KEPT * batch_bytes)
        self._batch_bytes, self._patience_us = batch_bytes, int(patience_s * 1_000_000)
        self._holders: dict[Connection, _Holder] = {}
        self.used = 0  # as of the last look, and what was added since
        self.refused = 0  # fetches that had to wait for memory since the last look
        self.waits = 0  # how often that happened, ever

    def allowed(self, connection: Connection, wanted: int) -> int:
        """How many bytes the next answer of a connection may have; 0: not now."""
        free = self.total_bytes - self.used
        if not connection.prompt:
            free -= self.total_bytes // _KEPT
        if free < self._batch_bytes:
            self.refused += 1
            self.waits += 1
            return 0
        return max(1, min(wanted, free // _SHARE))

    def given(self, connection: Connection, size: int, now_us: int) -> None:
        """Count an answer of `size` bytes, or room for one that is being read from a file."""
        self.used += size
        if connection not in self._holders:
            self._holders[connection] = _Holder(connection.given_bytes, now_us)

    def look(self, now_us: int) -> Connection | None:
        """Count again what is unread. Returns a connection to end: the one that has not read for longest.

        None while no fetch waits for memory, or while all connections read.
        """
        used, slowest, slowest_us = 0, None, now_us - self._patience_us
        for connection, holder in list(self._holders.items()):
            unread = connection.unread_bytes()
            if connection.gone or not unread + connection.reserved_bytes:
                del self._holders[connection]
                connection.prompt |= not connection.gone
                continue
            used += unread + connection.reserved_bytes
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
