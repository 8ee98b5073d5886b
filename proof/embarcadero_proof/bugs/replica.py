"""Bugs injected into `embarcadero/replica/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import DEATHS, LATE, POWER, ROT, SEALS, TRIMS, Bug

BUGS: Final = (
    Bug("durable-before-sync", "a replica's durable line moves before the sync", "P6", bias=POWER,
              witnesses=(0,)),
    Bug("cut-left-out", "a replica keeps what it has above the end of a sealed range", "P7", bias=SEALS,
              witnesses=(90,)),
    Bug("copy-counted-early", "a range names its new copy before that copy is whole", "P1", bias=DEATHS,
              witnesses=(0,)),
    Bug("checkpoint-above-end", "a session checkpoint on disk speaks of more than is durable", "P1", bias=LATE,
              witnesses=(1,)),
    Bug("trim-too-far", "a replica drops segments above the trim", "P1", bias=TRIMS, witnesses=(0,)),
    Bug("damage-left", "a replica does not repair what is damaged", "P7", bias=ROT, witnesses=(0,)),
    Bug("copies-left", "a replica keeps copies of ranges that are not its own any more", "P9", bias=TRIMS,
              witnesses=(10, 1)),
    Bug("deleted-memory-left", "a replica keeps the checkpoint regions of a deleted topic open", "P9",
              witnesses=(150_004, 150_000)),
    Bug("deleted-checkpoints-left", "a replica keeps the session checkpoints of a deleted topic", "P9",
              witnesses=(150_001, 150_002)),
)  # fmt: skip
