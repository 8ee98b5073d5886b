"""Which Python runs workers on this machine: without the archives of PySpark, or as usual."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.config.sources import read_environment
from embarcadero.spark import processes
from embarcadero.spark.processes import (
    CORES,
    PYTHON,
    SCRIPT,
    known_cores,
    local_cores,
    prepare,
    remove_left_folders,
    unix_sockets,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRINTS_PATH = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:], sys.executable, sep='|')"

FAILING_DAEMON = """
import sys, traceback

def manager():
    print(sys.argv[1], sys.path[0])
    for error in (BrokenPipeError(), ValueError("a fault")):
        try:
            raise error
        except Exception:
            traceback.print_exc()
"""


def test_the_script_drops_only_the_archives(tmp_path: Path) -> None:
    """Arguments and the user's own folders stay, with spaces and all; so does the interpreter."""
    spark = "/opt/spark/python/lib"
    archives = f"{spark}/pyspark.zip:{spark}/py4j-0.10.9.9-src.zip:/opt/spark/jars/spark-core_2.13-4.3.0.jar"
    path = f"{archives}:/my own:{tmp_path}:"
    environ = os.environ | {"PYTHONPATH": path, PYTHON: sys.executable}
    told = subprocess.run(
        [str(SCRIPT), "-c", PRINTS_PATH, "a b", "*"], env=environ, capture_output=True, text=True, check=True
    ).stdout

    assert told.strip() == f"/my own:{tmp_path}|['a b', '*']|{sys.executable}"
    only = environ | {"PYTHONPATH": f"{spark}/pyspark.zip"}
    told = subprocess.run([str(SCRIPT), "-c", PRINTS_PATH], env=only, capture_output=True, text=True, check=True).stdout
    assert told.startswith("|[]")


def test_a_session_on_this_machine_chooses_the_script() -> None:
    """The user's choice stays; and all variables are known to the configuration."""
    environ: dict[str, str] = {}
    prepare(environ, "local[3]")
    assert environ == {
        CORES: "3", PYTHON: sys.executable, "PYSPARK_PYTHON": str(SCRIPT), "PYSPARK_DRIVER_PYTHON": str(SCRIPT)
    }  # fmt: skip
    assert read_environment(environ) == ({}, [])
    mine = {"PYSPARK_PYTHON": "/mine"}
    prepare(mine, "local")
    assert (mine["PYSPARK_PYTHON"], mine["PYSPARK_DRIVER_PYTHON"], mine[CORES]) == ("/mine", str(SCRIPT), "1")


def test_a_session_on_a_cluster_chooses_nothing() -> None:
    """Executors have a Python of their own: the choice of an earlier session of this process is undone."""
    environ: dict[str, str] = {}
    prepare(environ, "local[*]")
    prepare(environ, "spark://10.0.0.7:7077")
    assert not {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", CORES} & environ.keys()
    mine = {"PYSPARK_PYTHON": "/mine", "PYSPARK_DRIVER_PYTHON": "/mine too"}
    prepare(mine, "yarn")
    assert mine == {"PYSPARK_PYTHON": "/mine", "PYSPARK_DRIVER_PYTHON": "/mine too"}


def test_executors_of_a_cluster_on_this_machine_run_this_python() -> None:
    """Executors of `local-cluster` used to run another Python, without our packages."""
    environ: dict[str, str] = {}
    prepare(environ, "local[*]")
    prepare(environ, "local-cluster[2,1,1024]")
    assert CORES not in environ
    assert (environ["PYSPARK_PYTHON"], environ["PYSPARK_DRIVER_PYTHON"]) == (sys.executable, sys.executable)


def test_without_another_usable_pyspark_the_archives_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark of another home, a PySpark that a new Python does not find, a script that can't be run."""
    for environ in ({"SPARK_HOME": str(tmp_path)}, {}, {}):
        if "SPARK_HOME" not in environ:
            script = tmp_path / "python"
            script.write_text("no program")
            monkeypatch.setattr(processes, "SCRIPT", script)
        made = dict(environ)
        prepare(made, "local[2]")
        assert (made["PYSPARK_PYTHON"], made["PYSPARK_DRIVER_PYTHON"]) == (sys.executable, sys.executable)
    monkeypatch.undo()
    monkeypatch.setattr(processes.site, "getsitepackages", lambda: [str(tmp_path)])
    made = {}
    prepare(made, "local[2]")
    assert made["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize(
    ("master", "cores"),
    [("local", 1), ("local[4]", 4), ("local[2,4]", 2), ("local[*]", os.cpu_count()), ("yarn", None), (None, None),
     ("local-cluster[2,1,1024]", None)],
)  # fmt: skip
def test_cores_of_a_master(master: str | None, cores: int | None) -> None:
    """Only those of this machine are known before Spark runs."""
    assert local_cores(master) == cores


@pytest.mark.parametrize(("told", "cores"), [("8", 8), ("", None), ("0", None), ("many", None), ("²", None)])
def test_the_number_of_cores_in_the_variable(told: str, cores: int | None) -> None:
    """Any other content of the variable is ignored."""
    assert known_cores({CORES: told}) == cores
    assert known_cores({}) is None


def test_workers_load_pyspark_from_site_packages(spark: SparkSession, log: emb.Log) -> None:
    """In tasks; and the number of cores that a source gets reaches the process that plans."""
    where = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.modules["pyspark"].__file__).first()
    assert ".zip" not in where
    log.create_topic("cores", replicas=1, schema=pa.schema([("n", pa.int64()), ("text", pa.string())]))
    with log.publisher("cores", ack=2, batch_bytes=1 << 20) as publisher:
        publisher.publish(pa.table({"n": range(9_000), "text": ["x" * 1_000] * 9_000})).result()
    frame = spark.read.format("embarcadero").options(brokers=log.address, topic="cores").load()
    assert frame.rdd.getNumPartitions() == 2  # of 9 MB: as many as cores, where 4 MiB are the least


def test_sockets_of_workers_are_in_a_folder_of_this_user() -> None:
    """If the script runs the workers, as only it suppresses the tracebacks of released workers."""
    environ: dict[str, str] = {}
    prepare(environ, "local[2]")
    found = unix_sockets(environ)

    assert found["spark.python.unix.domain.socket.enabled"] == "true"
    assert Path(found["spark.python.unix.domain.socket.dir"]).stat().st_mode & 0o777 == 0o700
    assert unix_sockets(environ) == found
    assert unix_sockets(environ | {"PYSPARK_PYTHON": "/mine"}) == {}
    assert unix_sockets({}) == {}


def test_a_folder_whose_path_is_too_long_for_a_socket_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path of a Unix socket has 104 bytes on macOS. Rows go by TCP then."""
    environ: dict[str, str] = {}
    prepare(environ, "local[2]")
    monkeypatch.setattr(processes, "_socket_folder", lambda _: str(tmp_path / ("x" * 60)))

    assert unix_sockets(environ) == {}


MAKES_A_FOLDER = """
import os, time
from embarcadero.spark.processes import _socket_folder
print(_socket_folder(os.getpid()), flush=True)
time.sleep(600)
"""


def aged(folder: Path) -> None:
    """Make a folder look as if nothing changed in it for an hour."""
    then = time.time() - 3_600
    os.utime(folder, (then, then))


def test_the_folder_of_a_driver_that_was_killed_is_removed(tmp_path: Path) -> None:
    """By the next session, and only when its driver has ended: the kernel frees a lock in the folder."""
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", MAKES_A_FOLDER], env=environ, stdout=subprocess.PIPE) as driver:
        try:
            folder = Path((driver.stdout or io.BytesIO()).readline().decode().strip())
            assert folder.parent == tmp_path
            aged(folder)
            remove_left_folders(tmp_path)
            assert folder.is_dir()
        finally:
            driver.kill()
    aged(folder)
    remove_left_folders(tmp_path)
    assert not folder.exists()


def test_folders_that_may_be_in_use_are_kept(tmp_path: Path) -> None:
    """One that just changed, one without a lock, one that others may open, and links to folders."""
    names = ("changed", "unlocked", "open", "target")
    folders = {name: tmp_path / f"embarcadero-spark-{name}" for name in names}
    for name, folder in folders.items():
        folder.mkdir(mode=0o755 if name == "open" else 0o700)
        if name != "unlocked":
            (folder / "lock").touch()
        if name != "changed":
            aged(folder)
    folders["target"] = folders["target"].rename(tmp_path / "elsewhere")
    aged(folders["target"])
    (tmp_path / "embarcadero-spark-link").symlink_to(folders["target"])
    remove_left_folders(tmp_path)

    assert all(folder.is_dir() for folder in folders.values())


def test_a_worker_that_the_jvm_lets_go_of_prints_nothing(tmp_path: Path) -> None:
    """As happens after each minute without work. Other errors of a worker are printed as ever."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "daemon.py").write_text(FAILING_DAEMON)
    environ = os.environ | {"PYTHONPATH": str(tmp_path), PYTHON: sys.executable}
    ran = subprocess.run(
        [str(SCRIPT), "-m", "pyspark.daemon", "pyspark.worker"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert ran.stdout.split() == ["pyspark.worker", str(tmp_path)]
    assert "BrokenPipeError" not in ran.stderr
    assert "ValueError: a fault" in ran.stderr
