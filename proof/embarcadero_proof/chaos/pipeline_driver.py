"""A Spark driver in its own process, so that it can be killed: it runs the shop's streaming query.

It prints its progress: a line with the seq that it has read. When its input is closed, it processes all available
records and ends.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from embarcadero.demo.pipeline import seq_of, start_query
from embarcadero.spark import session

_REPORT_S = 0.2


def main(master: str, addresses: str, checkpoint: str) -> int:
    """Run the query until the input ends."""
    spark = session("shop", master, {"spark.sql.shuffle.partitions": "2", "spark.executor.memory": "512m"})
    query = start_query(spark, addresses.split(","), Path(checkpoint))
    closed = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=listen, daemon=True).start()
    reported = -2
    while query.isActive and not closed.is_set():
        if (seq := seq_of(query)) != reported:
            reported = seq
            print(seq, flush=True)  # noqa: T201 - its protocol with the parent
        time.sleep(_REPORT_S)
    if not query.isActive:
        print(f"the query ended: {query.exception()}", file=sys.stderr)  # noqa: T201
        return 1
    query.processAllAvailable()
    query.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
