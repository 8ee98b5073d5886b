"""A job in a process of its own that is killed: `python -m tests.spark.job_driver plan.json`.

It replays a topic, and SIGKILL ends the process when the commit of the second step starts to publish.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import embarcadero as emb
from embarcadero.spark import session
from embarcadero.spark.replay import replay
from embarcadero.staging.ledger import TopicLedger


def main(path: str) -> None:
    """Run until killed."""
    plan = json.loads(Path(path).read_text())
    spark = session("driver", "local[2]", {"spark.driver.extraJavaOptions": plan["java"]})
    whole, steps = TopicLedger.publish, iter(range(10))

    async def publish(ledger: TopicLedger, *given: Any) -> None:
        if next(steps):
            os.kill(os.getpid(), signal.SIGKILL)
        await whole(ledger, *given)

    TopicLedger.publish = publish  # type: ignore[method-assign]
    with emb.connect(plan["brokers"]) as log:
        replay(spark, log, plan["topic"], into=f"{plan['topic']}-to", step_bytes=plan["step_bytes"])


if __name__ == "__main__":
    main(sys.argv[1])
