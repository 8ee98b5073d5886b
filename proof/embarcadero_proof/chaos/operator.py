"""An operator that watches a cluster from its own process.

To ask for a cluster's status keeps the interpreter busy for 20 ms. The publishers of a run are threads of the run's
process: a question there would count as a pause of their acks.
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
    """One process; calls wait for their answer, and other threads continue meanwhile."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _leave_interrupts)

    def is_whole(self) -> bool:
        """Whether all processes run, and nothing is degraded."""
        return self._do(is_whole)

    def hand_over(self) -> None:
        """Have a standby take over."""
        self._do(hand_over)

    def close(self) -> None:
        """End the process."""
        self._process.shutdown(cancel_futures=True)

    def _do(self, action: Callable[[ClusterFolder], Result]) -> Result:
        return self._process.submit(action, self._folder).result()


def _leave_interrupts() -> None:
    """Ignore Ctrl-C: the parent handles it, and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
