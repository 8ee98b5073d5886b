"""What a fetch found."""

from __future__ import annotations

from dataclasses import dataclass

from embarcadero.fabric.layout import Entries
from embarcadero.types import Gap
from embarcadero.wire.messages import Fetch


@dataclass(slots=True)
class Found:
    """What a fetch found: entries with their payloads, and where to go on."""

    entries: Entries
    payloads: list[bytes | memoryview]
    next_index: int
    tail_index: int
    gap: Gap | None = None
    to_come: bool = False  # nothing was appended since the time that was asked for
    elsewhere: Fetch | None = None  # memory does not have it: what segment files are to be asked

    @property
    def empty(self) -> bool:
        """Nothing to tell the reader yet."""
        return not self.payloads and self.gap is None
