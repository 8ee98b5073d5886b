"""docs/protocol.md can't go stale: its tables, lists and test vectors are compared with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from embarcadero import errors, limits
from embarcadero.types import Outcome
from embarcadero.wire import codec
from embarcadero.wire.codec import HEADER_BYTES, PROTOCOL_VERSION, FrameKind
from embarcadero.wire.messages import AnyMessage
from tests.wire.samples import vectors

DOC = (Path(__file__).parent.parent.parent / "docs" / "protocol.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    _, _, rest = DOC.partition(f"\n{title}\n")
    assert rest, f"docs/protocol.md has no heading {title!r}"
    return re.split(r"\n##+ ", rest)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_vectors_are_the_output_of_the_code() -> None:
    """Every vector is there and has the bytes that the code makes today."""
    found = re.findall(r"\n([A-Z]+[^\n]*)\n```\n([0-9a-f\n]+)\n```", section("## Test vectors"))
    assert {name: text.replace("\n", "") for name, text in found} == {n: data.hex() for n, data in vectors().items()}


@pytest.mark.parametrize(
    ("title", "dtype", "first"),
    [
        ("### Short header (16 bytes)", codec.SHORT_HEADER, 0),
        ("### BATCH header (64 bytes)", codec.BATCH_HEADER, 8),
        ("### REFERENCE body (32 bytes)", codec.REFERENCE_BODY, 0),
        ("### ACK (48 bytes each)", codec.ACK, 0),
        ("### FETCHED header (64 bytes)", codec.FETCHED_HEADER, 8),
    ],
)
def test_byte_tables_match_the_layouts(title: str, dtype: np.dtype[np.void], first: int) -> None:
    """Offsets, types and names of every field are those of codec.py."""
    fields = [(name, *dtype.fields[name][:2]) for name in dtype.names or () if dtype.fields and "pad" not in name]
    expected = [[str(at), f"u{kind.itemsize * 8}", name] for name, kind, at in fields if at >= first]
    assert [row[:3] for row in rows(title)] == expected
    assert f"({dtype.itemsize} bytes" in title


def test_kinds_are_all_listed() -> None:
    """Every kind of frame is there, with its number and header."""
    assert [row[:3] for row in rows("## Frames")] == [[k.name, str(int(k)), str(HEADER_BYTES[k])] for k in FrameKind]
    assert f"now **{PROTOCOL_VERSION}**" in section("## Versions and hello")


def test_messages_are_all_listed() -> None:
    """Every control message is there, with its fields and the optional ones."""
    expected = {
        kind.__name__: [field.name + ("" if field.required else "=") for field in msgspec.structs.fields(kind)]
        for kind in get_args(AnyMessage)
    }
    assert {row[0]: re.findall(r"[a-z_]+=?", row[1]) for row in rows("## Control messages")} == expected


def test_answers_are_messages() -> None:
    """Every answer named is a message, or a frame."""
    names = {kind.__name__ for kind in get_args(AnyMessage)} | {"", "a FETCHED frame"}
    assert {row[3] for row in rows("## Control messages")} <= names


def test_outcomes_are_all_listed() -> None:
    """Every outcome is there with its number."""
    assert [row[:2] for row in rows("## Acks and outcomes")] == [[o.name, str(int(o))] for o in Outcome]


def test_errors_exist() -> None:
    """Every error of the protocol is listed, and every one listed exists."""
    listed = {row[0] for row in rows("## Errors")}
    assert listed <= errors.BY_NAME.keys()
    assert {kind.__name__ for kind in errors.ProtocolError.__subclasses__()} <= listed


def test_limits_match_the_code() -> None:
    """Every limit has today's value."""
    for name, value, _ in rows("## Limits"):
        assert int(value) == getattr(limits, name), name
