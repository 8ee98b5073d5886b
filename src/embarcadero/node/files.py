"""Open files: as many as the system lets us have, and so many connections that some files are always spare."""

from __future__ import annotations

import resource

import msgspec

from embarcadero.config import Config
from embarcadero.limits import FILES_PER_REPLICA, FILES_SPARE


def within_open_files(config: Config, brokers: int, replicas: int) -> Config:
    """The configuration of a process with so many roles, with no more connections than its open files allow."""
    most = connections_for(brokers, config.broker.max_connections, replicas)
    return msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, max_connections=most))


def connections_for(brokers: int, most: int, replicas: int) -> int:
    """How many connections each of a process's brokers may have: `most`, or what the limit of open files leaves.

    Raises the limit as far as allowed, for what replicas may need too. A part stays for regions, the store and new
    connections that are to be refused.
    """
    wanted = brokers * most + replicas * FILES_PER_REPLICA + FILES_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = wanted if soft == resource.RLIM_INFINITY else soft
    return max(1, min(most, (files - min(FILES_SPARE, files // 2)) // max(1, brokers)))
