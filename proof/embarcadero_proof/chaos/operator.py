"""An operator that looks after a cluster from a process of its own.

To ask how a cluster is takes an interpreter 20 ms, and the publishers of a run are threads of the run's process: asked
there, it would be taken for a pause of their acks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import is_whole
from embarcadero.node.standby import hand_over

Result = TypeVar("Result")


class Operator:
    """One process; calls wait for their answer, and other threads go on meanwhile."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _leave_interrupts)

    def is_whole(self) -> bool:
        """Whether all runs, and nothing is degraded."""
        return self._do(is_whole)

    def hand_over(self) -> None:
        """Have any sequencer that stands by take over."""
        self._do(hand_over)

    def close(self) -> None:
        """End the process."""
        self._process.shutdown(cancel_futures=True)

    def _do(self, what: Callable[[ClusterFolder], Result]) -> Result:
        return self._process.submit(what, self._folder).result()


def _leave_interrupts() -> None:
    """Ctrl-C is for the parent, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
