"""The sequencer that reigns is killed, and another takes over: who it is, and how long acks paused meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from embarcadero.demo.cluster import MortalCluster
from embarcadero.errors import ClusterError, EmbarcaderoError
from embarcadero.node.roles import candidate_role

_PATIENCE_S: Final = 20.0
_LOOK_S: Final = 0.01
_ACKS_AFTER: Final = 8
"""So many acks in the new epoch, and the pause is over."""

Moments = Callable[[], Sequence[float]]


class Takeover(NamedTuple):
    """A kill of the sequencer: its process, who took over in which epoch, the longest time without an ack."""

    killed: int
    role: str
    epoch: int
    pause_s: float

    def __str__(self) -> str:
        ms = self.pause_s * 1_000
        return f"{self.role} took over in epoch {self.epoch}; acks paused for {ms:,.0f} ms"


def kill_sequencer(cluster: MortalCluster) -> tuple[int, int]:
    """SIGKILL the process of the sequencer that reigns; its process id, and the epoch that this ends."""
    reigning = cluster.report().sequencer
    if not reigning.pid:
        raise ClusterError("no sequencer reigns at the moment", "see its log")
    os.kill(reigning.pid, signal.SIGKILL)
    return reigning.pid, reigning.epoch


def watch_takeover(cluster: MortalCluster, killed: int, ended: int, since: float, acks: Moments) -> Takeover:
    """Wait until another one reigns and acks flow; `acks` tells the moments of all acks so far, on the same clock."""
    role, epoch, seen = "", ended, since
    while time.monotonic() < since + _PATIENCE_S:
        time.sleep(_LOOK_S)
        if epoch == ended:
            try:
                now = cluster.report().sequencer
            except EmbarcaderoError:
                continue  # what it reads is being written
            if now.epoch > ended:
                role, epoch, seen = candidate_role(now.candidate), now.epoch, time.monotonic()
        elif sum(moment > seen for moment in acks()) >= _ACKS_AFTER:
            return Takeover(killed, role, epoch, longest_pause(since, acks()))
    raise ClusterError(f"no other sequencer reigns {_PATIENCE_S:.0f} s after the kill", "see the logs of sequencers")


def longest_pause(since: float, moments: Sequence[float]) -> float:
    """The longest time without an ack that ends after a moment: the one before it counts from when it began."""
    ordered = sorted(moments)
    before = [moment for moment in ordered if moment <= since][-1:]
    after = [moment for moment in ordered if moment > since]
    return max((second - first for first, second in pairwise([*(before or [since]), *after])), default=0.0)
