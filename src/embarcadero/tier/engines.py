"""What writes the files of a tiering job: its own process, the workers of Spark, or whichever of the two fits.

| engine | when it is used by `up --tier` |
| --- | --- |
| spark | the default where PySpark and Java are installed |
| process | the default elsewhere |
| auto | Spark when more than `TIER_SPARK_BYTES` of a topic wait, the process for the trickle |

A session of Spark takes a GB beside the brokers: it begins with the first files that it has to write, and ends when it
had nothing to write for `TIER_SPARK_IDLE_S` (spark/tiering.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Protocol

import msgspec

from embarcadero.client.api.sync_log import Log
from embarcadero.limits import TIER_SPARK_BYTES
from embarcadero.tier.parquet import FileFacts, FileSpan, write_span
from embarcadero.tier.storage import Storage


class SpanWork(msgspec.Struct, frozen=True, kw_only=True):
    """A span to be written into files."""

    topic: str
    span: FileSpan
    location: str
    epoch: int
    properties: dict[str, str]
    entries_location: str = ""  # of the table of control entries; empty: the topic's table has them
    waiting: int = 0  # bytes of payloads of the topic that wait to be tiered, about


def do_work(log: Log, work: SpanWork) -> FileFacts:
    """Read a span and write its files. The schema is asked for now: it is as new as every batch of the span."""
    span, schemas = work.span, log.describe(work.topic).versions
    scan = log.scan(work.topic, lane=span.lane, start=span.start, stop=span.stop, control=True)
    storage = Storage(work.properties)
    return write_span(storage, work.location, span, work.epoch, schemas, scan, work.entries_location)


class EngineKind(StrEnum):
    """The values of `tier.engine`."""

    SPARK = "spark"
    PROCESS = "process"
    AUTO = "auto"


class Engine(Protocol):
    """Writes the files of spans."""

    @property
    def name(self) -> str:
        """The kind that wrote last; of one that wrote nothing yet, what it is."""
        ...

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        """Write the files of all spans, in any order."""
        ...

    def release_idle(self) -> float | None:
        """Give up what costs memory if it was not needed for long; seconds until it is time, None if there is none."""
        ...

    def close(self) -> None:
        """Give it up now."""
        ...


class ProcessEngine:
    """Writes files in this process, one after the other."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def name(self) -> str:
        return EngineKind.PROCESS

    def write(self, works: list[SpanWork]) -> Iterator[FileFacts]:
        for work in works:
            yield do_work(self._log, work)

    def release_idle(self) -> float | None:
        return None

    def close(self) -> None:
        return None


class AutoEngine:
    """Leaves large amounts to one engine, and the trickle to another."""

    def __init__(self, large: Engine, small: Engine, limit_bytes: int = TIER_SPARK_BYTES) -> None:
        self._large, self._small, self._limit_bytes = large, small, limit_bytes
        self._last: Engine | None = None

    @property
    def name(self) -> str:
        return EngineKind.AUTO if self._last is None else self._last.name

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        waiting = max((work.waiting for work in works), default=0)
        self._last = self._large if waiting > self._limit_bytes else self._small
        return self._last.write(works)

    def release_idle(self) -> float | None:
        return self._large.release_idle()

    def close(self) -> None:
        self._large.close()
