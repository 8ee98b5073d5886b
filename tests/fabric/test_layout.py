"""Entries: their sizes, and the check that distinguishes whole entries from torn ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import InvariantBroken
from embarcadero.fabric.layout import (
    EPOCH_LINE,
    ORDER,
    PENDING,
    RESULT,
    SUPERBLOCK,
    Entries,
    RegionKind,
    join,
    pick,
    seal,
    sealed,
    superblock_check,
    table,
    valid_prefix,
)
from embarcadero.fabric.region import Shape, write_superblock

ENTRY_TYPES = [pytest.param(PENDING, id="pending"), pytest.param(ORDER, id="order"), pytest.param(RESULT, id="result")]
bodies = st.binary(min_size=64, max_size=64)


def entries_of(dtype: np.dtype[np.void], *raw: bytes) -> Entries:
    return seal(np.frombuffer(b"".join(raw), dtype=dtype).copy())


def numbered(dtype: np.dtype[np.void], word: str, first: int, count: int) -> Entries:
    entries = np.zeros(count, dtype=dtype)
    entries[word] = np.arange(first, first + count, dtype=np.uint64)
    return seal(entries)


@pytest.mark.parametrize(
    ("dtype", "size"), [(SUPERBLOCK, 128), (EPOCH_LINE, 128), (PENDING, 64), (ORDER, 64), (RESULT, 64)]
)
def test_sizes(dtype: np.dtype[np.void], size: int) -> None:
    """Entries fill one line, superblocks and epoch lines two."""
    assert dtype.itemsize == size


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
def test_commit_word_comes_first(dtype: np.dtype[np.void]) -> None:
    """The commit word is the first aligned word and the check the last four bytes, in every entry type."""
    fields = dtype.fields
    assert fields is not None
    assert dtype.names is not None
    assert fields[dtype.names[0]] == (np.dtype("<u8"), 0)
    assert fields["check"] == (np.dtype("<u4"), 60)


def test_overlapping_fields_are_refused() -> None:
    """A table whose fields overlap, or reach beyond its size, is a bug found at import."""
    with pytest.raises(InvariantBroken, match="overlap"):
        table(64, a=("<u8", 0), b=("<u4", 4))
    with pytest.raises(InvariantBroken, match="fit the entry"):
        table(64, a=("<u8", 60))


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
@settings(deadline=None, max_examples=100)
@given(raw=st.lists(bodies, min_size=1, max_size=5))
def test_sealed_entries_fit(dtype: np.dtype[np.void], raw: list[bytes]) -> None:
    """The check fits any sealed entry, and sealing changes nothing else."""
    entries = entries_of(dtype, *raw)
    assert sealed(entries).all()
    assert [bytes(line[:60]) for line in entries.view(np.uint8).reshape(-1, 64)] == [body[:60] for body in raw]


@settings(deadline=None, max_examples=50)
@given(body=bodies, flip=st.integers(1, 255))
def test_any_changed_byte_breaks_the_check(body: bytes, flip: int) -> None:
    """Changing any one byte of a sealed entry, wherever it is, makes its check wrong."""
    whole = entries_of(PENDING, body).tobytes()
    damaged = np.frombuffer(whole * 64, dtype=np.uint8).reshape(64, 64).copy()
    damaged[np.arange(64), np.arange(64)] ^= flip
    assert not sealed(damaged.reshape(-1).view(PENDING)).any()


@settings(deadline=None, max_examples=100)
@given(old=bodies, new=bodies, mask=st.integers(1, 254))
def test_a_torn_entry_is_not_valid(old: bytes, new: bytes, mask: int) -> None:
    """A mix of the 8-byte words of two different entries fits only if it equals one of them."""
    pair = entries_of(ORDER, old, new).view(np.uint64).reshape(2, 8)
    chosen = np.array([(mask >> word) & 1 for word in range(8)])
    torn = pair[chosen, np.arange(8)].copy()
    whole = any((torn == row).all() for row in pair)
    assert bool(sealed(torn.view(ORDER))[0]) == whole


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
@settings(deadline=None, max_examples=50)
@given(raw=st.lists(bodies, min_size=1, max_size=5), data=st.data())
def test_copies_keep_every_byte(dtype: np.dtype[np.void], raw: list[bytes], data: st.DataObject) -> None:
    """Copied, picked or joined in any way, an entry keeps all its bytes, also those that belong to no field."""
    entries = entries_of(dtype, *raw)
    whole = entries.tobytes()
    assert entries.copy().tobytes() == whole
    assert np.concatenate([entries, entries]).tobytes() == join([entries, entries]).tobytes() == whole * 2
    where = np.array(data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=8)), dtype=np.intp)
    lines = [whole[64 * place : 64 * place + 64] for place in where]
    assert pick(entries, where).tobytes() == entries[where].tobytes() == b"".join(lines)
    mask = np.array([body[0] % 2 == 0 for body in raw])
    assert pick(entries, mask).tobytes() == b"".join(whole[64 * n : 64 * n + 64] for n in np.flatnonzero(mask))
    assert pick(entries, mask).dtype == dtype


@pytest.mark.parametrize("dtype", ENTRY_TYPES)
def test_a_slot_never_written_is_not_valid(dtype: np.dtype[np.void]) -> None:
    """Zeros are no entry, not even the one with index 0."""
    zeros = np.zeros(3, dtype=dtype)
    assert not sealed(zeros).any()
    assert dtype.names is not None
    assert valid_prefix(zeros, 0, dtype.names[0]) == 0


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("first", [2**62 + 1, 2**63 - 5, 2**63, 2**64 - 1])
def test_nothing_is_valid_beyond_the_largest_index(first: int, count: int) -> None:
    """A damaged frontier may contain any number."""
    assert valid_prefix(numbered(RESULT, "position", 0, count), first, "position") == 0


@settings(deadline=None, max_examples=50)
@given(first=st.integers(0, 2**62), count=st.integers(1, 20), data=st.data())
def test_valid_prefix_ends_at_the_first_bad_entry(first: int, count: int, data: st.DataObject) -> None:
    """The valid prefix ends where an index is not the expected one or a check does not fit."""
    entries = numbered(RESULT, "position", first, count)
    assert valid_prefix(entries, first, "position") == count
    bad = data.draw(st.integers(0, count - 1))
    if data.draw(st.booleans()):
        entries["position"][bad] += 1
        seal(entries)
    else:
        entries["extra"][bad] ^= 1
    assert valid_prefix(entries, first, "position") == bad


def test_an_entry_of_the_last_lap_is_not_valid() -> None:
    """An entry that is whole, but of an earlier lap of the ring, does not count."""
    assert valid_prefix(numbered(PENDING, "index", 8, 4), 16, "index") == 0


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 127), flip=st.integers(1, 255))
def test_any_changed_byte_breaks_a_superblock(place: int, flip: int) -> None:
    """Changing any one byte of a superblock makes its check wrong."""
    data = np.zeros(128, dtype=np.uint8)
    write_superblock(data, Shape(RegionKind.LOG, 4096, 4, 1024, 7, 3), generation=99)
    block = data.view(SUPERBLOCK)
    assert int(block["check"][0]) == superblock_check(block)
    data[place] ^= flip
    assert int(block["check"][0]) != superblock_check(block)


def test_few_and_many_entries_have_the_same_checks() -> None:
    """Up to four entries are folded as plain numbers, more as arrays: the checks are the same."""
    many = np.frombuffer(np.random.default_rng(1).bytes(64 * 40), dtype=ORDER).copy()
    seal(many)

    assert [int(seal(many[i : i + 1].copy())["check"][0]) for i in range(40)] == many["check"].tolist()
