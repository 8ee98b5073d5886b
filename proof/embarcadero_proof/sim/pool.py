"""Worker processes for runs. No worker outlives the process that started it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from embarcadero.node.process import die_with


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes (0: one per core), each with a fresh interpreter."""
    return ProcessPoolExecutor(
        jobs or os.cpu_count(), mp_context=get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )


def _begin(parent: int) -> None:
    """Ignore Ctrl-C: workers finish their current run, and end when the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
