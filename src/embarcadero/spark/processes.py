"""The processes of a pipeline: a driver with its session and its Java, workers with their Python, a client in each.

`session` makes a Spark session configured for the log: it finds Java, workers run this Python, and nothing listens to
the network. Or it connects to a Spark Connect server. `shared_log` is the one client of a process.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import site
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from embarcadero.errors import BadValue, NotAvailable, Unreachable
from embarcadero.limits import SPARK_RECONNECT_S
from embarcadero.spark.versions import INSTALL_PYSPARK, check_pyspark, check_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embarcadero.client.api.sync_log import Log


# --- the session ------------------------------------------------------------------------------------------------------
_UNDER_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit, which has then chosen Java and the master

_REMOTE: Final = re.compile(r"sc://[^\s/:;]+(:\d{1,5})?(/.*)?|sc://\[[0-9A-Fa-f:.]+\](:\d{1,5})?(/.*)?")
_ALWAYS_SQL: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # By default rows go to Python in batches of 10,000. After each row Spark asks for the size of the batch so far. For
    # a map or a list without values that takes time proportional to its rows: half of the JVM's time at 1,000.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "400",
}
_ALWAYS: Final = {
    **_ALWAYS_SQL,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_ON_THIS_MACHINE: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_JAVA_ENDS_S: Final = 10.0


def session(
    app: str = "embarcadero",
    master: str | None = None,
    config: Mapping[str, str] | None = None,
    *,
    remote: str | None = None,
    topics: bool = False,
    brokers: str | None = None,
) -> SparkSession:
    """Return a Spark session, or the existing one, configured for the log; `config` overrides our defaults.

    `master` is any URL that Spark knows; None: the choice of `spark-submit`, or else all cores of this machine.
    `remote` is the address of a Spark Connect server instead: its machines need embarcadero, this one needs no Java.
    With `topics` every topic of the cluster at `brokers` (None: as `embarcadero.connect()`) is a temporary view of its
    name. Raises NotAvailable with an install command when Java or packages are missing or too old, BadValue for an
    invalid address.

        spark = embarcadero.spark.session(config={"spark.driver.memory": "4g", "spark.ui.enabled": "true"})
        spark = embarcadero.spark.session(master="spark://10.0.0.7:7077")
        spark = embarcadero.spark.session(remote="sc://10.0.0.7:15002", topics=True, brokers="10.0.0.8:9092")
        spark.sql("select city, count(*) from orders group by city").show()
    """
    check_pyspark()
    if brokers is not None and not topics:
        raise BadValue(
            f"brokers is {brokers!r}, but topics is not True", "views need both; a read has the option `brokers`"
        )
    if remote is not None:
        made = _remote_session(app, master, config or {}, remote)
    else:
        made = _own_session(app, master, config or {})
    if topics:
        _register_topics(made, brokers)
    return made


def _own_session(app: str, master: str | None, config: Mapping[str, str]) -> SparkSession:
    """Return a session whose driver runs beside this process."""
    if _UNDER_SUBMIT not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
        master = "local[*]" if master is None else master
        prepare(os.environ, master)
    local = on_this_machine(master)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings(local, {**unix_sockets(os.environ), **config}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _remote_session(app: str, master: str | None, config: Mapping[str, str], remote: str) -> SparkSession:
    """Return a session on a Spark Connect server, with its own master, Java and workers; we set SQL settings only."""
    if master is not None:
        raise BadValue(
            f"master {master!r} and remote {remote!r} exclude each other", "give one: a server has its own master"
        )
    if not _REMOTE.fullmatch(remote):
        raise BadValue(
            f"remote {remote!r} is not the address of a Spark Connect server",
            "use sc://host:port; the port of a server is 15002 unless spark.connect.grpc.binding.port changes it",
        )
    try:
        import pyspark.sql.connect.session  # noqa: F401 - fails without gRPC
    except ImportError as error:
        raise NotAvailable(
            f"a session on a Spark Connect server needs more packages: {error}",
            'pip install "embarcadero[spark-connect]"',
        ) from None
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).remote(remote)
    for key, value in {**_ALWAYS_SQL, **config}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _register_topics(spark: SparkSession, brokers: str | None) -> None:
    """Register every topic as a temporary view of its name."""
    from embarcadero.client.api.sync_log import connect
    from embarcadero.spark.sql import views

    with connect(brokers) as log:
        views(spark, log)


def settings(local: bool, config: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a new session: our defaults, and the caller's settings above them."""
    quiet = f"-Dlog4j2.configurationFile={files('embarcadero.spark') / 'log4j2.properties'}"
    chosen = {**_ALWAYS, **(_ON_THIS_MACHINE if local else {}), **config}
    if "log4j" not in chosen.get(_JAVA_OPTIONS, ""):
        chosen[_JAVA_OPTIONS] = f"{chosen.get(_JAVA_OPTIONS, '')} {quiet}".strip()
    return chosen


def end_session(spark: SparkSession) -> None:
    """End a session and its Java process, which otherwise lives as long as this process. A new session may follow."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    with suppress(Exception):  # a dead Java process can't answer
        spark.stop()
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    process = getattr(gateway, "proc", None)  # None if spark-submit started it
    if process is not None:
        process.stdin.close()  # it ends when its stdin closes
        try:
            process.wait(_JAVA_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- this machine -----------------------------------------------------------------------------------------------------
JAVA_VERSION_MIN: Final = 17
INSTALL_JAVA: Final = (
    "install Java 17 or 21, for example `apt install openjdk-17-jre-headless` or `brew install openjdk@17`, "
    "and set JAVA_HOME to its folder if it is not found automatically"
)
FOLDERS: Final = (
    "/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/homebrew/opt", "/usr/local/opt",
    "~/.sdkman/candidates/java",
)  # fmt: skip
"""Folders where installers put Java."""
_ASK_S: Final = 10.0  # for a Java that reports its version only when it runs
PYTHON: Final = "EMBARCADERO_SPARK_PYTHON"
"""The interpreter that the script `python` runs."""
CORES: Final = "EMBARCADERO_SPARK_CORES"
"""Number of tasks that run in parallel: Spark does not provide it; a source makes a multiple of it as tasks."""
SCRIPT: Final = Path(str(files("embarcadero.spark") / "python"))

_CHOSEN: Final = (
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
)  # Spark runs data sources, and their tasks, with the second
_SOCKET_BYTES_MAX: Final = 104  # length of the path of a Unix socket, on macOS,
_SOCKET_NAME_BYTES: Final = 44  # and of the name that Spark gives a socket
_FOLDER_PREFIX: Final = "embarcadero-spark-"
_LOCK: Final = "lock"
_LEFT_S: Final = 60.0  # the Java of a killed driver has ended by then
_LOCAL: Final = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")


def find_java(environ: Mapping[str, str] | None = None, folders: Sequence[str] = FOLDERS) -> Path:
    """Return the home of a recent Java from JAVA_HOME, the PATH, or the usual folders. Raises NotAvailable."""
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
        raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, but only {found} is installed", INSTALL_JAVA)
    raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, but none is installed", INSTALL_JAVA)


def _candidates(environ: Mapping[str, str], folders: Sequence[str]) -> Iterator[Path]:
    """Yield homes to check, best first."""
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
    """Return the feature version of a Java (8, 17, 21); None if there is no Java."""
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
    """Parse 17 from `JAVA_VERSION="17.0.15"` or `openjdk version "17.0.15"`; 8 from "1.8.0_402"."""
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def check_installed() -> None:
    """Raise NotAvailable, with an install command, if PySpark or Java is missing or of a wrong version."""
    if util.find_spec("pyspark") is None:
        raise NotAvailable("PySpark is not installed", INSTALL_PYSPARK)
    with suppress(metadata.PackageNotFoundError):  # a copy without metadata: its version is checked when it is loaded
        check_version(metadata.version("pyspark"))
    find_java()


def prepare(environ: MutableMapping[str, str], master: str | None) -> None:
    """Choose the Python of workers for the next JVM. Executors on other machines have their own Python."""
    cores = local_cores(master)
    if cores is None:
        for name in _CHOSEN:
            if environ.get(name) in (str(SCRIPT), sys.executable):  # left by an earlier session of this process
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
    """Tasks that run in parallel on this machine; None if they run elsewhere, or the number is unknown."""
    found = None if master is None else _LOCAL.fullmatch(master)
    if found is None:
        return None
    return int(found[1] or 1) if found[1] != "*" else os.cpu_count() or 1


def known_cores(environ: Mapping[str, str]) -> int | None:
    """Tasks that run in parallel, as `session()` passed the number to the processes of its driver."""
    cores = environ.get(CORES, "")
    return int(cores) if cores.isascii() and cores.isdigit() and int(cores) else None


def archives_are_needless(environ: Mapping[str, str]) -> bool:
    """Whether a new Python finds, without archives, the PySpark that started the JVM, and the script can run."""
    import pyspark

    home = Path(pyspark.__file__).parent
    found_by_itself = [*site.getsitepackages(), site.getusersitepackages(), *environ.get("PYTHONPATH", "").split(":")]
    return (
        home.parent in [Path(folder) for folder in found_by_itself if folder]
        and Path(environ.get("SPARK_HOME") or home).resolve() == home.resolve()
        and os.access(SCRIPT, os.X_OK)
    )


def unix_sockets(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings to connect workers by Unix sockets, from PySpark 4.1 on: rows take half the CPU of TCP.

    Only for workers that the script starts: others print a traceback when Spark ends them after an idle minute.
    """
    folder = _socket_folder(os.getpid()) if all(environ.get(name) == str(SCRIPT) for name in _CHOSEN) else ""
    if not folder or len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_BYTES_MAX:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}


@cache
def _socket_folder(process: int) -> str:
    """Create a folder that only this user can open, because sockets ask for no password. It goes with the process.

    The process holds a lock in it, which the kernel frees however the process ends. The lock lets later processes of
    the user recognize and remove folders of killed drivers.
    """
    remove_left_folders(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
    lock = os.open(Path(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # stays open
    fcntl.flock(lock, fcntl.LOCK_EX)

    def remove() -> None:
        if os.getpid() == process:  # not a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def remove_left_folders(parent: Path) -> None:
    """Remove socket folders of this user whose driver has ended without removing them.

    A folder is removed if it is private to this user, unchanged for `_LEFT_S`, and its lock is free. A folder without
    a lock stays: it may belong to a driver of an earlier version, or be about to be locked.
    """
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # it was removed meanwhile, or its lock is held or missing
            found = folder.lstat()
            private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            if not private or time.time() - found.st_mtime < _LEFT_S:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# --- the client -------------------------------------------------------------------------------------------------------
_CONNECT_AGAIN_S: Final = 0.2
_CLIENTS: Final[dict[tuple[int, str], Log]] = {}


def shared_log(brokers: str, table_properties: Sequence[str] | None = None, *, at_once: bool = False) -> Log:
    """Return the client of this process for these brokers. It lives as long as the process; Spark ends workers.

    `table_properties` are the driver's: a worker may run on a machine without configuration. A cluster that is down
    may come back, and queries should survive that: calls wait for it, unless `at_once` asks for an immediate answer.
    """
    from embarcadero.client.api.sync_log import connect  # not in a process that only looks up data sources

    key = os.getpid(), brokers  # a forked worker has its parent's clients, but not their threads
    known = _CLIENTS.get(key)
    if known is None or known.ended:
        known = _CLIENTS[key] = connect(brokers) if at_once else _patiently(connect, brokers)
    if table_properties is not None:
        known.use_table_properties(table_properties)
    return known


def _patiently(connect: Callable[[str], Log], brokers: str) -> Log:
    give_up = time.monotonic() + SPARK_RECONNECT_S
    while True:
        try:
            return connect(brokers)
        except Unreachable:
            if time.monotonic() > give_up:
                raise
            time.sleep(_CONNECT_AGAIN_S)
