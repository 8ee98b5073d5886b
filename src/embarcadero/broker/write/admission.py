"""What one connection, and all connections of one address, may hold of the log while a batch arrives.

A header takes room in the log for its payload, and the bytes may come slowly. Three rules keep a few connections from
excluding all others:

- A batch that has been arriving for `broker.frame_timeout_s` is ended with its connection.
- A batch that has been arriving for STALLED_S is stalled. While the log is filling up (`broker.water_low`), stalled
  batches keep at most an eighth of its chunks: the address that keeps most of them loses its oldest first.
- Batches that arrive from one address take at most `broker.arriving_share` of the log; one more gets BACKPRESSURE.

Addresses are compared without their port. A connection without an address (a socket of the simulator) stands for itself
and has no share. What an address may have of the tables of sessions is decided where these are: `sequencer/control.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from embarcadero.config.table import Broker as BrokerSettings
from embarcadero.limits import LINE_BYTES, STALLED_S

if TYPE_CHECKING:
    from embarcadero.broker.net.connection import Connection
    from embarcadero.fabric.log import Reservation

_STALLED_PARTS: Final = 8


def peer_number(host: str) -> int:
    """Return the number by which the sequencer tells addresses apart; 0: no address."""
    return int.from_bytes(blake2b(host.encode(), digest_size=4).digest(), "little") or 1 if host else 0


class _Arriving(NamedTuple):
    reservation: Reservation
    since_us: int


class Peers:
    """Accounts of the batches that are arriving at one broker."""

    def __init__(self, settings: BrokerSettings, log_bytes: int, chunk_bytes: int) -> None:
        self._settings, self._log_bytes = settings, log_bytes
        self._chunk_lines = chunk_bytes // LINE_BYTES
        self._stalled_chunks_max = max(1, log_bytes // chunk_bytes // _STALLED_PARTS)
        self._arriving: dict[Connection, _Arriving] = {}
        self._bytes: Counter[str] = Counter()  # by address

    def received(self, connection: Connection, now_us: int) -> None:
        """Bytes of a connection came: remember since when its batch is arriving."""
        arriving, known = connection.arriving, self._arriving.get(connection)
        if known is not None and known.reservation is not arriving:
            self._forget(connection)
        if arriving is not None and (known is None or known.reservation is not arriving):
            self._arriving[connection] = _Arriving(arriving, now_us)
            self._bytes[connection.host] += arriving.size

    def disconnected(self, connection: Connection) -> None:
        """A connection is gone, with all that it held."""
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        if (known := self._arriving.pop(connection, None)) is not None:
            self._bytes[connection.host] -= known.reservation.size
            if not self._bytes[connection.host]:
                del self._bytes[connection.host]

    def may_send(self, connection: Connection, size: int) -> bool:
        """Whether the log has room for another batch of this connection's address."""
        if not connection.host or connection.host not in self._bytes:
            return True
        return self._bytes[connection.host] + size <= self._settings.arriving_share * self._log_bytes

    def too_slow(self, now_us: int, occupied: float) -> list[Connection]:
        """Return the connections to end. `occupied`: the share of the log that is in use."""
        if not self._arriving:
            return []
        late_us = now_us - int(self._settings.frame_timeout_s * 1e6)
        ended = [connection for connection, one in self._arriving.items() if one.since_us <= late_us]
        if occupied >= self._settings.water_low:
            ended += self._stalled(now_us, set(ended))
        return ended

    def _stalled(self, now_us: int, but: set[Connection]) -> list[Connection]:
        """Return the connections to end so that stalled batches keep no more than their part of the log."""
        stalled_us = now_us - int(STALLED_S * 1e6)
        kept: dict[str, list[tuple[int, int, int, Connection]]] = defaultdict(list)  # by address, the oldest last
        chunks: Counter[int] = Counter()
        for connection, one in self._arriving.items():
            if one.since_us <= stalled_us and connection not in but:
                chunk = one.reservation.location // self._chunk_lines
                who = connection.host or str(connection.number)
                kept[who].append((-one.since_us, -connection.number, chunk, connection))
                chunks[chunk] += 1
        for held in kept.values():
            held.sort(key=lambda one: one[:2])
        ended = []
        while len(chunks) > self._stalled_chunks_max:
            most = max(kept.values(), key=lambda held: (len({chunk for _, _, chunk, _ in held}), held[-1][:2]))
            _, _, chunk, connection = most.pop()
            ended.append(connection)
            chunks[chunk] -= 1
            chunks += Counter()  # drops those that are 0
            kept = {who: held for who, held in kept.items() if held}
        return ended
