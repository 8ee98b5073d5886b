"""Bugs injected into `embarcadero/replica/`."""

from __future__ import annotations

from typing import Final

from embarcadero.types import NO_INDEX
from embarcadero_proof.bugs.bug import DEATHS, LATE, POWER, ROT, SEALS, TRIMS, Bug
from embarcadero_proof.bugs.patch import Edit

_ADOPT: Final = "                self._ranges.adopted[tags_of(range_)] = old\n"
_COUNT: Final = "                self._directory.ranges.replace_in_sealed(*tags_of(range_), old, self._me.ref)\n"
_SOURCES: Final = "embarcadero.sequencer.ranges.recovery_sources:"

BUGS: Final = (
    Bug("durable-before-sync", "a replica's durable line moves before the sync", "P6", bias=POWER,
        witnesses=(0,),
        edits=(Edit("embarcadero.replica.copies:Commits.append", "        self._steps.at(Step.REPLICA_APPENDED)\n",
                    "        self.lines.set(copy.tags, copy.log.end)\n"
                    "        self._steps.at(Step.REPLICA_APPENDED)\n"),)),
    Bug("cut-left-out", "a replica keeps records above the end of a sealed range", "P7", bias=SEALS,
        witnesses=(90,),
        edits=(Edit("embarcadero.replica.ranges:RangeCopies.settle", "if copy.log.end > end:", "if False:"),)),
    Bug("copy-counted-early", "a range names its new copy before that copy is whole", "P1", bias=DEATHS,
        witnesses=(0,),
        edits=(Edit("embarcadero.replica.ranges:Moving._take_over", _ADOPT, _ADOPT + _COUNT),)),
    Bug("forgotten-range-counts", "a replica with a new disk publishes the end of its copy of an open range",
        test="tests/replica/test_ranges.py",
        edits=(Edit("embarcadero.replica.ranges:RangeCopies._is_mine",
                    "return tags_of(range_) in self.refilled", "return True"),)),
    Bug("checkpoint-above-end", "a session checkpoint on disk covers records that are not durable", "P1", bias=LATE,
        witnesses=(1,),
        edits=(Edit("embarcadero.replica.retention:SessionCheckpoints.look", "copy.log.synced", "NO_INDEX"),
               Edit(f"{_SOURCES}DiskSource.checkpoint", "at_most, topic", f"{NO_INDEX}, topic"),
               Edit(f"{_SOURCES}_checkpoint", "_last_kept(ranges, index, end)", "index"))),
    Bug("trim-too-far", "a replica drops segments above the trim", "P1", bias=TRIMS, witnesses=(0,),
        edits=(Edit("embarcadero.replica.retention:LaneRetention._drop", "drop_below(below)",
                    "drop_below(copy.log.synced)"),)),
    Bug("damage-left", "a replica does not repair damage", "P7", bias=ROT, witnesses=(0,),
        edits=(Edit("embarcadero.replica.repair:Repair.step", "copy.in_place,", "None,"),)),
    Bug("copies-left", "a replica keeps copies of ranges that were moved away from it", "P9", bias=TRIMS,
        witnesses=(10, 1),
        edits=(Edit("embarcadero.replica.ranges:RangeCopies._remove_one", "if not self._surplus or", "if True or"),)),
    Bug("deleted-memory-left", "a replica keeps the checkpoint regions of a deleted topic open", "P9",
        witnesses=(150_004, 150_000),
        edits=(Edit("embarcadero.replica.retention:SessionCheckpoints.keep", "        self._known =",
                    "        return\n        self._known ="),)),
    Bug("deleted-checkpoints-left", "a replica keeps the session checkpoints of a deleted topic", "P9",
        witnesses=(150_004,),
        edits=(Edit("embarcadero.replica.ranges:RangeCopies._remove_folder", "if not any(", "if False and not any("),)),
)  # fmt: skip
