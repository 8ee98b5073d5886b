"""Options of the sink: one table of names, each value checked, every problem named with what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from embarcadero.errors import BadValue
from embarcadero.limits import BATCH_BYTES_DEFAULT, FRAME_BYTES_MAX, WRITE_NAME_BYTES_MAX
from embarcadero.spark.read.options import brokers_of, named, topic_of
from embarcadero.staging.manifest import EPOCH_MAX
from embarcadero.wire.schemas import COMPRESSIONS

WRITE_OPTIONS: Final = {
    "brokers": "addresses of brokers, host:port with commas",
    "topic": "the topic's name; without it the column `topic` names that of each row",
    "writeId": "a name of this write, the same when it is done again; batch writes only",
    "batchId": "with writeId: a number that grows from write to write, as in foreachBatch",
    "orderBy": "columns by which the rows of a task are sorted first, names with commas",
    "keyColumn": "of a topic with a schema: the column whose hash chooses the partition",
    "batchBytes": f"how large batches are made, 1 to {FRAME_BYTES_MAX}",
    "compression": "lz4, zstd or none",
    "addColumns": "true: columns that a topic with a schema lacks are added to it",
    "checkpointLocation": "where Spark keeps the state of a stream",
}
"""What a write may be given. Names are the same in upper and lower case, as everywhere in Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write, checked."""

    brokers: str
    topic: str | None
    write_id: str | None = None
    batch_id: int = 0
    order_by: tuple[str, ...] = ()
    key_column: str | None = None
    batch_bytes: int = BATCH_BYTES_DEFAULT
    compression: str | None = None
    add_columns: bool = False


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """The options of a batch write or of a stream. BadValue names the option that is wrong and what is allowed."""
    options = named(given, WRITE_OPTIONS)
    for name in ("writeId", "batchId") if streaming else ():
        if name in options:
            raise BadValue(f"option {name!r} does not go with a stream", "leave it out: its checkpoint names the work")
    if "batchId" in options and "writeId" not in options:
        raise BadValue("option 'batchId' is given without 'writeId'", f"it is: {WRITE_OPTIONS['batchId']}")
    compression = _one_of(options, "compression", ("none", *COMPRESSIONS))
    return WriteOptions(
        brokers=brokers_of(options),
        topic=topic_of(options) if "topic" in options else None,
        write_id=_name(options),
        batch_id=_number(options, "batchId", 0, 0, EPOCH_MAX),
        order_by=_columns(options),
        key_column=options.get("keyColumn"),
        batch_bytes=_number(options, "batchBytes", BATCH_BYTES_DEFAULT, 1, FRAME_BYTES_MAX),
        compression=None if compression == "none" else compression,
        add_columns=_one_of(options, "addColumns", ("true", "false")) == "true",
    )


def _bad(options: Mapping[str, str], name: str, problem: str) -> BadValue:
    return BadValue(f"option {name!r} is {options[name]!r}: {problem}", WRITE_OPTIONS[name])


def _name(options: Mapping[str, str]) -> str | None:
    if "writeId" not in options:
        return None
    if not 0 < len(options["writeId"].encode()) <= WRITE_NAME_BYTES_MAX:
        raise _bad(options, "writeId", f"not 1 to {WRITE_NAME_BYTES_MAX} bytes")
    return options["writeId"]


def _number(options: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    text = options.get(name, str(usual)).strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise _bad(options, name, f"no number from {least} to {most}")
    return int(text)


def _columns(options: Mapping[str, str]) -> tuple[str, ...]:
    if "orderBy" not in options:
        return ()
    names = [name.strip() for name in options["orderBy"].split(",")]
    if "" in names or len(set(names)) < len(names):
        raise _bad(options, "orderBy", "an empty name, or one that is there twice")
    return tuple(names)


def _one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    if name in options and options[name] not in allowed:
        raise _bad(options, name, "there is no such one")
    return options.get(name)
