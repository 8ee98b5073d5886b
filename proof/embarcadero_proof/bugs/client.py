"""Bugs injected into `embarcadero/client/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import LATE, LOSS, Bug

BUGS: Final = (
    Bug("loss-not-told", "a publisher is not told which of its acked batches are lost", "P1", bias=LOSS,
              witnesses=(17,)),
    Bug("end-unconfirmed", "a publisher ends without asking whether the memory lives that acked its batches",
              "P1", bias=LATE, witnesses=(110_021, 110_000)),
    Bug("claimed-number-moved", "after a loss, a batch takes the number of another that its caller knows", "P2",
              bias=LATE, witnesses=(110_000, 110_030)),
    Bug("lost-gap-untold", "a subscriber passes over what is lost without telling its reader", "P1", bias=LOSS,
              witnesses=(1,)),
    Bug("unknown-told-as-failed", "a publisher that ends calls failed what it can't know", "P2", witnesses=(8,)),
)  # fmt: skip
