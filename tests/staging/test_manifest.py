"""Manifests, names and the fold of facts: pure parts of the commit of a write."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from embarcadero.client.results import Batch, OrderEntry
from embarcadero.errors import BadValue, Corrupt
from embarcadero.staging.manifest import (
    EPOCH_MAX,
    REFERENCE,
    Begun,
    Decision,
    Dropped,
    Fact,
    InlineBatch,
    Manifest,
    ManifestPart,
    Target,
    check_write,
    decode_fact,
    encode_fact,
    first_sequence,
)
from embarcadero.types import EntryKind


def references(*rows: tuple[int, ...]) -> ManifestPart:
    return ManifestPart(references=np.array(list(rows), dtype=REFERENCE).tobytes())


def manifest(epoch: int = 0, write: str = "w", parts: list[ManifestPart] | None = None) -> Manifest:
    return Manifest(
        write, epoch, [Target("t", 7, 3)], [ManifestPart(inline=[InlineBatch(b"x", 1, 0)])] if parts is None else parts
    )


def as_batch(payload: pa.Buffer) -> Batch:
    fields = dict.fromkeys(OrderEntry._fields, 0) | {"count": 1, "kind": int(EntryKind.BATCH), "size": payload.size}
    return Batch.of_entry(0, OrderEntry(**fields), payload.to_pybytes(), {})


@pytest.mark.parametrize(
    "fact",
    [
        Begun("w", 3),
        Dropped("w", EPOCH_MAX),
        manifest(parts=[references((1, 2, 3, 4, 5, 6)), ManifestPart(), ManifestPart()]),
    ],
)
def test_facts_survive_a_round_trip(fact: Fact) -> None:
    """Through the payload of a batch."""
    found = decode_fact(as_batch(encode_fact(fact, 5)))
    assert found == fact
    assert type(found) is type(fact)


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x81\xa4type\xa4what", b"\x93\x01\x02\x03"])
def test_a_record_that_is_no_fact_is_corrupt(value: bytes) -> None:
    """The error names its position."""
    batch = pa.RecordBatch.from_pydict({"value": [value]})
    with pytest.raises(Corrupt, match="index 0 of staging lane 0 holds no fact"):
        decode_fact(as_batch(batch.serialize()))


def test_the_digest_distinguishes_manifests() -> None:
    """Any change of the batches, their order or their partitions changes it; it is never 0."""
    one, two = InlineBatch(b"x", 1, 0), InlineBatch(b"y", 1, 0)
    parts = [
        [],
        [ManifestPart(inline=[one])],
        [ManifestPart(inline=[two])],
        [ManifestPart(inline=[one, two])],
        [ManifestPart(inline=[two, one])],
        [ManifestPart(inline=[one]), ManifestPart(inline=[two])],
        [ManifestPart(inline=[InlineBatch(b"x", 1, 1)])],
        [references((1, 2, 3, 4, 5, 6))],
        [references((1, 2, 3, 4, 5, 7))],
    ]
    digests = {manifest(parts=each).digest for each in parts}
    assert len(digests) == len(parts)
    assert all(0 < digest < 1 << 28 for digest in digests)


def test_batches_come_in_the_order_of_tasks() -> None:
    """References are plain numbers; the lowest index of each lane must still exist."""
    made = manifest(
        parts=[references((7, 1, 10, 2, 99, 0), (5, 2, 11, 3, 98, 1)), ManifestPart(inline=[InlineBatch(b"x", 1, 0)])]
    )
    first, second, third = made.batches()
    assert (first.index, first.lane, first.size, first.count, first.crc, first.partition) == (7, 1, 10, 2, 99, 0)
    assert (second.index, third) == (5, InlineBatch(b"x", 1, 0))
    assert (made.count, made.lowest()) == (3, {1: 7, 2: 5})


def test_each_target_has_its_own_batches() -> None:
    """Of a write into several topics."""
    one, two, three = (InlineBatch(value, 1, 0) for value in (b"x", b"y", b"z"))
    made = manifest(
        parts=[ManifestPart(inline=[one]), ManifestPart(inline=[two], target=1), ManifestPart(inline=[three])]
    )
    assert [*made.batches(0)] == [one, three]
    assert [*made.batches(1)] == [two]


@pytest.mark.parametrize(("write", "epoch"), [("", 0), ("w" * 129, 0), ("w", -1), ("w", EPOCH_MAX + 1)])
def test_names_and_epochs_are_bounded(write: str, epoch: int) -> None:
    """They share sequences and names of sessions with other facts."""
    with pytest.raises(BadValue):
        check_write(write, epoch)
    with pytest.raises(BadValue):
        manifest(epoch, write)


def test_numbers_of_epochs_never_overlap() -> None:
    """A decision is recovered from its number, and the sequences of an epoch end where the next one's start."""
    for decision in (Decision(0, 1), Decision(5, (1 << 28) - 1), Decision(EPOCH_MAX, 7)):
        assert Decision.of(decision.number) == decision
    assert Decision.of(0).digest == 0
    assert Decision(3, (1 << 28) - 1).number < Decision(4, 1).number
    assert first_sequence(4) - first_sequence(3) == 1 << 20
