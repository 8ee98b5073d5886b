"""What a process of a cluster does first with its configuration."""

from __future__ import annotations

import os

from embarcadero.config.table import Log
from embarcadero.watch.logs import set_up_logging


def start_logging(what: str, settings: Log) -> None:
    """Log as the configuration says; `what` this process is stands in lines that name no role."""
    set_up_logging(f"{what}-{os.getpid()}", settings.level, settings.format, settings.file)
