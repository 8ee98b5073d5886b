"""What a fetch found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.fabric.layout import Entries
from embarcadero.types import BATCH_KIND, EntryKind, Gap
from embarcadero.wire.messages import Fetch

_SKIP_KIND: Final = int(EntryKind.SKIP)  # a plain number, see BATCH_KIND


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

    def over(self, ask: Fetch) -> bool:
        """Whether the reader has all that it will ever ask for."""
        return ask.stop is not None and self.elsewhere is None and self.next_index >= ask.stop

    @property
    def empty(self) -> bool:
        """Nothing to tell the reader yet."""
        return not self.payloads and self.gap is None


def wanted_entries(entries: Entries, ask: Fetch) -> npt.NDArray[np.bool_]:
    """Which entries a reader gets: batches (of its partitions) and skips; those of sessions if it asks for them."""
    if ask.partitions is None and ask.control:
        return np.ones(len(entries), dtype=bool)
    kinds = entries["kind"]
    wanted: npt.NDArray[np.bool_] = kinds == BATCH_KIND
    if ask.partitions is not None:
        wanted &= np.isin(entries["partition"], np.array(ask.partitions, dtype=np.uint16))
    wanted |= (kinds != BATCH_KIND) if ask.control else (kinds == _SKIP_KIND)
    return wanted
