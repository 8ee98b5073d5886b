"""Measure Spark's streams beside Kafka's, with the newest PySpark that has a Kafka connector: `make peers`.

It needs Maven, Java, and two idle cores. The report has the median and the spread of the rounds of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

from tests.matrix.__main__ import REPORT as MATRIX_REPORT
from tests.matrix.__main__ import ROOT, environment, versions

PYSPARK: Final = "4.2"
REPORT: Final = MATRIX_REPORT.with_name("kafka.md")

BOUNDS: Final = """\
## What bounds it

Kafka's source is Java: records go from the socket into Spark's rows. A source in Python writes them as Arrow into a
socket, and the JVM reads them and makes rows of them. *Nothing* does that and no more. Figures of 2026-11-19 for 1 GB,
each change in a session of its own, other work held off by a lock:

| | seconds |
| --- | --- |
| Kafka | 2.28 |
| nothing, TCP between Python and the JVM | 1.42 |
| nothing, Unix sockets | 0.83 |
| Embarcadero, TCP | 2.14 |
| Embarcadero, Unix sockets | 1.77 |
| Embarcadero, Unix sockets, imports left out of garbage collection | 1.41 |

- The line at 1 GB, 2.5 times as quick as Kafka, is what a source reaches that reads nothing at all, and the goal of 3.5
  is beyond every source in Python. 2.5 would be 0.91 s, which leaves 0.08 s for 1 GB from brokers, and both cores are
  busy all the time. Reading alone, without Spark, takes 0.31 s of CPU in the reader and 0.36 s in the broker; starting
  the process that plans the stream takes 0.3 s, of which Spark's own imports are 0.14 s.
- 300 MB: Kafka takes 1.4 s for 20 MB, so most of its 1.80 s is the start. Embarcadero takes 0.78 s, 0.45 s of them
  before the first task and after the last one; nothing takes 0.51 s.
- Larger tasks would save 10 to 20 ms each between two tasks; a task is 32 MiB at most by design. Arrow batches of 1,
  2 and 4 MiB, and `spark.buffer.size` of 64 KiB, 256 KiB and 1 MiB, make no difference.
"""


def row(megabytes: str, found: dict[str, list[float]]) -> str:
    """A line of the table."""
    ours, theirs, least = found["embarcadero"], found["kafka"], found["nothing"]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    most = [their / each for each, their in zip(least, theirs, strict=True)]
    cells = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (ours, theirs, ratios, least, most)]
    return f"| {megabytes} MB | {' | '.join(cells)} |"


def measured(python: str, megabytes: list[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by size and contestant. They come in a file: the JVM and Maven write to stdout, too."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "seconds.json"
        subprocess.run([python, "-m", "tests.peers.streams", str(results), *megabytes], cwd=ROOT, check=True)
        found: dict[str, dict[str, list[float]]] = json.loads(results.read_text())
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="make peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", nargs="+", default=["300", "1000"], help="sizes of topics")
    parser.add_argument("--no-report", action="store_true", help="print the table, and save nothing")
    options = parser.parse_args()
    version = next(each for each in versions() if each.name == PYSPARK)
    found = measured(str(environment(version)), options.megabytes)
    table = "\n".join(row(*each) for each in found.items())
    text = f"""# One trigger of AvailableNow, beside Kafka

`make peers` on {datetime.now(UTC):%Y-%m-%d}, PySpark {version.pyspark}, {os.cpu_count()} cores: a stream reads all of a
topic of 1,000-byte records from its beginning, in one session, in turns. Seconds from the start of the query to its
end: median, and the smallest and largest of the rounds. Kafka 4.1.0 with one node and Spark's own Kafka source;
Embarcadero with two brokers and one replica. *Nothing* is a Python source that yields the same rows from memory: the
least time of any source in Python, and so Kafka / nothing is the most that one can reach.

| | Embarcadero, s | Kafka, s | Kafka / Embarcadero | nothing, s | Kafka / nothing |
| --- | --- | --- | --- | --- | --- |
{table}

{BOUNDS}"""
    print(text)
    if not options.no_report:
        REPORT.write_text(text)
        print(f"saved in {REPORT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
