"""One client per process and cluster: a Python worker does many tasks, and connecting takes longer than asking."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from embarcadero.client.sync import Log, connect

_KNOWN: Final[dict[tuple[int, str], Log]] = {}


def shared_log(brokers: str, table_properties: Sequence[str] | None = None) -> Log:
    """The client of this process for these brokers. It lives as long as the process; workers are ended by Spark.

    `table_properties` are the driver's: a worker may run where there is no configuration.
    """
    key = os.getpid(), brokers  # a worker that was forked has its parent's clients, whose threads it has not
    known = _KNOWN.get(key)
    if known is None or not known.thread.alive:
        known = _KNOWN[key] = connect(brokers)
    if table_properties is not None:
        known.brokers.table_properties = table_properties
    return known
