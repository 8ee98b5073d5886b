"""PySpark's daemon, which forks workers, without a traceback for each idle worker that the JVM releases.

The script `python` runs this file by its path: `-m` would import the package, which starts threads before the fork.
Over a Unix socket, a worker can't write its last bytes once the JVM has closed the socket. Idle workers always end so.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import SimpleNamespace


def print_exc() -> None:
    """Print the traceback of an error, unless the JVM has closed the socket."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        traceback.print_exc()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as with -m, and not the folder of this file
    from pyspark import daemon

    daemon.traceback = SimpleNamespace(print_exc=print_exc, format_exc=traceback.format_exc)  # type: ignore[attr-defined,assignment]
    daemon.manager()
