"""Worker processes for runs: as many as asked for, none of which outlives the one that asked."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from embarcadero.node.process import die_with


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """A pool of `jobs` processes (0: one per core), of a fresh interpreter each."""
    return ProcessPoolExecutor(
        jobs or os.cpu_count(), mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )


def _begin(parent: int) -> None:
    """Ctrl-C is for the process that asked: workers finish the run they are at. Without that process they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
