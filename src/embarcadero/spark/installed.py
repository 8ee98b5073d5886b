"""What Spark needs on this machine, looked at without loading any of it."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata, util
from typing import Final

from embarcadero.errors import NotAvailable
from embarcadero.spark.java import find_java

OLDEST: Final = (4, 0)
TOO_NEW: Final = (5, 0)
INSTALL: Final = 'pip install "embarcadero[spark]"'


def check_version(found: str) -> None:
    """Raise NotAvailable if a version of PySpark is too old or too new for the data source."""
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < OLDEST:
        problem = f"PySpark {found} is installed: it has no Python data sources, and 4.0 or newer is needed"
        raise NotAvailable(problem, INSTALL)
    if version >= TOO_NEW:
        raise NotAvailable(f"PySpark {found} is installed, and this version works with 4.0 to 4.x", INSTALL)


def check_installed() -> None:
    """Raise NotAvailable, with what to install, if PySpark or Java are missing or of a wrong version."""
    if util.find_spec("pyspark") is None:
        raise NotAvailable("PySpark is not installed", INSTALL)
    with suppress(metadata.PackageNotFoundError):  # a copy without metadata: its version is looked at when it is loaded
        check_version(metadata.version("pyspark"))
    find_java()
