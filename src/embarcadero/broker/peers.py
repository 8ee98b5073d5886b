"""What one connection, and all connections of one address, may hold of what a broker shares out.

Two things are held until the peer goes on: room in the log for a batch whose header came and whose bytes come slowly,
and rows of session tables. Both are bounded here, so that a few connections cannot exclude all others:

- A batch that is under way for longer than STALLED_S is stalled. Stalled batches keep at most an eighth of the log's
  chunks; beyond that, the oldest one is ended with its connection. After `broker.frame_timeout_s` each one is.
- Batches under way of one address take at most `broker.arriving_share` of the log. One more is answered BACKPRESSURE.
- A connection, and an address, have a bounded number of open sessions. One more is refused with TooMany.

Addresses are compared without their port. A connection without an address (a socket of the simulator) has no share.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from embarcadero.config.table import Broker as BrokerSettings
from embarcadero.errors import TooMany
from embarcadero.limits import LINE_BYTES, STALLED_S

if TYPE_CHECKING:
    from embarcadero.broker.connection import Connection
    from embarcadero.fabric.log import Reservation

_STALLED_PARTS: Final = 8
_HINT: Final = "close publishers that are idle, or raise"


class _UnderWay(NamedTuple):
    reservation: Reservation
    since_us: int


class Peers:
    """Accounts of all connections of one broker."""

    def __init__(self, settings: BrokerSettings, log_bytes: int, chunk_bytes: int, sessions: int) -> None:
        self._settings, self._log_bytes, self._sessions = settings, log_bytes, sessions
        self._chunk_lines = chunk_bytes // LINE_BYTES
        self._stalled_chunks_max = max(1, log_bytes // chunk_bytes // _STALLED_PARTS)
        self._under_way: dict[Connection, _UnderWay] = {}
        self._open: Counter[tuple[str, int]] = Counter()  # by address and lane

    # --- batches under way --------------------------------------------------------------------------------------------
    def received(self, connection: Connection, now_us: int) -> None:
        """Bytes of a connection came: remember since when its batch is under way."""
        arriving, known = connection.arriving, self._under_way.get(connection)
        if arriving is None:
            if known is not None:
                del self._under_way[connection]
        elif known is None or known.reservation is not arriving:
            self._under_way[connection] = _UnderWay(arriving, now_us)

    def may_send(self, connection: Connection, size: int) -> bool:
        """Whether the log has room for another batch of this connection's address."""
        most = self._settings.arriving_share * self._log_bytes
        if not connection.host or len(self._under_way) * size < most // 2:
            return True
        held = sum(one.reservation.size for other, one in self._under_way.items() if other.host == connection.host)
        return held + size <= most

    def too_slow(self, now_us: int) -> list[Connection]:
        """Connections whose batch has been under way for too long, the oldest first."""
        if not self._under_way:
            return []
        late_us, stalled_us = now_us - int(self._settings.frame_timeout_s * 1e6), now_us - int(STALLED_S * 1e6)
        oldest_first = sorted(self._under_way.items(), key=lambda item: (item[1].since_us, item[0].number))
        stalled = [(connection, one) for connection, one in oldest_first if one.since_us <= stalled_us]
        chunks = Counter(self._chunk(one) for _, one in stalled)
        ended = []
        for connection, one in stalled:
            if one.since_us <= late_us or len(chunks) > self._stalled_chunks_max:
                ended.append(connection)
                chunks[self._chunk(one)] -= 1
                chunks += Counter()  # drops those that are 0
        return ended

    def _chunk(self, one: _UnderWay) -> int:
        return one.reservation.location // self._chunk_lines

    # --- sessions -----------------------------------------------------------------------------------------------------
    def check_session(self, connection: Connection, lane: int, brokers: int) -> None:
        """Raise TooMany if a connection or its address has all the sessions of a topic that it may have.

        An address may have its share of the table at each of the live brokers, so that all together stay below it.
        """
        most = self._settings.sessions_per_connection
        if len(connection.opened) >= most:
            raise TooMany(
                f"this connection has {len(connection.opened)} open sessions, of at most {most}",
                f"{_HINT} broker.sessions_per_connection",
            )
        most = max(1, int(self._settings.sessions_per_peer_share * self._sessions) // max(1, brokers))
        if connection.host and self._open[connection.host, lane] >= most:
            raise TooMany(
                f"{connection.host} has {self._open[connection.host, lane]} open sessions of this topic at this "
                f"broker, of at most {most}",
                f"{_HINT} broker.sessions_per_peer_share",
            )

    def opened(self, connection: Connection, key: tuple[int, int]) -> None:
        """Count a session of (lane, handle) for the connection that opened it."""
        if key not in connection.opened:
            connection.opened.add(key)
            self._open[connection.host, key[0]] += 1

    def closed(self, connection: Connection, key: tuple[int, int]) -> None:
        """Count a session no longer."""
        if key in connection.opened:
            connection.opened.discard(key)
            self._uncount(connection.host, key[0])

    def disconnected(self, connection: Connection) -> None:
        """A connection is gone, with all that it held."""
        self._under_way.pop(connection, None)
        for lane, _ in connection.opened:
            self._uncount(connection.host, lane)
        connection.opened.clear()

    def _uncount(self, host: str, lane: int) -> None:
        self._open[host, lane] -= 1
        if not self._open[host, lane]:
            del self._open[host, lane]
