"""One client per process and cluster: a Python worker does many tasks, and connecting takes longer than asking."""

from __future__ import annotations

import os
from typing import Final

from embarcadero.client.sync import Log, connect

_KNOWN: Final[dict[tuple[int, str], Log]] = {}


def shared_log(brokers: str) -> Log:
    """The client of this process for these brokers. It lives as long as the process; workers are ended by Spark."""
    key = os.getpid(), brokers  # a worker that was forked has its parent's clients, whose threads it has not
    known = _KNOWN.get(key)
    if known is None or not known.thread.alive:
        known = _KNOWN[key] = connect(brokers)
    return known
