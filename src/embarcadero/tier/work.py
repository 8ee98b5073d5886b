"""A span to be written, as a worker is told of it, wherever the worker is."""

from __future__ import annotations

import msgspec

from embarcadero.client.sync import Log
from embarcadero.tier.parquet import FileFacts, Span, write_span
from embarcadero.tier.storage import Storage


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A span to be written into files."""

    topic: str
    span: Span
    location: str
    epoch: int
    properties: dict[str, str]
    entries_location: str = ""  # of the table of control entries; empty: the topic's table has them
    waiting: int = 0  # bytes of payloads of the topic that wait to be tiered, about


def do_work(log: Log, work: Work) -> FileFacts:
    """Read a span and write its files. The schema is asked for now: it is as new as every batch of the span."""
    span, schemas = work.span, log.describe(work.topic).versions
    scan = log.scan(work.topic, lane=span.lane, start=span.start, stop=span.stop, control=True)
    storage = Storage(work.properties)
    return write_span(storage, work.location, span, work.epoch, schemas, scan, work.entries_location)
