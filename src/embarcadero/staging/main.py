"""The process that `up` keeps running while there are staging topics: `python -m embarcadero.staging.main <folder>`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

from embarcadero.client.aio import connect
from embarcadero.config import Config
from embarcadero.config.secrets import secret_values
from embarcadero.errors import EmbarcaderoError
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import be_private, die_with, name_process, start_logging
from embarcadero.node.report import report
from embarcadero.staging.sweep import StagingSweeper
from embarcadero.watch.logs import LogJournal

_ROUND_S: Final = 10.0


def main(data_dir: Path) -> None:
    """Sweep the staging topics of a running cluster until told to stop, or until the supervisor is gone."""
    die_with(os.getppid())
    name_process("sweep")
    folder = ClusterFolder(data_dir)
    config = folder.require_running().config
    be_private()
    start_logging("sweep", config.log, secret_values(config))
    asyncio.run(_sweep(report(folder).addresses, config))


async def _sweep(addresses: list[str], config: Config) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
