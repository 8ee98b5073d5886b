"""The tables that a broker of this process reads for its clients. PyIceberg is loaded when the first one is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

from embarcadero.broker.tables import TableReader
from embarcadero.types import Cut, Tier
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from embarcadero.broker.found import Found


def table_reader(properties: Sequence[str]) -> TableReader | None:
    """The reader of tables for brokers, with `tier.properties`; None where PyIceberg is not installed."""
    return None if find_spec("pyiceberg") is None else LazyTables(properties)


class LazyTables:
    """A `TableServer` that is loaded, on a worker, when it is first asked."""

    def __init__(self, properties: Sequence[str]) -> None:
        self._properties, self._lock = properties, Lock()
        self._server: TableReader | None = None

    def _loaded(self) -> TableReader:
        with self._lock:
            if self._server is None:
                from embarcadero.tier.serving import TableServer
                from embarcadero.tier.settings import parse_properties

                logging.getLogger("pyiceberg").setLevel(logging.WARNING)  # it logs a line for each read
                self._server = TableServer(parse_properties(self._properties))
            return self._server

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> Found:
        return self._loaded().fetch(tier, schemas, ask, stop)

    def find(self, tier: Tier, lane: int, by: str, value: int) -> tuple[int, int] | None:
        return self._loaded().find(tier, lane, by, value)

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        return self._loaded().cuts(tier, lane, start, stop, piece_bytes)
