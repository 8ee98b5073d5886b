"""The session helper: it finds Java, names the package to install, and sets the options that our sources need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import embarcadero as emb
from embarcadero.errors import BadValue, NotAvailable
from embarcadero.spark import processes
from embarcadero.spark import session as make_session
from embarcadero.spark.processes import find_java, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _java(folder: Path, version: str, *, release: bool = True) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    if release:
        (folder / "release").write_text(f'IMPLEMENTOR="Somebody"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize(("version", "feature"), [("1.8.0_402", 8), ("11.0.2", 11), ("17.0.15", 17), ("25", 25)])
def test_the_version_of_a_java_is_read_from_its_files_or_its_output(
    tmp_path: Path, version: str, feature: int, release: bool
) -> None:
    """Old and new ways to number versions."""
    assert processes.java_version(_java(tmp_path / "jdk", version, release=release)) == feature


def test_java_home_comes_first_then_the_path_then_the_usual_folders(tmp_path: Path) -> None:
    """A version that is too old is skipped in favor of a newer one."""
    home, path, usual = (_java(tmp_path / name, "17.0.1") for name in ("home", "path", "usual/jdk-17"))
    old = _java(tmp_path / "old", "11.0.2")
    folders = [str(usual.parent), str(tmp_path / "absent")]

    assert processes.find_java({"JAVA_HOME": str(home), "PATH": str(path / "bin")}, folders) == home
    assert processes.find_java({"JAVA_HOME": str(old), "PATH": str(path / "bin")}, folders) == path
    assert processes.find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": ""}, folders) == usual


def test_without_java_the_error_names_the_package_to_install(tmp_path: Path) -> None:
    """None at all, and only an old one."""
    with pytest.raises(NotAvailable, match=r"none is installed.*apt install openjdk-17"):
        processes.find_java({"PATH": str(tmp_path)}, [])
    old = _java(tmp_path / "old", "11.0.2")
    with pytest.raises(NotAvailable, match=r"only Java 11 in .*old.*JAVA_HOME"):
        processes.find_java({"JAVA_HOME": str(old)}, [])


def test_a_session_without_java_fails_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The caller gets our error, not one of a shell script."""
    monkeypatch.setattr(processes, "find_java", lambda: find_java({"PATH": str(tmp_path)}, ()))
    with pytest.raises(NotAvailable, match="none is installed"):
        make_session()


def test_settings_of_the_caller_override_the_defaults() -> None:
    """And only a session on this machine is bound to the loopback interface."""
    mine = settings(True, {"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Xss4m"})

    assert mine["spark.ui.enabled"] == "true"
    assert mine["spark.driver.bindAddress"] == "127.0.0.1"
    assert mine["spark.driver.extraJavaOptions"].startswith("-Xss4m -Dlog4j2")
    assert "spark.driver.bindAddress" not in settings(False, {})
    own_logs = {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=mine"}
    assert settings(True, own_logs)["spark.driver.extraJavaOptions"] == "-Dlog4j2.configurationFile=mine"


def test_a_session_is_ready_for_the_log(spark: SparkSession) -> None:
    """UTC, push-down, loopback, no web pages, and workers run the same Python as this process."""
    config = spark.sparkContext.getConf()

    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert config.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
    assert spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).first() == sys.executable
    assert make_session() is spark
    assert spark.range(4).selectExpr("sum(id)").first()[0] == 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"remote": "10.0.0.7:15002"}, r"remote '10\.0\.0\.7:15002' is not the address .*use sc://host:port"),
        ({"remote": "sc://host:15002:1"}, "is not the address of a Spark Connect server"),
        ({"remote": "sc://"}, "is not the address of a Spark Connect server"),
        (
            {"remote": "sc://host", "master": "local[2]"},
            r"master 'local\[2\]' and remote 'sc://host' exclude each other",
        ),
        ({"brokers": "127.0.0.1:1"}, "brokers is '127.0.0.1:1', but topics is not True"),
    ],
)
def test_an_invalid_address_is_refused(given: dict[str, str], says: str) -> None:
    """Before anything is started or contacted."""
    with pytest.raises(BadValue, match=says):
        make_session(**given)


def test_a_session_on_a_server_names_the_packages_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark comes without them."""
    for name in [name for name in sys.modules if name.startswith("pyspark.sql.connect")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(NotAvailable, match=r'needs more packages: .*grpc.*"embarcadero\[spark-connect\]"'):
        make_session(remote="sc://127.0.0.1:15002")


def test_all_topics_are_views_on_request(spark: SparkSession) -> None:
    """Hidden ones are not."""
    with emb.local(brokers=1, replicas=1) as log:
        for name in ("orders", "my-topic", "__staged.0123456789abcdef"):
            log.create_topic(name, order=0)
        log.publisher("orders", ack=2).send(b"one").result()
        assert make_session(topics=True, brokers=log.address) is spark
        views = {row.viewName for row in spark.sql("show views").collect()}
        assert {"orders", "my-topic"} <= views
        assert not [name for name in views if name.startswith("__")]
        assert spark.sql("select cast(value as string) as value from orders").first().value == "one"
        for name in ("orders", "my-topic"):
            spark.catalog.dropTempView(f"`{name}`")
