"""Versions of PySpark: which are refused, and the replacements for missing parts of older ones."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter
from pyspark.sql.pandas import types as pandas_types
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from embarcadero.errors import NotAvailable
from embarcadero.spark import session as make_session
from embarcadero.spark import versions
from embarcadero.spark.read.options import ReadOptions, read_options
from embarcadero.spark.source import EmbarcaderoSource

GIVEN = {"brokers": "127.0.0.1:9092", "topic": "orders"}


def options(**given: Any) -> ReadOptions:
    """Options of a stream or a batch read."""
    return read_options(GIVEN | {name: str(value) for name, value in given.items()}, streaming=None)


def loaded_again() -> ModuleType:
    """The module as a process loads it that has another PySpark."""
    assert versions.__file__ is not None
    spec = importlib.util.spec_from_file_location("versions_of_another_pyspark", versions.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def pyspark_4_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PySpark without admission control."""
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)


@pytest.fixture
def pyspark_4_0(monkeypatch: pytest.MonkeyPatch, pyspark_4_1: None) -> None:
    """A PySpark that also lacks filters and the Arrow writer of streams."""
    monkeypatch.setattr(pyspark, "__version__", "4.0.5")
    monkeypatch.delattr(datasource, "Filter")
    monkeypatch.delattr(datasource, "DataSourceStreamArrowWriter")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("3.5.9", r"PySpark 3\.5\.9 is installed: it has no Python data sources; use 4\.0 or newer .*pip install"),
        ("2.4.8", r"PySpark 2\.4\.8 is installed: .*use 4\.0 or newer"),
        ("5.0.0.dev1", r"PySpark 5\.0\.0\.dev1 is installed, and this version works with 4\.0 to 4\.x"),
    ],
)
def test_a_pyspark_that_is_too_old_or_too_new_is_named(monkeypatch: pytest.MonkeyPatch, found: str, says: str) -> None:
    """With the command that installs the right one; by the source as well as by the session."""
    monkeypatch.setattr(pyspark, "__version__", found)
    with pytest.raises(NotAvailable, match=says):
        make_session()
    for ask in (EmbarcaderoSource.schema, lambda source: source.reader(None), lambda source: source.streamReader(None)):
        with pytest.raises(NotAvailable, match=says):  # before anything is imported that only a newer one has
            ask(EmbarcaderoSource({}))


def test_without_pyspark_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is loaded nevertheless."""
    for name in [name for name in sys.modules if name.split(".")[0] == "pyspark"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotAvailable, match=r'not installed \(pip install "embarcadero\[spark\]"'):
        loaded_again().check_pyspark()


@pytest.mark.parametrize("found", ["4.0.0", "4.1.4", "4.2.1", "4.3.0", "4.11.0.dev0"])
def test_every_pyspark_4_is_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    """Also future ones."""
    monkeypatch.setattr(pyspark, "__version__", found)
    assert versions.check_pyspark() is None


def test_the_newest_pyspark_has_everything() -> None:
    """Our classes are Spark's own."""
    assert (versions.ADMISSION_CONTROL, versions.FILTERS) == (True, True)
    assert versions.Filter is datasource.Filter
    assert versions.DataSourceStreamArrowWriter is datasource.DataSourceStreamArrowWriter
    versions.check_options(options(maxRecordsPerTrigger=1, maxBytesPerTrigger=1))
    versions.check_options(options(pushFilters="true"))


@pytest.mark.parametrize("name", ["maxRecordsPerTrigger", "maxBytesPerTrigger"])
def test_limits_are_refused_where_they_cannot_be_kept(pyspark_4_1: None, name: str) -> None:
    """With the version that supports them."""
    found = loaded_again()
    with pytest.raises(NotAvailable, match=rf"'{name}' needs PySpark 4\.2 or newer, and 4\.1\.4 is installed"):
        found.check_options(options(**{name: 1}))
    found.check_options(options(minPartitions=2, pushFilters="true"))


def test_filters_are_refused_where_spark_does_not_push_them(pyspark_4_0: None) -> None:
    """`false`, the default, is accepted everywhere."""
    found = loaded_again()
    with pytest.raises(NotAvailable, match=r"'pushFilters' needs PySpark 4\.1 or newer, and 4\.0\.5 is installed"):
        found.check_options(options(pushFilters="true"))
    found.check_options(options(pushFilters="false"))


def test_a_stream_writer_of_4_0_is_both_that_spark_looks_for(pyspark_4_0: None) -> None:
    """Tasks test for the Arrow writer, the driver for the stream writer."""
    made = loaded_again().DataSourceStreamArrowWriter
    assert issubclass(made, DataSourceStreamWriter)
    assert issubclass(made, DataSourceArrowWriter)


def test_times_are_in_utc_and_keep_their_kind_in_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 4.2 Arrow schemas have no `timezone`, and times without a zone get one by default."""
    frame = StructType([StructField("at", TimestampType()), StructField("local", TimestampNTZType())])
    wanted = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("local", pa.timestamp("us"))])
    assert versions.to_arrow(frame) == wanted
    asked: list[bool] = []

    def of_4_1(schema: StructType, *, timestamp_utc: bool = True) -> pa.Schema:
        asked.append(timestamp_utc)
        return wanted

    monkeypatch.setattr(pandas_types, "to_arrow_schema", of_4_1)
    assert versions.to_arrow(frame) == wanted
    assert asked == [True]
    assert [versions.from_arrow(field.type).simpleString() for field in wanted] == ["timestamp", "timestamp_ntz"]
