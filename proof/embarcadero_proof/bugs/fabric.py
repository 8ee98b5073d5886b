"""Bugs injected into `embarcadero/fabric/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import MIRROR, SEALS, Bug

BUGS: Final = (
    Bug("old-incarnation-counts", "a durable line of an earlier incarnation counts", "P6", bias=SEALS,
              witnesses=(12,)),
    Bug("old-range-counts", "a durable line of an earlier range counts", "P6", bias=SEALS, witnesses=(0,)),
    Bug("mirror-after-primary", "the fabric's mirror is written some time after the fabric", "P1", bias=MIRROR,
              witnesses=(4,)),
    Bug("epoch-not-fenced", "a takeover reads without a fence after it opened its epoch line",
              scope="ack, one host"),
    Bug("range-not-rechecked", "who counts as durable does not look at the range word again",
              scope="seal, one host"),
)  # fmt: skip
