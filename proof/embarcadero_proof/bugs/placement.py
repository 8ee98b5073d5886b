"""Bugs injected into `embarcadero/placement/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import Bug

BUGS: Final = (
    Bug("topic-id-unchecked", "a request for a deleted topic changes the next one of its name", "P5",
              witnesses=(150_000,)),
    Bug("late-alter-done", "a late request for a deleted topic alters the next one of its name", "P5",
              witnesses=(160_000,)),
    Bug("late-trim-done", "a late request for a deleted topic trims the next one of its name", "P5",
              witnesses=(160_000,)),
)  # fmt: skip
