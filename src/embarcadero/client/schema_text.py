"""Schemas as people write them: `id:int64!, name:string, at:timestamp[us, UTC]`, or a file of JSON or Arrow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from embarcadero.errors import BadSchema

_HINT = 'write "id:int64!, name:string, tags:list<string>"; "!" is for columns that are never null'
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([^\]]+))?\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d{1,2}),\s*(-?\d{1,2})\)")
_SCHEMA_FILE_BYTES_MAX = 1 << 20


def parse_schema(text: str) -> pa.Schema:
    """A schema from its short form, or from a file: .json (types by name, or a list of fields) or .arrow."""
    path = Path(text)
    if path.suffix in {".json", ".arrow", ".arrows", ".feather", ".ipc"}:
        return _from_file(path)
    return pa.schema([_field(part) for part in _parts(text)])


def _from_file(path: Path) -> pa.Schema:
    try:
        if path.suffix != ".json":
            with pa.memory_map(str(path)) as source:
                return _arrow_schema(source)
        with path.open("rb") as file:
            return _from_json(json.loads(file.read(_SCHEMA_FILE_BYTES_MAX)))
    except OSError as error:
        raise BadSchema(f"can't read {path}: {error.strerror or error}", "name a file that exists") from None
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, BadSchema):
            raise
        raise BadSchema(f"{path} holds no schema: {error}", "use JSON, or an Arrow file, stream or schema") from None


def _arrow_schema(source: Any) -> pa.Schema:
    """The schema of an Arrow file; of a stream, or of a schema alone."""
    try:
        return pa.ipc.open_file(source).schema
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.read_schema(source)


def _from_json(found: Any) -> pa.Schema:
    if isinstance(found, dict) and isinstance(found.get("fields"), list):
        found = found["fields"]
    if isinstance(found, dict):
        return pa.schema([_field(f"{name}:{kind}") for name, kind in found.items()])
    if not isinstance(found, list) or not all(isinstance(f, dict) and {"name", "type"} <= f.keys() for f in found):
        raise BadSchema("this JSON is no schema", 'write {"id": "int64!"} or [{"name": "id", "type": "int64"}]')
    return pa.schema([pa.field(str(f["name"]), _type(str(f["type"])), bool(f.get("nullable", True))) for f in found])


def _parts(text: str) -> Iterator[str]:
    """Split at commas that are in no bracket."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "<[(") - (letter in ">])")
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _field(text: str) -> pa.Field:
    name, colon, kind = (part.strip() for part in text.partition(":"))
    if not colon or not name or not kind:
        raise BadSchema(f"{text.strip()!r} is no column", _HINT)
    return pa.field(name, _type(kind.removesuffix("!").strip()), nullable=not kind.endswith("!"))


def _type(text: str) -> pa.DataType:
    if found := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(found[1], tz=found[2])
    if found := _DECIMAL.fullmatch(text):
        try:
            return pa.decimal128(int(found[1]), int(found[2]))
        except ValueError as error:
            raise BadSchema(f"there is no type {text!r}: {error}", _HINT) from None
    if text.startswith("list<") and text.endswith(">"):
        return pa.list_(_type(text[5:-1].strip().removeprefix("item: ")))
    if text.startswith("struct<") and text.endswith(">"):
        return pa.struct([_field(part) for part in _parts(text[7:-1])])
    if text.startswith("map<") and text.endswith(">"):
        sides = list(_parts(text[4:-1]))
        if len(sides) == 2:
            return pa.map_(_type(sides[0].strip()), _type(sides[1].strip()))
    try:
        return pa.type_for_alias(text)
    except ValueError:
        raise BadSchema(f"there is no type {text!r}", f"types are Arrow's: int64, bool, binary ...; {_HINT}") from None
