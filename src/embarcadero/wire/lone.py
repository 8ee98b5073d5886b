"""The payload of a batch of one plain record, written without Arrow's help.

Whoever sends records one by one waits for each, and making four columns and a message of one row takes Arrow 60 us. All
such payloads look alike: a head with a few numbers that depend on the value's length, the value, padding, and a tail
with the time. What is constant, and where the numbers are, is learned once from two payloads that Arrow made.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from embarcadero.wire.payload import RAW_SCHEMA, encode_batch, plain_batch

_ALIGN: Final = 8
_SHORTER, _LONGER = 61, 70  # their lengths and their padded lengths differ by different numbers, so both are told apart
_NUMBER: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<q")
_HEADS_KEPT: Final = 256
_PADDING: Final = tuple(bytes(missing) for missing in range(_ALIGN))


class _Form(NamedTuple):
    """What all payloads of one plain record have in common."""

    head: bytes
    lengths: list[tuple[int, int]]  # where in the head a number is, and what it has beyond the value's length
    padded: list[tuple[int, int]]  # the same for numbers that count padding as well
    before_time: bytes
    after_time: bytes


def _example(size: int) -> tuple[bytes, int, int]:
    """A payload that Arrow made of a value of zeros: its bytes, where the value begins and where the time does."""
    made = encode_batch(plain_batch([bytes(size)], [0.0]))
    columns = pa.ipc.read_record_batch(pa.ipc.read_message(made), RAW_SCHEMA).columns
    value_at, time_at = (column.buffers()[-1].address - made.address for column in (columns[1], columns[3]))
    return made.to_pybytes(), value_at, time_at


@cache
def _form() -> _Form | None:
    """None: this release of Arrow does something that we don't expect, and is to encode by itself."""
    (payload, value_at, time_at), (longer, value_at_too, time_at_too) = _example(_SHORTER), _example(_LONGER)
    grown = _LONGER - _SHORTER
    tail_at, tail_at_too = value_at + _padded(_SHORTER), value_at_too + _padded(_LONGER)
    heads = [np.frombuffer(made[:value_at], dtype="<u4").astype(np.int64) for made in (payload, longer)]
    numbers = np.flatnonzero(heads[0] != heads[1]).tolist()
    by = {at: int(heads[1][at] - heads[0][at]) for at in numbers}
    alike = value_at == value_at_too and payload[tail_at:] == longer[tail_at_too:] and time_at > tail_at
    known = set(by.values()) <= {grown, _padded(_LONGER) - _padded(_SHORTER)}
    if not (alike and known and time_at_too - tail_at_too == time_at - tail_at):
        return None
    return _Form(
        payload[:value_at],
        [(4 * at, int(heads[0][at]) - _SHORTER) for at in numbers if by[at] == grown],
        [(4 * at, int(heads[0][at]) - _padded(_SHORTER)) for at in numbers if by[at] != grown],
        payload[tail_at:time_at],
        payload[time_at + _TIME.size :],
    )


def _padded(size: int) -> int:
    return (size + _ALIGN - 1) & -_ALIGN


@lru_cache(maxsize=_HEADS_KEPT)
def _head(size: int) -> bytes:
    """What comes before a value of this many bytes: publishers send many of the same."""
    form = _form()
    if form is None:
        return b""
    head, room = bytearray(form.head), _padded(size)
    for at, beyond in form.lengths:
        _NUMBER.pack_into(head, at, size + beyond)
    for at, beyond in form.padded:
        _NUMBER.pack_into(head, at, room + beyond)
    return bytes(head)


def lone_payload(value: bytes, time_s: float) -> bytes:
    """The same bytes as `plain_batch` of one value and time (in seconds), encoded without compression."""
    form, size = _form(), len(value)
    if form is None:
        return bytes(memoryview(encode_batch(plain_batch([value], [time_s]))))
    time_us = _TIME.pack(round(time_s * 1e6))
    return b"".join((_head(size), value, _PADDING[-size % _ALIGN], form.before_time, time_us, form.after_time))
