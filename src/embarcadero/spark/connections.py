"""One client per process and cluster: a Python worker does many tasks, and connecting takes longer than asking."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from embarcadero.client.api.sync_log import Log, connect
from embarcadero.errors import Unreachable
from embarcadero.limits import SPARK_RECONNECT_S

_RETRY_S: Final = 0.2
_KNOWN: Final[dict[tuple[int, str], Log]] = {}


def shared_log(brokers: str, table_properties: Sequence[str] | None = None, *, at_once: bool = False) -> Log:
    """The client of this process for these brokers. It lives as long as the process; workers are ended by Spark.

    `table_properties` are the driver's: a worker may run where there is no configuration. A cluster that is down may
    come back, and a query should outlive that: calls wait for it, unless the caller needs an answer `at_once`.
    """
    key = os.getpid(), brokers  # a worker that was forked has its parent's clients, whose threads it has not
    known = _KNOWN.get(key)
    if known is None or known.ended:
        known = _KNOWN[key] = connect(brokers) if at_once else _patiently(brokers)
    if table_properties is not None:
        known.use_table_properties(table_properties)
    return known


def _patiently(brokers: str) -> Log:
    give_up = time.monotonic() + SPARK_RECONNECT_S
    while True:
        try:
            return connect(brokers)
        except Unreachable:
            if time.monotonic() > give_up:
                raise
            time.sleep(_RETRY_S)
