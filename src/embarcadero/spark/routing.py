"""Rows whose column `topic` names the topic into which they go, each one of its own: topics without a schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, UnknownTopic
from embarcadero.spark.shape import Shape, Split, check_topic, raw_problems, shape_of, whole
from embarcadero.spark.write_options import WriteOptions
from embarcadero.types import HIDDEN_PREFIX

if TYPE_CHECKING:
    from embarcadero.client.sync import Log

COLUMN: Final = "topic"
_SPREAD: Final = 64  # into about so many topics and partitions rows are thought to go
_HOW: Final = "the column 'topic' chooses the topic of each row; or give the option 'topic', which wins"


@dataclass(frozen=True, slots=True)
class Routes:
    """How rows of a frame become rows of the topics that they name. It is sent to tasks, so it holds plain facts."""

    topic: TopicInfo  # the home of such writes, whose log has their decisions
    frame: pa.Schema
    options: WriteOptions
    now_us: int
    spread: int = _SPREAD

    def splitter(self, log: Log) -> Split:
        """What divides rows by their topic."""
        return Router(log, self).split


def check_frame(frame: pa.Schema, options: WriteOptions) -> None:
    """Raise BadValue or BadSchema for a frame whose rows can't choose their topic: all problems at once."""
    problems = raw_problems(frame)
    if COLUMN not in frame.names:
        raise BadValue("option 'topic' is missing, and the frame has no column 'topic'", _HOW)
    kind = frame.field(COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        problems.append(f"column 'topic' is {kind}, not a string")
    if options.key_column not in (None, "key"):
        problems.append("option 'keyColumn' is for topics with a schema; here it is `key`")
    if problems:
        raise BadSchema(f"the frame does not fit topics without a schema: {'; '.join(problems)}", _HOW)


class Router:
    """Divides the rows of one task by their topic. Each topic is looked up once."""

    def __init__(self, log: Log, routes: Routes) -> None:
        self._log, self._routes = log, routes
        self._shapes: dict[str, Shape] = {}

    def split(self, group: list[pa.RecordBatch]) -> Iterator[tuple[Shape, list[pa.RecordBatch]]]:
        """Rows by their topic, in the order in which they came."""
        table = pa.Table.from_batches(group)
        named = whole(table.column(COLUMN))
        if named.null_count:
            row = int(np.flatnonzero(np.asarray(named.is_null()))[0])
            raise BadValue(
                f"{named.null_count} rows have no topic: column 'topic' is null, first in {_shown(table, row)}",
                "fill the column or filter such rows; the option 'topic' sends all rows into one topic",
            )
        names = pc.dictionary_encode(named)
        codes = np.asarray(names.indices)
        for code, name in enumerate(names.dictionary.to_pylist()):
            rows = pa.array(np.flatnonzero(codes == code))
            yield self._shape(name), table.take(rows).combine_chunks().to_batches()

    def _shape(self, name: str) -> Shape:
        if name not in self._shapes:
            self._shapes[name] = self._found(name)
        return self._shapes[name]

    def _found(self, name: str) -> Shape:
        how = "in column 'topic'"
        if name.startswith(HIDDEN_PREFIX):
            raise BadValue(f"topic {name!r} {how} is one of the cluster's own", "name a topic that you have created")
        try:
            topic = self._log.describe(name)
        except UnknownTopic as error:
            raise UnknownTopic(f"there is no topic {name!r}, which is named {how}", error.hint) from None
        check_topic(topic)
        if topic.versions.typed:
            raise BadSchema(
                f"topic {name!r}, which is named {how}, has a schema",
                "rows choose among topics without one: write into this topic by the option 'topic'",
            )
        return shape_of(topic, self._routes.frame, self._routes.options, self._routes.now_us)


def _shown(table: pa.Table, row: int) -> str:
    """A row for an error: its key, if it has one, and the beginning of its value."""
    values = [(name, table.column(name)[row].as_py()) for name in ("key", "value") if name in table.column_names]
    return ", ".join(f"{name} {value!r:.40}" for name, value in values)
