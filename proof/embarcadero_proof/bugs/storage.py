"""Bugs injected into `embarcadero/storage/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import ROT, Bug
from embarcadero_proof.bugs.patch import Edit

BUGS: Final = (
    Bug("damage-cut", "recovery cuts a log at damage in its middle", "P7", bias=ROT, witnesses=(3, 0),
        edits=(Edit("embarcadero.storage.scan:scan_segment", "if not damaged:", "if True:"),)),
)  # fmt: skip
