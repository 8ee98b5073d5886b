"""Which Python runs Spark's workers on this machine, and what it is told by the environment."""

from __future__ import annotations

import os
import re
import site
import sys
from collections.abc import Mapping, MutableMapping
from importlib.resources import files
from pathlib import Path
from typing import Final

PYTHON: Final = "EMBARCADERO_SPARK_PYTHON"
"""The interpreter that the script runs."""
CORES: Final = "EMBARCADERO_SPARK_CORES"
"""How many tasks run at once: a source is not told, and makes as many tasks, or a multiple of it."""
SCRIPT: Final = Path(str(files("embarcadero.spark") / "python"))

_CHOSEN: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")  # Spark runs data sources, and their tasks, by the second
_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")


def prepare(environ: MutableMapping[str, str], master: str | None) -> None:
    """Choose the Python of workers for a JVM that is started next. Executors elsewhere have a Python of their own."""
    cores = local_cores(master)
    if cores is None:
        for name in _CHOSEN:
            if environ.get(name) in (str(SCRIPT), sys.executable):  # of an earlier session of this process
                del environ[name]
            if on_this_machine(master):
                environ.setdefault(name, sys.executable)
        environ.pop(CORES, None)
        return
    environ[CORES] = str(cores)
    environ[PYTHON] = sys.executable
    for name in _CHOSEN:
        environ.setdefault(name, str(SCRIPT) if archives_are_needless(environ) else sys.executable)


def on_this_machine(master: str | None) -> bool:
    """Whether a master runs all its executors on this machine: `local`, and `local-cluster` for tests."""
    return master is not None and master.startswith("local")


def local_cores(master: str | None) -> int | None:
    """Tasks that run at once on this machine; None: elsewhere, or not known."""
    found = None if master is None else _LOCAL.fullmatch(master)
    if found is None:
        return None
    return int(found[1] or 1) if found[1] != "*" else os.cpu_count() or 1


def known_cores(environ: Mapping[str, str]) -> int | None:
    """Tasks that run at once, as `session()` told the processes of its driver."""
    told = environ.get(CORES, "")
    return int(told) if told.isascii() and told.isdigit() and int(told) else None


def archives_are_needless(environ: Mapping[str, str]) -> bool:
    """Whether a new Python finds the very PySpark that started the JVM by itself, and the script can be run."""
    import pyspark

    home = Path(pyspark.__file__).parent
    found_by_itself = [*site.getsitepackages(), site.getusersitepackages(), *environ.get("PYTHONPATH", "").split(":")]
    return (
        home.parent in [Path(folder) for folder in found_by_itself if folder]
        and Path(environ.get("SPARK_HOME") or home).resolve() == home.resolve()
        and os.access(SCRIPT, os.X_OK)
    )
