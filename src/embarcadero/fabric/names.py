"""Names of regions. The folder of a name says which process writes the region, so `ls` shows the state of a cluster.

    epochs                            a line per epoch: opened, started
    epoch-<e>/frontiers               the leader of epoch e: its heartbeat, a line per lane, a line per broker
    epoch-<e>/order-<lane>            order entries of a lane
    epoch-<e>/checkpoint-<lane>       its session table, as of an index
    epoch-<e>/held                    entries that wait for a gap to close
    epoch-<e>/results-<b>.<inc>       outcomes of a broker's entries
    epoch-<e>/ranges                  the open range of each lane
    broker-<b>.<inc>/pending          a broker incarnation: entries that it published
    broker-<b>.<inc>/log              payloads
    broker-<b>.<inc>/frontiers        what it has read; its heartbeat; a line per chunk of the log
    broker-<b>.<inc>/order-<lane>     order entries of a lane of its own
    replica-<r>.<inc>/durable         a replica incarnation: how far its copies are synced

`Member.region_prefix` and `ReplicaRef.region_prefix` are the folders of brokers and replicas; the same words name their
doorbells. `TopicLane.region` is the ring of a broker's lane. These are in types.py.
"""

from __future__ import annotations

from typing import Final

from embarcadero.types import Member, ReplicaRef

EPOCHS_REGION: Final = "epochs"
_EPOCH: Final = "epoch-"
_BROKER: Final = "broker-"
_REPLICA: Final = "replica-"
_ORDER: Final = "/order-"


def writer_of(name: str) -> str:
    """Folder of a region: what names its writer."""
    return name.split("/", maxsplit=1)[0]


# --- the leader of an epoch -------------------------------------------------------------------------------------------
def epoch_folder(epoch: int) -> str:
    """Folder of the regions that the leader of an epoch writes."""
    return f"{_EPOCH}{epoch}"


def epoch_of(folder: str) -> int | None:
    """The epoch whose folder this is; None if it is the folder of something else."""
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
    """Name of the entries that wait for a gap to close."""
    return f"{_EPOCH}{epoch}/held"


def results_region(epoch: int, member: Member) -> str:
    """Name of the ring with a broker's outcomes."""
    return f"{_EPOCH}{epoch}/results-{member.broker}.{member.incarnation}"


def ranges_region(epoch: int) -> str:
    """Name of the range lines: (lane, 0) -> range word; second value: an index that replicas must reach."""
    return f"{_EPOCH}{epoch}/ranges"


# --- broker incarnations: `folder` is `Member.region_prefix` ----------------------------------------------------------
def pending_region(folder: str) -> str:
    """Name of a broker's pending ring. It is made last and removed first: while it is there, the others are."""
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
