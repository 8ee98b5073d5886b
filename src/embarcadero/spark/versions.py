"""Differences between PySpark 4.0, 4.1, 4.2 and 4.3. They are all here; the rest of the source is written for 4.3.

| version | lacks | what the source does |
| --- | --- | --- |
| 4.0 | `Filter`, `pushFilters` | refuses the option `pushFilters` |
| 4.0 | `DataSourceStreamArrowWriter` | derives one from the existing writers |
| 4.0, 4.1 | admission control (`latestOffset(start, limit)`, read limits, its own AvailableNow) | `UnlimitedReader` |
| 4.0, 4.1 | `to_arrow_schema(timezone=)` | calls it without: times are in UTC by default |
| 4.0, 4.1 | `from_arrow_type` that keeps times without a zone | passes `prefer_timestamp_ntz` |

PySpark 3.5 has no Python data sources. This module can be imported without PySpark: `check_pyspark` then explains what
to install.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from embarcadero.errors import NotAvailable
from embarcadero.spark.read.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamArrowWriter, Filter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
    from pyspark.sql.types import DataType, StructType

OLDEST: Final = (4, 0)
TOO_NEW: Final = (5, 0)
INSTALL_PYSPARK: Final = 'pip install "embarcadero[spark]"'
_SOURCES: Final = "pyspark.sql.datasource"
_LIMITS: Final = "pyspark.sql.streaming.datasource"


def check_version(found: str) -> None:
    """Raise NotAvailable if a version of PySpark is too old or too new for the data source."""
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < OLDEST:
        problem = f"PySpark {found} is installed: it has no Python data sources; use 4.0 or newer"
        raise NotAvailable(problem, INSTALL_PYSPARK)
    if version >= TOO_NEW:
        raise NotAvailable(f"PySpark {found} is installed, and this version works with 4.0 to 4.x", INSTALL_PYSPARK)


def check_pyspark() -> None:
    """Raise NotAvailable if PySpark is missing, too old or too new for this data source."""
    try:
        from pyspark import __version__ as found  # not from its metadata, which workers of a cluster lack
    except ImportError:
        raise NotAvailable("PySpark is not installed", INSTALL_PYSPARK) from None
    check_version(found)


def _found(module: str, name: str) -> Any:
    """Return a class of the installed PySpark; None if this version does not have it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def _or_stub(module: str, name: str) -> Any:
    """Return a class of the installed PySpark, or an empty class without instances."""
    return _found(module, name) or type(name, (), {})


if not TYPE_CHECKING:
    Filter = _or_stub(_SOURCES, "Filter")
    ReadLimit, ReadAllAvailable = _or_stub(_LIMITS, "ReadLimit"), _or_stub(_LIMITS, "ReadAllAvailable")
    ReadMaxRows, ReadMaxBytes = _or_stub(_LIMITS, "ReadMaxRows"), _or_stub(_LIMITS, "ReadMaxBytes")
    SupportsTriggerAvailableNow = _or_stub(_LIMITS, "SupportsTriggerAvailableNow")
    # In 4.0, tasks hand Arrow batches to a DataSourceArrowWriter only, and streams take a DataSourceStreamWriter only.
    _both = tuple(filter(None, (_found(_SOURCES, f"DataSource{kind}Writer") for kind in ("Stream", "Arrow"))))
    DataSourceStreamArrowWriter = _found(_SOURCES, "DataSourceStreamArrowWriter") or type(
        "DataSourceStreamArrowWriter", _both, {}
    )

ADMISSION_CONTROL: Final[bool] = _found(_LIMITS, "ReadLimit") is not None
"""Whether Spark passes the end of a stream's last micro-batch, and a limit for the next one (4.2)."""
FILTERS: Final[bool] = _found(_SOURCES, "Filter") is not None
"""Whether Spark pushes filters down to Python data sources (4.1)."""


def check_options(options: ReadOptions) -> None:
    """Raise NotAvailable if an option needs a newer PySpark than the installed one."""
    limits = {"maxRecordsPerTrigger": options.max_records, "maxBytesPerTrigger": options.max_bytes}
    for name, limit in limits.items():
        if limit is not None and not ADMISSION_CONTROL:
            raise _too_old(name, "4.2", "leave it out: each micro-batch has all available records")
    if options.push_filters and not FILTERS:
        raise _too_old("pushFilters", "4.1", "leave it out: Spark filters the rows itself")


def _too_old(option: str, since: str, instead: str) -> NotAvailable:
    from pyspark import __version__ as found

    return NotAvailable(
        f"option {option!r} needs PySpark {since} or newer, and {found} is installed", f"{instead}; or upgrade PySpark"
    )


def to_arrow(schema: StructType) -> pa.Schema:
    """Convert the schema of a frame to Arrow; its times are in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def from_arrow(kind: pa.DataType) -> DataType:
    """Convert an Arrow type to Spark's; times without a zone stay without."""
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind, prefer_timestamp_ntz=True)


__all__ = [
    "ADMISSION_CONTROL",
    "FILTERS",
    "INSTALL_PYSPARK",
    "DataSourceStreamArrowWriter",
    "Filter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "check_options",
    "check_pyspark",
    "check_version",
    "from_arrow",
    "to_arrow",
]
