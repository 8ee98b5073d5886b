"""Notification of a process's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from embarcadero.liveness import process_mark
from embarcadero.node.env import ProcessWatch


def test_the_end_of_a_process_is_reported_immediately_and_once() -> None:
    """For a followed process.

    If it has already ended, following it reports that; on another machine it is never reported.
    """

    async def watch(process: subprocess.Popen[bytes]) -> list[str]:
        told: list[str] = []
        heard = asyncio.Event()

        def ended(mark: str) -> None:
            told.append(mark)
            heard.set()

        watch = ProcessWatch(ended)
        mark = process_mark(process.pid)
        boot, pid, started = mark.split("/")
        watch.follow(f"another-{boot}/{pid}/{started}")
        watch.follow(mark)
        watch.follow(mark)
        assert told == []
        process.kill()
        await heard.wait()
        watch.follow("")
        watch.follow(mark)
        watch.follow(f"{boot}/{pid}/{int(started) + 1}")
        watch.close()
        return told

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        told = asyncio.run(watch(process))
    assert len(told) == 3
    assert told[0] == told[1] != told[2]
