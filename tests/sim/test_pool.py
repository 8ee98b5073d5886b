"""Worker processes end with their owner."""

from __future__ import annotations

import os
import subprocess
import sys
import time

SCRIPT = """
import os, time
from embarcadero_proof.sim.pool import worker_pool
if __name__ == "__main__":
    pool = worker_pool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_worker_outlives_a_killed_owner() -> None:
    """kill -9 leaves no process behind that waits for runs that never come."""
    owner = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    assert _runs(worker)
    owner.kill()
    owner.communicate()
    give_up = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not _runs(worker)
