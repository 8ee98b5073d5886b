"""Configuration of the parts that are configured so far: sizes of the fabric's regions."""

from __future__ import annotations

from dataclasses import dataclass

from embarcadero import limits
from embarcadero.errors import BadValue


def _power_of_two(name: str, value: int) -> str | None:
    return None if value > 0 and value & (value - 1) == 0 else f"{name} must be a power of two, not {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSizes:
    """How large the regions are. All problems are reported at once."""

    pending_slots: int = limits.PENDING_SLOTS
    order_slots: int = limits.ORDER_SLOTS
    held_slots: int = limits.HELD_TOTAL_MAX
    log_bytes: int = limits.LOG_BYTES
    chunk_bytes: int = limits.CHUNK_BYTES
    sessions: int = limits.SESSIONS_PER_TOPIC_MAX
    round_entries: int = limits.ROUND_ENTRIES_MAX
    dead_log_bytes: int = limits.DEAD_LOG_BYTES_MAX  # logs of dead brokers are kept for readers up to this

    def __post_init__(self) -> None:
        problems = [
            _power_of_two("pending_slots", self.pending_slots),
            _power_of_two("order_slots", self.order_slots),
            _power_of_two("chunk_bytes", self.chunk_bytes),
            _power_of_two("log_bytes", self.log_bytes),
            None if 2 <= self.log_bytes // max(1, self.chunk_bytes) <= limits.CHUNKS_MAX else
            f"log_bytes must make 2 to {limits.CHUNKS_MAX} chunks",
            None if 0 < self.sessions <= limits.SESSIONS_PER_TOPIC_MAX else
            f"sessions must be 1 to {limits.SESSIONS_PER_TOPIC_MAX}",
            None if 4 * self.round_entries <= self.order_slots else "order_slots must be at least 4 * round_entries",
        ]  # fmt: skip
        if found := [p for p in problems if p]:
            raise BadValue("; ".join(found), "change the sizes in the configuration")

    @property
    def results_slots(self) -> int:
        """Room for an answer to everything a broker can have unanswered."""
        need = 2 * self.pending_slots + self.held_slots
        return 1 << (need - 1).bit_length()
