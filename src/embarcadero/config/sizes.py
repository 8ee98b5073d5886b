"""Section `fabric`: how large the regions of shared memory are, and where their metadata is mirrored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from embarcadero import limits
from embarcadero.config.key import count, path, size
from embarcadero.errors import BadValue
from embarcadero.limits import GIB, KIB, MIB


class Relation(NamedTuple):
    """What must hold between keys of one section or of several; `given` has one value for each key."""

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSizes:
    """How large the regions of shared memory are, and their mirror: for one run of a cluster (`down`, then `up`)."""

    log_bytes: Annotated[int, size(
        "Payloads that each broker keeps in memory; readers find what is older gone.",
        64 * KIB, 64 * GIB, power_of_two=True, stands_for=("cxl.size_gb",),
    )] = limits.LOG_BYTES  # fmt: skip
    chunk_bytes: Annotated[int, size(
        "A broker's log is freed chunk by chunk; a batch fits one chunk.", 16 * KIB, 256 * MIB, power_of_two=True,
        default_text="16 MiB, or a quarter of log_bytes if that is less", stands_for=("storage.segment_size",),
    )] = limits.CHUNK_BYTES  # fmt: skip
    pending_slots: Annotated[int, count(
        "Batches of a broker that wait for the sequencer.", 16, 1 << 20, power_of_two=True,
        stands_for=("storage.batch_headers_size",),
    )] = limits.PENDING_SLOTS  # fmt: skip
    order_slots: Annotated[int, count(
        "Entries of a topic's order index that are kept in memory.", 64, 1 << 24, power_of_two=True,
    )] = limits.ORDER_SLOTS  # fmt: skip
    held_slots: Annotated[int, count(
        "Batches of all sessions that may wait for a gap to close; beyond, the oldest gap's session is fenced.",
        16, 1 << 22, stands_for=("ordering.hold_buffer_size",),
    )] = limits.HELD_TOTAL_MAX  # fmt: skip
    sessions: Annotated[int, count(
        "Sessions that a topic can have open at once.", 1, limits.SESSIONS_PER_TOPIC_MAX,
        stands_for=("ordering.max_clients",),
    )] = limits.SESSIONS_PER_TOPIC_MAX  # fmt: skip
    round_entries: Annotated[int, count(
        "Entries that the sequencer takes from all brokers in one round.", 1, 1 << 20,
    )] = limits.ROUND_ENTRIES_MAX  # fmt: skip
    dead_log_bytes: Annotated[int, size(
        "Logs of brokers that died are kept for readers up to this.", 0, 64 * GIB,
    )] = limits.DEAD_LOG_BYTES_MAX  # fmt: skip
    mirror: Annotated[str, path(
        "Folder for a second fabric, on another memory module: all but payloads is written there first, so that losing "
        "the fabric loses no ordered entry.",
        default_text="none", stands_for=("cxl.secondary_device",),
    )] = ""  # fmt: skip

    def __post_init__(self) -> None:
        problems = [*map(self._power_of_two, ("pending_slots", "order_slots", "chunk_bytes", "log_bytes"))]
        problems += [broken.says for broken in FABRIC_RELATIONS if not broken.holds(*self._values(broken.keys))]
        if not 0 < self.sessions <= limits.SESSIONS_PER_TOPIC_MAX:
            problems.append(f"sessions must be 1 to {limits.SESSIONS_PER_TOPIC_MAX}")
        if found := [problem for problem in problems if problem]:
            raise BadValue("; ".join(found), "change the sizes in the configuration")

    def _values(self, keys: tuple[str, ...]) -> list[Any]:
        return [getattr(self, key.partition(".")[2]) for key in keys]

    def _power_of_two(self, name: str) -> str:
        value = getattr(self, name)
        return "" if value > 0 and value & (value - 1) == 0 else f"{name} must be a power of two, not {value}"

    @property
    def results_slots(self) -> int:
        """Room for an answer to everything a broker can have unanswered."""
        need = 2 * self.pending_slots + self.held_slots
        return 1 << (need - 1).bit_length()


FABRIC_RELATIONS: Final = (
    Relation(
        ("fabric.log_bytes", "fabric.chunk_bytes"),
        lambda log_bytes, chunk_bytes: 2 <= log_bytes // max(1, chunk_bytes) <= limits.CHUNKS_MAX,
        f"log_bytes must make 2 to {limits.CHUNKS_MAX} chunks",
    ),
    Relation(
        ("fabric.order_slots", "fabric.round_entries"),
        lambda order_slots, round_entries: 4 * round_entries <= order_slots,
        "order_slots must be at least 4 * round_entries",
    ),
)


def usual_chunk_bytes(log_bytes: int) -> int:
    """Chunks small enough that some of a log can be free while others fill."""
    return min(limits.CHUNK_BYTES, max(1, log_bytes // 4))
