"""What a process of a cluster does first with its configuration."""

from __future__ import annotations

import logging

from embarcadero.config.table import Log
from embarcadero.errors import ClusterError


def start_logging(settings: Log) -> None:
    """Log as the configuration says: to its file, else to standard error."""
    try:
        handler = logging.FileHandler(settings.file) if settings.file else logging.StreamHandler()
    except OSError as error:
        raise ClusterError(f"can't write the log {settings.file}: {error.strerror}", "change log.file") from error
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s", handlers=[handler])
