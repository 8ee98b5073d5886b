"""Print the view of a Spark Connect client after the pipeline has run: `connect_look.py REMOTE BROKERS`."""

from __future__ import annotations

import json
import re
import sys

from embarcadero.spark import session

remote, brokers = sys.argv[1:]
spark = session(remote=remote)
clicks = spark.sql("select seq, user from spark_catalog.default.clicks order by seq").collect()
pages = spark.sql("select page, count from clicks_by_page order by page").collect()
session(remote=remote, topics=True, brokers=brokers)
views = [row.viewName for row in spark.sql("show views").collect()]
try:
    spark.read.format("embarcadero").options(brokers=brokers, topic="nothing").load().count()
    error = None
except Exception as caught:
    found = re.search(r"embarcadero\.errors\.(\w+)", str(caught))
    error = found and found[1]
print(
    json.dumps(
        {
            "clicks": [list(row) for row in clicks], "by page": [list(row) for row in pages],
            "views": sorted(name for name in views if name in ("clicks", "large", "orders")), "error": error,
        }
    )
)  # fmt: skip
spark.stop()
