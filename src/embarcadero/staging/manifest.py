"""Facts in a staging topic, beside the batches: which writes have begun, and which batches each of them has.

A staging topic has two partitions. Partition PAYLOADS has batches for the target topic, encoded as they will be
published. Partition FACTS has one record for each fact of this module: its key names the kind, its value is the fact.

A write has named sessions in the target's log. Their sequences hold its decisions and its progress:

`spark/<write>/decided`     (epoch << DIGEST_BITS) + digest of the manifest that was decided for that epoch.
`spark/<write>/data`        the session of the published batches: batch n of an epoch has the sequence
                            (epoch << BATCHES_BITS) + n. Beyond an epoch's sequences, that epoch is done.
`spark/<write>/run/<run>`   the newest epoch, plus 1, that a run of the driver has tried to commit.
`spark/<write>/routed`      of a write into several topics: the session of the batches in each of them, with the same
                            sequences. `decided` and `data` are in the log of its home, the hidden topic ROUTED_TOPIC.

Each number only grows. The names end with their sessions, after the topic's `session_ttl_s` without use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.client.results import Batch
from embarcadero.errors import BadValue, Corrupt, EmbarcaderoError
from embarcadero.limits import (
    FRAME_BYTES_MAX,
    KIB,
    SESSION_SEQUENCE_MAX,
    STAGED_BATCHES_BITS,
    STAGED_DIGEST_BITS,
    WRITE_NAME_BYTES_MAX,
)
from embarcadero.wire.schemas import encode_batch, raw_batch

PARTITIONS: Final = 2
PAYLOADS: Final = 0
FACTS: Final = 1

REFERENCE: Final = np.dtype(
    [("index", "<u8"), ("lane", "<u4"), ("size", "<u4"), ("count", "<u4"), ("crc", "<u4"), ("partition", "<u4")]
)
"""One staged batch: its position in the staging topic, its size, and the target topic's partition for it."""

EPOCH_MAX: Final = SESSION_SEQUENCE_MAX >> STAGED_DIGEST_BITS
BATCHES_MAX: Final = (1 << STAGED_BATCHES_BITS) - 1
_MANIFEST_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * KIB  # the rest is space for Arrow's own bytes

ReferenceRows = npt.NDArray[np.void]
Sequences = Sequence["Reference | InlineBatch"]


class Decision(NamedTuple):
    """The newest decision of a write: an epoch, and the digest of its manifest. Digest 0: nothing was decided."""

    epoch: int
    digest: int

    @property
    def number(self) -> int:
        """The session sequence that encodes this decision."""
        return (self.epoch << STAGED_DIGEST_BITS) + self.digest

    @classmethod
    def of(cls, number: int) -> Decision:
        """The decision that a session sequence encodes."""
        return cls(number >> STAGED_DIGEST_BITS, number & ((1 << STAGED_DIGEST_BITS) - 1))


def decided_name(write: str) -> str:
    """Name of the session whose sequence is the newest decision."""
    return f"spark/{write}/decided"


def data_name(write: str) -> str:
    """Name of the session of the published batches."""
    return f"spark/{write}/data"


def routed_name(write: str) -> str:
    """Name of the session of the batches of a write into several topics."""
    return f"spark/{write}/routed"


def run_name(write: str, run: str) -> str:
    """Name of the session whose sequence records how far a run of the driver is."""
    return f"spark/{write}/run/{run}"


def first_sequence(epoch: int) -> int:
    """The sequence of the first batch of an epoch. `data` at the first sequence of epoch + 1 means: epoch is done."""
    return epoch << STAGED_BATCHES_BITS


class Reference(NamedTuple):
    """One staged batch as plain numbers; the fields of REFERENCE."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    lane: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int
    partition: int


class InlineBatch(msgspec.Struct, frozen=True, array_like=True):
    """One batch that is small enough to travel in the manifest itself."""

    payload: bytes
    count: int
    partition: int


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A topic into which batches go, and the version of its schema in which they are encoded."""

    topic: str
    id: int
    schema: int


class ManifestPart(msgspec.Struct, frozen=True, array_like=True):
    """The batches that one task wrote into one topic, in its order: as references to staged batches, or inline."""

    references: bytes = b""
    inline: list[InlineBatch] = []
    target: int = 0  # which of the manifest's targets

    @property
    def rows(self) -> ReferenceRows:
        """The references as an array of REFERENCE."""
        return np.frombuffer(self.references, dtype=REFERENCE)

    def batches(self) -> Iterator[Reference | InlineBatch]:
        """All batches of the task, in its order."""
        yield from map(Reference._make, self.rows.tolist())
        yield from self.inline


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A task of an attempt stages batches for an epoch of a write: they are kept until the epoch is over."""

    write: str
    epoch: int
    attempt: str = ""


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """An attempt at an epoch of a write has failed permanently. Its manifest, if any, may be decided nevertheless."""

    write: str
    epoch: int
    attempt: str = ""


class Manifest(msgspec.Struct, frozen=True, tag="manifest", dict=True):
    """All batches of one epoch of a write."""

    write: str
    epoch: int
    targets: list[Target]
    parts: list[ManifestPart]
    attempt: str = ""

    def __post_init__(self) -> None:
        check_write(self.write, self.epoch)

    @cached_property
    def encoded(self) -> bytes:
        """The manifest as bytes."""
        return msgspec.msgpack.encode(self)

    @cached_property
    def digest(self) -> int:
        """A number of at least 1 that distinguishes this manifest from others of the same epoch."""
        found = int.from_bytes(blake2b(self.encoded, digest_size=8).digest(), "little")
        return 1 + found % ((1 << STAGED_DIGEST_BITS) - 1)

    @cached_property
    def count(self) -> int:
        """Number of batches."""
        return sum(len(part.rows) + len(part.inline) for part in self.parts)

    def batches(self, target: int = 0) -> Iterator[Reference | InlineBatch]:
        """All batches of a target, in the order in which they are published."""
        for part in self.parts:
            if part.target == target:
                yield from part.batches()

    def lowest(self) -> dict[int, int]:
        """The lowest referenced index, by lane of the staging topic."""
        rows = np.concatenate([part.rows for part in self.parts]) if self.parts else np.empty(0, dtype=REFERENCE)
        return {lane: int(rows["index"][rows["lane"] == lane].min()) for lane in np.unique(rows["lane"]).tolist()}

    def check(self) -> None:
        """Raise BadValue if there are too many batches for one epoch."""
        if self.count > BATCHES_MAX or len(self.encoded) > _MANIFEST_BYTES_MAX:
            raise BadValue(
                f"epoch {self.epoch} of write {self.write!r} has {self.count} batches, and their list has "
                f"{len(self.encoded)} bytes",
                f"a list has at most {BATCHES_MAX} batches and {_MANIFEST_BYTES_MAX} bytes: make larger batches "
                "(batchBytes), or split the write",
            )


Fact = Begun | Dropped | Manifest
_DECODER: Final = msgspec.msgpack.Decoder(Fact)


def check_write(write: str, epoch: int) -> None:
    """Raise BadValue for an invalid name or epoch of a write."""
    if not 0 < len(write.encode()) <= WRITE_NAME_BYTES_MAX:
        raise BadValue(f"the write's name has {len(write.encode())} bytes", f"use 1 to {WRITE_NAME_BYTES_MAX} bytes")
    if not 0 <= epoch <= EPOCH_MAX:
        raise BadValue(
            f"epoch {epoch} of write {write!r} is not between 0 and {EPOCH_MAX}",
            "use a smaller number, or begin another write",
        )


def encode_fact(fact: Fact, now_us: int) -> pa.Buffer:
    """Encode a fact as the payload of a batch of one record."""
    value = fact.encoded if isinstance(fact, Manifest) else msgspec.msgpack.encode(fact)
    kind = type(fact).__name__.lower().encode()
    return encode_batch(raw_batch([kind], [value], [None], [now_us]))


def decode_fact(batch: Batch) -> Fact:
    """Return the fact in a batch of partition FACTS. Raises Corrupt if there is none."""
    try:
        value = batch.to_arrow().column("value")[0].as_py()
        fact: Fact = _DECODER.decode(value)
        return fact
    except (msgspec.DecodeError, EmbarcaderoError, ValueError) as error:
        raise Corrupt(
            f"index {batch.index} of staging lane {batch.lane} holds no fact of a write: {error}",
            "another program published into a topic of the cluster; report it if none did",
        ) from error
