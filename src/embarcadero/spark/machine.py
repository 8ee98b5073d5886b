"""What Spark needs on this machine: PySpark, a Java that it can use, and the Python that runs its workers."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from importlib.resources import files
from pathlib import Path
from typing import Final

from embarcadero.errors import NotAvailable

JAVA_VERSION_MIN: Final = 17
INSTALL_JAVA: Final = (
    "install Java 17 or 21, for example `apt install openjdk-17-jre-headless` or `brew install openjdk@17`, "
    "and set JAVA_HOME to its folder if it is not found by itself"
)
FOLDERS: Final = (
    "/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/homebrew/opt", "/usr/local/opt",
    "~/.sdkman/candidates/java",
)  # fmt: skip
"""Where installers put Java."""
_ASK_S: Final = 10.0  # for a Java that tells its version only when it runs
OLDEST: Final = (4, 0)
TOO_NEW: Final = (5, 0)
INSTALL_PYSPARK: Final = 'pip install "embarcadero[spark]"'
PYTHON: Final = "EMBARCADERO_SPARK_PYTHON"
"""The interpreter that the script runs."""
CORES: Final = "EMBARCADERO_SPARK_CORES"
"""How many tasks run at once: a source is not told, and makes as many tasks, or a multiple of it."""
SCRIPT: Final = Path(str(files("embarcadero.spark") / "python"))

_CHOSEN: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")  # Spark runs data sources, and their tasks, by the second
_SOCKET_BYTES_MAX: Final = 104  # of the path of a Unix socket, on macOS,
_SOCKET_NAME_BYTES: Final = 44  # and of the name that Spark gives one
_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")


def find_java(environ: Mapping[str, str] | None = None, folders: Sequence[str] = FOLDERS) -> Path:
    """The home of a Java that is new enough: of JAVA_HOME, the PATH, or the usual folders. Raises NotAvailable."""
    known = os.environ if environ is None else environ
    too_old: dict[Path, int] = {}
    for home in _candidates(known, folders):
        version = java_version(home)
        if version is not None and version >= JAVA_VERSION_MIN:
            return home
        if version is not None:
            too_old[home] = version
    if too_old:
        found = ", ".join(f"Java {version} in {home}" for home, version in too_old.items())
        raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and there is only {found}", INSTALL_JAVA)
    raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and none is installed", INSTALL_JAVA)


def _candidates(environ: Mapping[str, str], folders: Sequence[str]) -> Iterator[Path]:
    """Homes to look at, best first."""
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield Path(on_path).resolve().parent.parent
    for folder in folders:
        where = Path(folder).expanduser()
        for home in sorted(where.iterdir()) if where.is_dir() else []:
            inner = home / "libexec" / "openjdk.jdk" / "Contents" / "Home"
            yield from (each for each in (home, home / "Contents" / "Home", inner) if (each / "bin" / "java").exists())


def java_version(home: Path) -> int | None:
    """Its feature version (8, 17, 21); None if there is no Java."""
    program = home / "bin" / "java"
    if not program.exists():
        return None
    release = home / "release"
    if release.is_file() and (version := _parsed(release.read_text(errors="replace"))) is not None:
        return version
    try:
        asked = subprocess.run([str(program), "-version"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _parsed(asked.stderr)


def _parsed(text: str) -> int | None:
    """17 of `JAVA_VERSION="17.0.15"` or `openjdk version "17.0.15"`; 8 of "1.8.0_402"."""
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def check_version(found: str) -> None:
    """Raise NotAvailable if a version of PySpark is too old or too new for the data source."""
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < OLDEST:
        problem = f"PySpark {found} is installed: it has no Python data sources, and 4.0 or newer is needed"
        raise NotAvailable(problem, INSTALL_PYSPARK)
    if version >= TOO_NEW:
        raise NotAvailable(f"PySpark {found} is installed, and this version works with 4.0 to 4.x", INSTALL_PYSPARK)


def check_installed() -> None:
    """Raise NotAvailable, with what to install, if PySpark or Java are missing or of a wrong version."""
    if util.find_spec("pyspark") is None:
        raise NotAvailable("PySpark is not installed", INSTALL_PYSPARK)
    with suppress(metadata.PackageNotFoundError):  # a copy without metadata: its version is looked at when it is loaded
        check_version(metadata.version("pyspark"))
    find_java()


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


def unix_sockets(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of Spark to connect workers by Unix sockets, from PySpark 4.1 on: rows take half the CPU of TCP.

    Only for workers that the script starts: others print a traceback when Spark ends them, after a minute without work.
    """
    folder = _socket_folder(os.getpid()) if all(environ.get(name) == str(SCRIPT) for name in _CHOSEN) else ""
    if not folder or len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_BYTES_MAX:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}


@cache
def _socket_folder(process: int) -> str:
    """A folder that only this user can open, for sockets ask for no password. It goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="embarcadero-spark-")

    def remove() -> None:
        if os.getpid() == process:  # not a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
