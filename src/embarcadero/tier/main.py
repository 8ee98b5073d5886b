"""The process that `up --tier` keeps running: `python -m embarcadero.tier.main <the cluster's folder>`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from threading import Event

from embarcadero.client.sync import connect
from embarcadero.config.secrets import secret_values
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import be_private, die_with, name_process, start_logging
from embarcadero.node.report import report
from embarcadero.tier.engines import chosen_kind, engine_of
from embarcadero.tier.job import TierJobs
from embarcadero.tier.settings import TierSettings
from embarcadero.watch.logs import LogJournal

HOLDER = "up"
"""One supervisor has one such process at a time: a new one takes over from the one before without asking."""


def main(data_dir: Path) -> None:
    """Tier the topics of a running cluster until told to stop, or until its supervisor is gone."""
    die_with(os.getppid())
    name_process("tier")
    folder = ClusterFolder(data_dir)
    config = folder.require_running().config
    be_private()
    start_logging("tier", config.log, secret_values(config))
    for name in ("pyiceberg", "py4j"):  # they log a line for each table that is loaded, each connection that is closed
        logging.getLogger(name).setLevel(logging.WARNING)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = TierSettings.of(config, folder.path)
    with connect(report(folder).addresses, config=config) as log:
        engine = engine_of(chosen_kind(config.tier), log, config.tier)
        journal = LogJournal(f"tier-{os.getpid()}")
        TierJobs(log, settings, journal, holder=HOLDER, topics=config.tier.topics, engine=engine).follow(stop)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
