"""Bugs injected into `embarcadero/client/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import LATE, LOSS, Bug
from embarcadero_proof.bugs.patch import Edit

_READER: Final = "embarcadero.client.subscriber:SubscriberCore"
_PUBLISHER: Final = "embarcadero.client.publisher:PublisherCore"
_LOSSES: Final = "embarcadero.client.session:Losses"
_MOVED: Final = """\
        self._window.renumber(expected, outside)
        if False:
"""
_UNREPORTED: Final = """\
        if gap.kind is not GapKind.LOST:
            self._put(Batch.of_gap(self.lane"""

BUGS: Final = (
    Bug("loss-not-reported", "a publisher does not report which of its acked batches are lost", "P1", bias=LOSS,
        witnesses=(17,), edits=(Edit(f"{_LOSSES}.report", "        if batches:\n", "        if False:\n"),)),
    Bug("end-unconfirmed", "a publisher ends without asking whether the cluster that acked its batches still runs",
        "P1", bias=LATE, witnesses=(110_021, 110_000),
        edits=(Edit(f"{_PUBLISHER}._end", "elif self._losses.in_doubt:", "elif False:"),)),
    Bug("claimed-number-moved", "after a loss, a batch takes the number of another batch that its caller knows", "P2",
        bias=LATE, witnesses=(110_000, 110_030),
        edits=(Edit(f"{_PUBLISHER}._check_numbers", "        if lost_some or hole:\n", _MOVED),)),
    Bug("lost-gap-unreported", "a subscriber skips lost records without a gap for its reader", "P1", bias=LOSS,
        witnesses=(1,), edits=(Edit(f"{_READER}._take_gap", "        self._put(Batch.of_gap(self.lane", _UNREPORTED),)),
    Bug("unknown-as-failed", "a publisher that ends reports unknown outcomes as failed", "P2", witnesses=(58,),
        edits=(Edit("embarcadero.client.batches:ended_with", "    kind = TimedOut if",
                    "    return Unreachable(cause.message)\n    kind = TimedOut if"),)),
)  # fmt: skip
