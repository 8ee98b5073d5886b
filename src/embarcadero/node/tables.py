"""The tables that a broker of this process reads for its clients. PyIceberg is loaded when the first one is read."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from embarcadero.broker.read.results import TableReader
from embarcadero.config import Config
from embarcadero.types import Cut, Tier
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from embarcadero.broker.read.results import FetchResult


def table_reader(config: Config, data_dir: Path) -> TableReader | None:
    """The reader of the tables in `tier.warehouse`, for brokers; None where PyIceberg is not installed."""
    return None if find_spec("pyiceberg") is None else LazyTables(config, data_dir)


class LazyTables:
    """A `TableServer` that is loaded, on a worker, when it is first asked."""

    def __init__(self, config: Config, data_dir: Path) -> None:
        self._config, self._data_dir, self._lock = config, data_dir, Lock()
        self._server: TableReader | None = None

    def _loaded(self) -> TableReader:
        with self._lock:
            if self._server is None:
                from embarcadero.tier.serving import TableServer
                from embarcadero.tier.storage import TierSettings

                logging.getLogger("pyiceberg").setLevel(logging.WARNING)  # it logs a line for each read
                settings = TierSettings.of(self._config, self._data_dir)
                self._server = TableServer(settings.properties, settings.warehouse)
            return self._server

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:
        return self._loaded().fetch(tier, schemas, ask, stop)

    def find(self, tier: Tier, lane: int, by: str, value: int) -> tuple[int, int] | None:
        return self._loaded().find(tier, lane, by, value)

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        return self._loaded().cuts(tier, lane, start, stop, piece_bytes)
