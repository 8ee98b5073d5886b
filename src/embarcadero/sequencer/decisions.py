"""What a lane decided in a round: order entries to append, and outcomes of pending entries.

Entries are built by whole columns. Bytes 28 to 55 of a pending entry (session to flags) are bytes 32 to 59 of its order
entry, so they move as one block.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.fabric.layout import OPEN_STRONG, OPEN_TAKEN, ORDER, PENDING, RESULT, Entries
from embarcadero.invariants import invariant
from embarcadero.types import NO_HANDLE, NO_INDEX, NO_SESSION, EntryKind, Outcome

U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]

_SHARED: Final = ("session", "location", "size", "count", "crc", "origin", "partition", "schema", "kind", "flags")


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    fields = dtype.fields
    return fields[name][1] if fields else -1


for _name in _SHARED:
    invariant(_offset(ORDER, _name) == _offset(PENDING, _name) + 4, "pending and order entries share a block of fields")
invariant(_offset(RESULT, "outcome") == _offset(RESULT, "session") + 4, "session and outcome share a word")

_FROM: Final = slice(_offset(PENDING, "session") // 4, _offset(PENDING, "flags") // 4 + 1)
_TO: Final = slice(_offset(ORDER, "session") // 4, _offset(ORDER, "flags") // 4 + 1)


def words(entries: Entries) -> U64:
    """Entries as rows of eight words."""
    return entries.view(np.uint64).reshape(-1, 8)


def order_entries(pending: Entries, index: U64, seq: U64, append_us: int) -> Entries:
    """Order entries of ordered batches."""
    made = np.empty(len(pending), dtype=ORDER)
    out, source = words(made), words(pending)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = index, seq, source[:, 1], append_us
    made.view(np.uint32).reshape(-1, 16)[:, _TO] = pending.view(np.uint32).reshape(-1, 16)[:, _FROM]
    return made


def control_entry(kind: EntryKind, session: int, session_seq: int, **fields: int) -> Entries:
    """One order entry without a payload; index, seq and time come when it is appended."""
    made = np.zeros(1, dtype=ORDER)
    made["kind"], made["session"], made["session_seq"], made["origin"] = kind, session, session_seq, NO_HANDLE
    for name, value in fields.items():
        made[name] = value
    return made


class OpenedFacts(NamedTuple):
    """What an ordered SESSION_OPEN says beside its session and next sequence."""

    name: int  # its hash; 0: none
    continued: int | None  # the session that it continues
    taken: bool  # another holder took the name
    strong: bool  # the session is strong although the topic's default is weak


def open_entry(session: int, expected: int, facts: OpenedFacts) -> Entries:
    """Make the order entry of a session's start. It says all that a replay needs: see `opened_facts`."""
    name, earlier = facts.name, NO_SESSION if facts.continued is None else facts.continued
    return control_entry(
        EntryKind.SESSION_OPEN, session, expected, location=name & 0xFFFF_FFFF, crc=name >> 32,
        partition=earlier & 0xFFFF, schema=earlier >> 16, flags=facts.taken * OPEN_TAKEN | facts.strong * OPEN_STRONG,
    )  # fmt: skip


def opened_facts(entry: np.void) -> OpenedFacts:
    """Read back what `open_entry` wrote."""
    earlier = int(entry["schema"]) << 16 | int(entry["partition"])
    name, flags = int(entry["crc"]) << 32 | int(entry["location"]), int(entry["flags"])
    continued = None if earlier == NO_SESSION else earlier
    return OpenedFacts(name, continued, bool(flags & OPEN_TAKEN), bool(flags & OPEN_STRONG))


def results(pending: Entries, outcome: U8, index: U64, seq: U64, extra: U64) -> Entries:
    """Results of these pending entries; positions come when they are written."""
    made = np.empty(len(pending), dtype=RESULT)
    out, source = words(made), words(pending)
    out[:, 1], out[:, 2], out[:, 3], out[:, 4], out[:, 5] = source[:, 0], index, seq, source[:, 1], extra
    out[:, 6] = (source[:, 3] >> np.uint64(32)) | (outcome.astype(np.uint64) << np.uint64(32))
    out[:, 7] = 0
    return made


class Decisions:
    """Collects what is to be written. The lane takes the order entries, the sequencer the answers."""

    def __init__(self) -> None:
        self.order: list[Entries] = []
        self.answers: list[tuple[npt.NDArray[np.uint16], Entries]] = []  # region handles, results

    def answer(self, pending: Entries, outcome: U8, index: U64, seq: U64, extra: U64) -> None:
        """Outcomes of many entries."""
        if len(pending):
            self.answers.append((pending["origin"], results(pending, outcome, index, seq, extra)))

    def answer_all(self, pending: Entries, outcome: Outcome, extra: int = 0) -> None:
        """One refusal for many entries."""
        count = len(pending)
        nowhere = np.full(count, NO_INDEX, dtype=np.uint64)
        self.answer(
            pending, np.full(count, outcome, dtype=np.uint8), nowhere, nowhere, np.full(count, extra, dtype=np.uint64)
        )

    def answer_one(self, pending: Entries, outcome: Outcome, **fields: Any) -> None:
        """The outcome of one control entry."""
        self.answer_all(pending, outcome)
        made = self.answers[-1][1]
        for name, value in fields.items():
            made[name] = value

    def take_order(self) -> list[Entries]:
        """The order entries collected since the last call."""
        taken, self.order = self.order, []
        return taken

    def take_answers(self) -> list[tuple[npt.NDArray[np.uint16], Entries]]:
        """The answers collected since the last call."""
        taken, self.answers = self.answers, []
        return taken
