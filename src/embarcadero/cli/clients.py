"""The clients that `up` keeps running beside nodes: `python -m embarcadero.cli.clients NAME FOLDER`.

`sweep` runs while there are staging topics, `tier` with `up --tier`. FOLDER is that of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from embarcadero.config import Config
from embarcadero.config.secrets import secret_values
from embarcadero.config.table import TierKeys as TierConfig
from embarcadero.errors import EmbarcaderoError
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import be_private, die_with, name_process, start_logging
from embarcadero.node.report import report
from embarcadero.watch.logs import LogJournal

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.tier.job import Engine

HOLDER: Final = "up"
"""Who has the tier lease. One supervisor has one such process at a time: a new one takes over without asking."""

_ROUND_S: Final = 10.0


def main(name: str, data_dir: Path) -> None:
    """Run a client of a running cluster until told to stop, or until its supervisor is gone."""
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

    for name in ("pyiceberg", "py4j"):  # they log a line for each table that is loaded, each connection that is closed
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
    main(sys.argv[1], Path(sys.argv[2]))
