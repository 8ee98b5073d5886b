"""Intake: how records are counted, which batch a record joins, and that reserved space is given back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.client.intake import RECORD_OVERHEAD_BYTES, Intake, IntakeSettings, Sealed
from embarcadero.errors import BadValue
from embarcadero.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX
from embarcadero.wire.schemas import RAW, RAW_SCHEMA, decode_batch


def intake(**options: Any) -> Intake:
    usual: dict[str, Any] = {"partitions": 1, "partitioner": "murmur2", "key": "", "batch_bytes": 1000}
    usual |= {"frame_bytes_max": FRAME_BYTES_MAX, "window_bytes": 3000}
    return Intake(IntakeSettings(topic="t", schemas=RAW, compression=None, **(usual | options)))


def send(taken: Intake, value: bytes, key: bytes | None = None) -> Any:
    """As in Publisher.send; None when the window is full."""
    record, size = taken.checked(value, key, None, None)
    with taken.lock:
        builder = taken.current
        if builder is not None and size <= builder.room and key is None:
            builder.room -= size
            builder.records.append(record)
            return taken.future(builder.result, len(builder.records) - 1)
        if taken.is_full():
            return None
        future = taken.add(record, size)
        taken.announced()
        return future


def values(sealed: Sealed) -> list[bytes]:
    found: list[bytes] = decode_batch(sealed.payload, RAW_SCHEMA, sealed.count, full=True).column("value").to_pylist()
    return found


steps = st.lists(st.integers(0, 1500) | st.sampled_from(["seal", "settle"]), max_size=60)


@given(steps, st.sampled_from([1, 3]), st.sampled_from([1, 100, 1000]), st.sampled_from([100, 3000]))
@settings(deadline=None, max_examples=80)
def test_the_window_counts_every_record_once(todo: list[Any], partitions: int, batch: int, window: int) -> None:
    """Whatever is sent, sealed and settled: the window is exceeded by at most one record, and ends empty."""
    taken = intake(partitions=partitions, batch_bytes=batch, window_bytes=window)
    waiting: list[Sealed] = []
    sent: list[bytes] = []
    found: list[Sealed] = []
    used = 0

    def settle() -> None:
        nonlocal used
        for sealed in waiting:
            used -= sealed.cost
            with taken.lock:
                taken.settled(sealed)
        waiting.clear()

    for number, step in enumerate(todo):
        if step == "settle":
            settle()
        elif step == "seal":
            taken.seal()
        else:
            value = b"%d:" % number + bytes(step)
            if (future := send(taken, value, b"k%d" % (number % 5) if partitions > 1 and number % 2 else None)) is None:
                assert used >= window
                continue
            assert used < window
            used += len(value) + RECORD_OVERHEAD_BYTES + (2 if partitions > 1 and number % 2 else 0)
            sent.append(value)
            assert not future.done()
        waiting += (new := taken.take_sealed())
        found += new
    taken.seal()
    waiting += (new := taken.take_sealed())
    settle()
    assert (used, taken.pending_bytes, taken.unsettled, taken.gathering, taken.current) == (0, 0, {}, False, None)
    stored = [value for sealed in found + new for value in values(sealed)]
    assert (stored == sent) if partitions == 1 else (sorted(stored) == sorted(sent))
    assert all(sealed.count == 1 or sealed.cost <= batch for sealed in found + new)


def test_reserved_space_does_not_bypass_the_record_limit() -> None:
    """A batch may be larger than a record may be."""
    taken = intake(batch_bytes=FRAME_BYTES_MAX, window_bytes=1 << 30)
    send(taken, b"first")
    size = RECORD_BYTES_MAX + 1 + RECORD_OVERHEAD_BYTES
    assert taken.current is not None
    assert taken.current.room < size
    with pytest.raises(BadValue, match="4194305 bytes"):
        taken.check_size(size)


def test_the_fast_path_is_closed_until_the_event_loop_knows_of_the_batch() -> None:
    """Ctrl-C may have ended the call that was to announce it: the next call announces it."""
    taken = intake()
    record, size = taken.checked(b"untold", None, None, None)
    with taken.lock:
        taken.add(record, size)
        assert (taken.current, taken.news) == (None, True)
        taken.announced()
        assert taken.current is not None
        taken.seal()
        assert taken.current is None


def test_a_batch_without_records_is_dropped() -> None:
    """Ctrl-C between opening a batch and its first record leaves nothing behind."""
    taken = intake()
    with taken.lock:
        builder = taken._next_builder(None, 1, None)
        taken._give_room(builder, 10)
        taken.seal()
    assert (taken.pending_bytes, taken.unsettled, taken.take_sealed(), taken.current) == (0, {}, [], None)
