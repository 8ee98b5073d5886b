"""inspect on regions: existing data is decoded; garbage is a typed error, whatever its bytes are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embarcadero.errors import BadRegion, EmbarcaderoError, UnknownTopic
from embarcadero.fabric.layout import SUPERBLOCK, RegionKind
from embarcadero.fabric.region import Shape, write_superblock
from embarcadero.watch.regions import ReadOnlyFabric, list_regions, read_region
from embarcadero.watch.trace import TraceSource, find_batch

GENERATION = 7
SIZES = {
    RegionKind.EPOCHS: (128 + 4 * 128, 4), RegionKind.ORDER: (256 + 8 * 64, 8), RegionKind.HELD: (256 + 8 * 64, 8),
    RegionKind.RESULTS: (256 + 8 * 64, 8), RegionKind.SEQUENCER_FRONTIERS: (128 + 5_000 * 128, 0),
    RegionKind.CHECKPOINT: (128 + 2 * 5 * 128, 4), RegionKind.PENDING: (256 + 8 * 64, 8),
    RegionKind.LOG: (128 + 2 * 4_096, 2), RegionKind.BROKER_FRONTIERS: (128 + 12 * 128, 12),
    RegionKind.DURABLE: (128 + 14 * 128, 6), RegionKind.RANGES: (128 + 14 * 128, 6),
}  # fmt: skip


def made(folder: Path, kind: RegionKind, body: bytes, *, slots: int | None = None) -> ReadOnlyFabric:
    """A region with a valid superblock (except the slots) and any bytes after it."""
    size, usual = SIZES[kind]
    slots = usual if slots is None else slots
    data = np.zeros(size, dtype=np.uint8)
    filled = np.frombuffer(body[: size - 128], dtype=np.uint8)
    data[128 : 128 + len(filled)] = filled
    write_superblock(data, Shape(kind, size, slots, 4_096 if kind is RegionKind.LOG else 64, 1, 2), GENERATION)
    (folder / "region").write_bytes(data.tobytes())
    return ReadOnlyFabric(folder, GENERATION)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(kind=st.sampled_from(RegionKind), body=st.binary(max_size=2_000))
def test_any_bytes_after_a_valid_superblock_are_decoded(tmp_path: Path, kind: RegionKind, body: bytes) -> None:
    """Invalid entries are left out; frontiers are numbers; nothing breaks."""
    found = read_region(made(tmp_path, kind, body), "region", None, 5)

    assert (found["kind"], found["owner"], found["incarnation"]) == (kind.name, 1, 2)
    assert len(found["rows"]) <= 5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(kind=st.sampled_from(RegionKind), slots=st.integers(0, 1 << 63))
def test_a_superblock_that_contradicts_itself_is_refused(tmp_path: Path, kind: RegionKind, slots: int) -> None:
    """More slots than fit in the file are refused."""
    fabric = made(tmp_path, kind, b"", slots=slots)
    if slots == SIZES[kind][1] or kind is RegionKind.SEQUENCER_FRONTIERS:
        read_region(fabric, "region", None, 5)
    else:
        with pytest.raises(BadRegion, match="contradicts itself"):
            read_region(fabric, "region", None, 5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(body=st.binary(max_size=400))
def test_garbage_is_a_typed_error(tmp_path: Path, body: bytes) -> None:
    """Files that are no regions are named with their problem, in lists and alone."""
    (tmp_path / "region").write_bytes(body)
    fabric = ReadOnlyFabric(tmp_path, GENERATION)
    with pytest.raises(BadRegion):
        read_region(fabric, "region", None, 5)

    assert [set(row) for row in list_regions(fabric)] == [{"name", "problem"}]


def test_a_future_kind_is_a_typed_error(tmp_path: Path) -> None:
    """A valid superblock with an unknown kind."""
    fabric = made(tmp_path, RegionKind.HELD, b"")
    data = np.fromfile(tmp_path / "region", dtype=np.uint8)
    block = data[:128].view(SUPERBLOCK)
    block["kind"] = 99
    from embarcadero.fabric.layout import superblock_check

    block["check"] = superblock_check(block)
    (tmp_path / "region").write_bytes(data.tobytes())
    with pytest.raises(BadRegion, match="99"):
        read_region(fabric, "region", None, 5)


def test_missing_items_are_typed_errors(tmp_path: Path) -> None:
    """No folder, no region, a path out of the folder, no topic."""
    with pytest.raises(BadRegion, match="no fabric"):
        ReadOnlyFabric(tmp_path / "nowhere")
    fabric = ReadOnlyFabric(tmp_path)
    for name in ("missing", "../escape"):
        with pytest.raises(EmbarcaderoError):
            read_region(fabric, name, None, 5)
    with pytest.raises(UnknownTopic):
        find_batch(TraceSource(fabric, [], [], 1), "t", seq=0)
