"""Partitions of keys: Kafka's for murmur2, the old ones for CRC32C, and the same with and without the native module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.wire import partitioners
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.partitioners import (
    CRC32C,
    MURMUR2,
    NO_PARTITION,
    key_hash,
    murmur2,
    partition_of,
    partitions_of,
)  # fmt: skip

KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""UtilsTest.testMurmur2 of Apache Kafka."""
PARTITIONS_OF_1000 = {
    b"": 681, b"a": 524, b"ab": 434, b"abc": 107, b"123456789": 566, b"\x00 ": 742,
}  # fmt: skip
"""test_partitioner.py of kafka-python: partitions out of 1,000."""
KEYS = st.lists(st.none() | st.binary(max_size=40), max_size=60)
KINDS = [pa.binary(), pa.large_binary()]


@pytest.fixture(params=["native", "python"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both implementations; the native one where it was built."""
    if request.param == "python":
        monkeypatch.setattr(partitioners, "NATIVE", None)
    return request.param


@pytest.mark.usefixtures("module")
def test_murmur2_is_that_of_kafka() -> None:
    """The numbers of Kafka's own test, and of kafka-python's, for single keys and for columns."""
    for key, wanted in KAFKA.items():
        assert murmur2(key) == wanted & 0xFFFF_FFFF
        assert key_hash(key, MURMUR2) == wanted & 0x7FFF_FFFF
    for key, wanted in PARTITIONS_OF_1000.items():
        assert partition_of(key, 1_000, MURMUR2) == wanted
    wanted_all = [*((number & 0x7FFF_FFFF) % 1_000 for number in KAFKA.values()), *PARTITIONS_OF_1000.values()]
    assert partitions_of(pa.array([*KAFKA, *PARTITIONS_OF_1000]), 1_000, MURMUR2).tolist() == wanted_all


@pytest.mark.usefixtures("module")
def test_keys_with_numbers_spread_over_all_partitions() -> None:
    """CRC32C modulo a power of two keeps their parity; murmur2 does not."""
    keys = [b"user-%d" % number for number in range(10)]
    assert {partition_of(key, 4, CRC32C) for key in keys} != {0, 1, 2, 3}
    assert {partition_of(key, 4, MURMUR2) for key in keys} == {0, 1, 2, 3}


@given(KEYS, st.integers(1, 70_000), st.sampled_from([MURMUR2, CRC32C]), st.sampled_from(KINDS), st.data())
def test_columns_single_keys_and_both_implementations_agree(
    keys: list[bytes | None], partitions: int, partitioner: str, kind: pa.DataType, data: st.DataObject
) -> None:
    """All lengths, nulls, slices of larger columns, 32-bit and 64-bit offsets."""
    start = data.draw(st.integers(0, len(keys)))
    column, wanted = pa.array(keys, kind)[start:], keys[start:]
    numbers = [NO_PARTITION if key is None else key_hash(key, partitioner) % partitions for key in wanted]
    assert partitions_of(column, partitions, partitioner).tolist() == numbers
    assert [partition_of(key, partitions, partitioner) for key in wanted if key is not None] == [
        number for number in numbers if number != NO_PARTITION
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioners, "NATIVE", None)
        assert partitions_of(column, partitions, partitioner).tolist() == numbers
        assert [partition_of(key, partitions, partitioner) for key in wanted if key is not None] == [
            number for number in numbers if number != NO_PARTITION
        ]


@given(st.binary(max_size=100))
def test_crc32c_is_the_checksum_of_payloads(key: bytes) -> None:
    """Topics from before the choice keep their partitions."""
    assert partition_of(key, 1_009, CRC32C) == payload_crc(key) % 1_009


@pytest.mark.usefixtures("module")
def test_text_and_integers_are_keys_too() -> None:
    """Text as UTF-8; integers of any width as 8 bytes, big-endian."""
    words = ["", "na\u00efve", "user-1"]
    wanted = [partition_of(word.encode(), 97, MURMUR2) for word in words]
    for text in (pa.string(), pa.large_string()):
        assert partitions_of(pa.array(words, text), 97, MURMUR2).tolist() == wanted
    numbers = [0, 1, 127, None, 5]
    wanted = [
        NO_PARTITION if number is None else partition_of(number.to_bytes(8, "big"), 97, MURMUR2) for number in numbers
    ]
    for kind in (pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.int64()):
        assert partitions_of(pa.array(numbers, kind), 97, MURMUR2).tolist() == wanted
        assert partitions_of(pa.array(numbers, kind)[1:4], 97, MURMUR2).tolist() == wanted[1:4]
    most = pa.array([-1, -(1 << 63)]), pa.array([(1 << 64) - 1, 1 << 63], pa.uint64())
    assert partitions_of(most[0], 97, MURMUR2).tolist() == partitions_of(most[1], 97, MURMUR2).tolist()


@pytest.mark.skipif(partitioners.NATIVE is None, reason="the native module was not built")
def test_the_native_module_checks_its_arguments() -> None:
    """Offsets outside the data, buffers that are too short, numbers out of range: errors, never a read outside."""
    native: Any = partitioners.NATIVE
    out, good = np.empty(2, np.int32), np.array([0, 1, 2], np.int32).tobytes()
    native.column(0, 4, good, 4, b"ab", None, 0, 2, out)
    for offsets in ([0, 1, 3], [0, -1, 2], [2, 1, 2], [-5, 1, 2]):
        with pytest.raises(ValueError, match="outside"):
            native.column(0, 4, np.array(offsets, np.int32).tobytes(), 4, b"ab", None, 0, 2, out)
    for arguments in (
        (0, 4, good, 4, b"ab", None, 0, 3, out), (0, 4, good, 4, b"ab", None, 1, 2, out),
        (0, 4, good, 8, b"ab", None, 0, 2, out), (0, 4, good, 4, b"ab", b"", 0, 2, out),
        (0, 4, good, 4, b"ab", None, -1, 2, out), (0, 4, good, 4, b"ab", None, 0, 2, out[:1]),
        (0, 4, good, 3, b"ab", None, 0, 2, out), (2, 4, good, 4, b"ab", None, 0, 2, out),
        (0, 0, good, 4, b"ab", None, 0, 2, out), (0, 4, good, 4, b"ab", None, 1 << 62, 1 << 62, out),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"fit|range|exist"):
            native.column(*arguments)
    with pytest.raises(ValueError, match="range"):
        native.partition(0, b"", 0)
