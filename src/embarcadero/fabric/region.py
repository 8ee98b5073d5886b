"""The fabric's interface: named regions and four primitives; the names of regions, and their superblocks.

Real memory (shared.py) and simulated incoherent memory implement it. Role code assumes incoherent memory.

Rules for every user:
- A region has one writer, named by the region's path, for its whole life. All other processes attach it read-only.
- Stores reach other processes only after `flush`. To order two stores, *make* the second after the flush of the first.
- Loads may be stale until `invalidate` of their lines.
- `fence` is a full fence: loads after it do not pass stores and flushes before it.

The folder of a region's name identifies the process that writes the region, so `ls` shows the state of a cluster.

    epochs                            a line per epoch: opened, started
    epoch-<e>/frontiers               the leader of epoch e: its heartbeat, a line per lane, a line per broker
    epoch-<e>/order-<lane>            order entries of a lane
    epoch-<e>/checkpoint-<lane>       the lane's session table, as of an index
    epoch-<e>/held                    the reorder buffer: entries that wait for a gap to close
    epoch-<e>/results-<b>.<inc>       outcomes of a broker's entries
    epoch-<e>/ranges                  the open range of each lane
    broker-<b>.<inc>/pending          a broker incarnation: entries that it published
    broker-<b>.<inc>/log              payloads
    broker-<b>.<inc>/frontiers        results read through; its heartbeat; a line per chunk of the log
    broker-<b>.<inc>/order-<lane>     order entries of a lane of its own
    replica-<r>.<inc>/durable         a replica incarnation: how far its copies are synced

`Member.region_prefix` and `ReplicaRef.region_prefix` are the folders of brokers and replicas. The same strings name
their doorbells. `TopicLane.region` is the ring of a broker's lane. These are in types.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from embarcadero.errors import BadName, BadRegion
from embarcadero.fabric.layout import LAYOUT_VERSION, MAGIC, SUPERBLOCK, RegionKind, superblock_check
from embarcadero.types import Member, ReplicaRef

Bytes = npt.NDArray[np.uint8]
_KINDS = frozenset(RegionKind)


@dataclass(frozen=True, slots=True)
class Shape:
    """The description of a region in its superblock."""

    kind: RegionKind
    size: int  # total bytes, the superblock included
    slots: int = 0
    slot_bytes: int = 0
    owner: int = 0
    incarnation: int = 0


class Region(Protocol):
    """One mapped region, as one host sees it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def data(self) -> Bytes:
        """All bytes. Writable only for the region's creator."""
        ...

    def flush(self, offset: int, length: int) -> None:
        """Write back the lines of [offset, offset + length), then fence."""
        ...

    def invalidate(self, offset: int, length: int) -> None:
        """Make later loads of these lines fresh. Dirty lines are written back, never discarded."""
        ...

    def reserve(self, offset: int, length: int) -> None:
        """Allocate memory for these bytes of a sparse region before they are touched. Raises FabricFull."""
        ...

    def close(self) -> None: ...


class Fabric(Protocol):
    """A set of named regions, as one host sees them."""

    @property
    def generation(self) -> int:
        """Number of this fabric; regions of another generation are refused."""
        ...

    @property
    def coherent_only(self) -> bool:
        """True when flush and invalidate are only compiler fences: one coherent host."""
        ...

    def create(self, name: str, shape: Shape) -> Region:
        """Make a region: a superblock, and zeros. Other processes see the whole region or no region."""
        ...

    def attach(self, name: str, writable: bool = False) -> Region:
        """Map a region. Raises BadRegion when it is missing, damaged, or of another cluster.

        `writable` is only for the epoch table, whose lines have different writers.
        """
        ...

    def exists(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def remove(self, name: str) -> None:
        """Unlink a region, if it exists. Processes that mapped it keep their mapping."""
        ...

    def fence(self) -> None: ...


def attach_unless_removed(fabric: Fabric, *names: str) -> list[Region] | None:
    """Attach regions of an incarnation that may be removed at any time.

    Returns None if one of them is missing. Raises BadRegion if one is damaged.
    """
    if not all(map(fabric.exists, names)):
        return None
    try:
        return [fabric.attach(name) for name in names]
    except BadRegion:
        if all(map(fabric.exists, names)):
            raise
        return None  # it was removed meanwhile, permanently: each incarnation has its own names


# --- names of regions -------------------------------------------------------------------------------------------------
EPOCHS_REGION: Final = "epochs"
_EPOCH: Final = "epoch-"
_BROKER: Final = "broker-"
_REPLICA: Final = "replica-"
_ORDER: Final = "/order-"


def writer_of(name: str) -> str:
    """Folder of a region, which names its writer."""
    return name.split("/", maxsplit=1)[0]


_REGION_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}(/[a-z0-9][a-z0-9._-]{0,99})*", re.ASCII)


def check_name(name: str) -> str:
    """Refuse names that could lead out of the fabric, and hidden names."""
    if not _REGION_NAME.fullmatch(name):
        raise BadName(f"region name {name!r} is not allowed", "use a-z, 0-9, '.', '_', '-', with '/' between folders")
    return name


# --- the leader of an epoch -------------------------------------------------------------------------------------------
def epoch_folder(epoch: int) -> str:
    """Folder of the regions that the leader of an epoch writes."""
    return f"{_EPOCH}{epoch}"


def epoch_of(folder: str) -> int | None:
    """The epoch that this folder belongs to; None for any other folder."""
    number = folder.removeprefix(_EPOCH)
    return int(number) if number.isdigit() and folder != number else None


def frontiers_region(epoch: int) -> str:
    """Name of the leader's frontiers."""
    return f"{_EPOCH}{epoch}/frontiers"


def order_region(epoch: int, lane: int) -> str:
    """Name of a lane's order ring."""
    return f"{_EPOCH}{epoch}{_ORDER}{lane}"


def checkpoint_region(epoch: int, lane: int) -> str:
    """Name of a lane's session checkpoints."""
    return f"{_EPOCH}{epoch}/checkpoint-{lane}"


def held_region(epoch: int) -> str:
    """Name of the reorder buffer: entries that wait for a gap to close."""
    return f"{_EPOCH}{epoch}/held"


def results_region(epoch: int, member: Member) -> str:
    """Name of the ring with a broker's outcomes."""
    return f"{_EPOCH}{epoch}/results-{member.broker}.{member.incarnation}"


def ranges_region(epoch: int) -> str:
    """Name of the range lines: (lane, 0) -> range word. The second value is an index that replicas must reach."""
    return f"{_EPOCH}{epoch}/ranges"


# --- broker incarnations: `folder` is `Member.region_prefix` ----------------------------------------------------------
def pending_region(folder: str) -> str:
    """Name of a broker's pending ring. It is made last and removed first: while it exists, the others exist."""
    return f"{folder}/pending"


def log_region(folder: str) -> str:
    """Name of a broker's payload log."""
    return f"{folder}/log"


def broker_frontiers_region(folder: str) -> str:
    """Name of a broker's frontiers."""
    return f"{folder}/frontiers"


def is_broker_lane(name: str, folder: str) -> bool:
    """Whether a region is the order ring of a lane of this broker."""
    return name.startswith(f"{folder}{_ORDER}")


# --- replica incarnations ---------------------------------------------------------------------------------------------
def durable_region(ref: ReplicaRef) -> str:
    """Name of a replica's durable lines: (lane, range number) -> durable through."""
    return f"{ref.region_prefix}/durable"


def is_replica(name: str) -> bool:
    """Whether a replica writes this region."""
    return name.startswith(_REPLICA)


def is_incarnation(folder: str) -> bool:
    """Whether this is the folder of a broker or a replica."""
    return folder.startswith((_BROKER, _REPLICA))


# --- superblocks ------------------------------------------------------------------------------------------------------
def write_superblock(data: Bytes, shape: Shape, generation: int) -> None:
    """Fill the first 128 bytes of a new region."""
    block = np.zeros(1, dtype=SUPERBLOCK)
    block["magic"], block["version"], block["kind"] = MAGIC, LAYOUT_VERSION, int(shape.kind)
    block["generation"], block["size"] = generation, shape.size
    block["slots"], block["slot_bytes"] = shape.slots, shape.slot_bytes
    block["owner"], block["incarnation"] = shape.owner, shape.incarnation
    block["check"] = superblock_check(block)
    data[: SUPERBLOCK.itemsize] = np.frombuffer(block.tobytes(), dtype=np.uint8)


def require_shape(region: Region, holds: bool) -> None:
    """Raise BadRegion unless `holds`: the reader's condition on the size and slots in a superblock."""
    if not holds:
        shape = region.shape
        found = f"{shape.kind.name}, {shape.slots} slots of {shape.slot_bytes} bytes, {shape.size} bytes"
        raise BadRegion(
            f"region {region.name}: its superblock contradicts itself ({found})",
            "it was damaged, or made by another program; stop the cluster and remove the fabric folder",
        )


def read_superblock(name: str, data: Bytes, generation: int) -> Shape:
    """Check a region's first 128 bytes. Raises BadRegion with a hint if they are wrong."""
    hint = "stop the cluster and remove the fabric folder; `embarcadero up` makes a new one"
    if len(data) < SUPERBLOCK.itemsize:
        raise BadRegion(f"region {name}: {len(data)} bytes are too few for a superblock", hint)
    block = np.frombuffer(data[: SUPERBLOCK.itemsize].tobytes(), dtype=SUPERBLOCK)
    if int(block["magic"][0]) != MAGIC:
        raise BadRegion(f"region {name}: it is not an Embarcadero region (wrong magic)", hint)
    if int(block["version"][0]) != LAYOUT_VERSION:
        raise BadRegion(
            f"region {name}: it has layout version {int(block['version'][0])}, this program has {LAYOUT_VERSION}",
            "run the version that made it, or remove the fabric folder",
        )
    if int(block["check"][0]) != superblock_check(block):
        raise BadRegion(f"region {name}: its superblock is damaged", hint)
    if int(block["generation"][0]) != generation:
        raise BadRegion(
            f"region {name}: it belongs to another cluster (generation {int(block['generation'][0]):x})", hint
        )
    if int(block["size"][0]) != len(data):
        raise BadRegion(
            f"region {name}: its superblock declares {int(block['size'][0])} bytes, the file has {len(data)}", hint
        )
    if (kind := int(block["kind"][0])) not in _KINDS:
        raise BadRegion(f"region {name}: its superblock has the unknown kind {kind}", hint)
    return Shape(
        kind=RegionKind(kind),
        size=len(data),
        slots=int(block["slots"][0]),
        slot_bytes=int(block["slot_bytes"][0]),
        owner=int(block["owner"][0]),
        incarnation=int(block["incarnation"][0]),
    )
