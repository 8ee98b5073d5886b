"""The programs of the processes that `up` starts: nodes, and clients of the cluster.

A node is `main(["--data-dir", FOLDER, ...])`, forked or run as a program: `python -m embarcadero.cli.processes
--data-dir FOLDER --roles broker:0 --parent PID`. A client is `python -m embarcadero.cli.processes NAME FOLDER`: `sweep`
runs while there are staging topics, `tier` with `up --tier`. FOLDER is the folder of the cluster. Roles do not import
the tier: this module creates the reader of tables for brokers, and loads PyIceberg for the first read of a table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from embarcadero.broker.disk_reads import FetchResult, TableReader
from embarcadero.config import Config
from embarcadero.config.secrets import secret_values
from embarcadero.config.table import TierKeys as TierConfig
from embarcadero.errors import EmbarcaderoError
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.node import Surroundings
from embarcadero.node.node import main as run_node_program
from embarcadero.node.process import be_private, die_with, name_process, start_logging
from embarcadero.node.report import report
from embarcadero.types import Cut, LanePosition, Tier
from embarcadero.watch.logs import LogJournal
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.tier.job import Engine
    from embarcadero.tier.serving import TableServer

HOLDER: Final = "up"
"""The holder of the tier lease. A supervisor has one such process at a time, so a new one takes over the lease."""

_ROUND_S: Final = 10.0


# --- nodes ------------------------------------------------------------------------------------------------------------
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node process, which hosts roles; return its exit code."""
    return run_node_program(arguments, SURROUNDINGS)


def table_reader(config: Config, data_dir: Path) -> TableReader | None:
    """Return the brokers' reader of tables in `tier.warehouse`; None if PyIceberg is not installed."""
    return None if find_spec("pyiceberg") is None else LazyTables(config, data_dir)


class LazyTables:
    """A `TableServer` that is loaded by its first call, on a worker."""

    def __init__(self, config: Config, data_dir: Path) -> None:
        self._config, self._data_dir, self._lock = config, data_dir, Lock()
        self._server: TableServer | None = None

    def _loaded(self) -> TableServer:
        with self._lock:
            if self._server is None:
                from embarcadero.tier.serving import TableServer
                from embarcadero.tier.storage import TierSettings

                logging.getLogger("pyiceberg").setLevel(logging.WARNING)  # its INFO level logs each read
                settings = TierSettings.of(self._config, self._data_dir)
                self._server = TableServer(settings.properties, settings.warehouse)
            return self._server

    def fetch(self, tier: Tier, schemas: TopicSchemas, ask: Fetch, stop: int) -> FetchResult:
        return self._loaded().fetch(tier, schemas, ask, stop)

    def find(self, tier: Tier, lane: int, by: str, value: int) -> LanePosition | None:
        return self._loaded().find(tier, lane, by, value)

    def cuts(self, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
        return self._loaded().cuts(tier, lane, start, stop, piece_bytes)


SURROUNDINGS: Final = Surroundings(table_reader)
"""The surroundings of nodes in production: without faults."""


# --- clients ----------------------------------------------------------------------------------------------------------
def run_client(name: str, data_dir: Path) -> None:
    """Run a client of a running cluster until SIGTERM, or until its supervisor dies."""
    die_with(os.getppid())
    name_process(name)
    folder = ClusterFolder(data_dir)
    config = folder.require_running().config
    be_private()
    start_logging(name, config.log, secret_values(config))
    CLIENTS[name](folder, config)


# --- the sweep of staging topics --------------------------------------------------------------------------------------
def _sweep(folder: ClusterFolder, config: Config) -> None:
    asyncio.run(_sweep_rounds(report(folder).addresses, config))


async def _sweep_rounds(addresses: list[str], config: Config) -> None:
    from embarcadero.client.api.aio_log import connect
    from embarcadero.staging.sweep import StagingSweeper

    stop, journal = asyncio.Event(), LogJournal(f"sweep-{os.getpid()}")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await connect(addresses, config=config) as log:
        sweeper = StagingSweeper(log, journal)
        while not stop.is_set():
            try:
                await sweeper.round()
            except (EmbarcaderoError, TimeoutError) as error:
                journal.warn("can't list topics", reason=str(error))
            try:
                async with asyncio.timeout(_ROUND_S):
                    await stop.wait()
            except TimeoutError:
                continue


# --- tiering ----------------------------------------------------------------------------------------------------------
def _tier(folder: ClusterFolder, config: Config) -> None:
    from embarcadero.client.api.sync_log import connect
    from embarcadero.tier.job import TierJobs
    from embarcadero.tier.storage import TierSettings

    for name in ("pyiceberg", "py4j"):  # their INFO level logs each loaded table and each closed connection
        logging.getLogger(name).setLevel(logging.WARNING)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = TierSettings.of(config, folder.path)
    with connect(report(folder).addresses, config=config) as log:
        engine = _engine(log, config.tier)
        journal = LogJournal(f"tier-{os.getpid()}")
        TierJobs(log, settings, journal, holder=HOLDER, engine=engine).follow(stop)


def _engine(log: Log, config: TierConfig) -> Engine:
    from embarcadero.tier.job import EngineKind, ProcessEngine

    if config.engine == EngineKind.PROCESS:
        return ProcessEngine(log)
    from embarcadero.spark.tiering import chosen_kind, engine_of

    return engine_of(chosen_kind(config), log, config)


CLIENTS: Final[dict[str, Callable[[ClusterFolder, Config], None]]] = {"sweep": _sweep, "tier": _tier}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in CLIENTS:
        run_client(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
