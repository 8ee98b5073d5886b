"""Bugs injected into `embarcadero/fabric/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import MIRROR, SEALS, Bug
from embarcadero_proof.bugs.patch import Edit

_LOAD: Final = "embarcadero.fabric.leader:DurableLines.load"
_TABLES: Final = "        return [None if table is None else table.load(key) for table in tables]\n"
_AND_EARLIER: Final = """\
        lines = [None if table is None else table.load(key) for table in tables]
        for at, ref in enumerate(range_.replicas):
            for incarnation in {incarnations}:
                earlier = self.of(type(ref)(replica=ref.replica, incarnation=incarnation, disk=ref.disk))
                others = [earlier.load((range_.lane, n)) for n in range(1, range_.number)] if earlier else []
                lines[at] = max((one for one in (lines[at], *others) if one is not None), default=None)
        return lines
"""

BUGS: Final = (
    Bug("old-incarnation-counts", "a durable line of an earlier incarnation counts", "P6", bias=SEALS,
        witnesses=(12,), edits=(Edit(_LOAD, _TABLES, _AND_EARLIER.format(incarnations="range(1, ref.incarnation)")),)),
    Bug("old-range-counts", "a durable line of an earlier range counts", "P6", bias=SEALS, witnesses=(0,),
        edits=(Edit(_LOAD, _TABLES, _AND_EARLIER.format(incarnations="[ref.incarnation]")),)),
    Bug("mirror-after-primary", "the fabric's mirror is written some time after the fabric", "P1", bias=MIRROR,
        witnesses=(4,), edits=(  # the cache writes it back, some time or never
            Edit("embarcadero.fabric.shared:MirroredRegion.flush",
                 "        self._flush_mirror(offset, length)\n", ""),)),
    Bug("epoch-not-fenced", "a takeover reads without a fence after it opened its epoch line",
        scope="ack, one host",
        edits=(Edit("embarcadero.fabric.leader:EpochTable.open", "        self._fabric.fence()\n", ""),)),
    Bug("range-not-rechecked", "the count of durable copies does not check the range word again",
        scope="seal, one host",
        edits=(Edit("embarcadero.fabric.leader:Durability._count",
                    "if self._word(lane) != word or", "if"),)),
)  # fmt: skip
