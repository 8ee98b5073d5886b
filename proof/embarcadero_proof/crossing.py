"""The files that one record crosses: from `send` to its ack, and on a read from disk.

A cluster runs in one process. Its Python code is watched while one record is sent and acked, and again, after a restart
without memory, while it is read. The client is watched in this process. A file counts if code of it ran.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

import embarcadero as emb
from embarcadero.cli import processes
from embarcadero.config import load
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.report import report
from embarcadero.node.supervisor import STOP_S_MAX, UpOptions

PACKAGE: Final = str(Path(emb.__file__).parent)
_FILE: Final = "EMBARCADERO_CROSSED"
_CODE_OF_IMPORTS: Final = {"<module>", "<listcomp>", "<genexpr>"}
_WAIT_S: Final = 10.0
_REST_S: Final = 0.5


class Watch:
    """Collects the files of the product whose code runs, while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def close(self) -> None:
        """Watch no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_name not in _CODE_OF_IMPORTS:
            name = frame.f_code.co_filename
            if name.startswith(PACKAGE):
                self.files.add(name[len(PACKAGE) + 1 :])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node that is watched: SIGUSR1 turns the watch on, SIGUSR2 off and writes what it saw."""
    watch = Watch()

    def off(*_: object) -> None:
        watch.on = False
        path = Path(os.environ[_FILE])
        part = path.with_suffix(".part")
        part.write_text(json.dumps(sorted(watch.files)))
        part.replace(path)

    def turn_on(*_: object) -> None:
        watch.files.clear()
        watch.on = True
        Path(os.environ[_FILE]).with_suffix(".on").touch()

    signal.signal(signal.SIGUSR1, turn_on)
    signal.signal(signal.SIGUSR2, off)
    return processes.main(arguments)


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """A cluster in one process: its addresses, and what finds the process id."""
    config = load(None, {
        "cluster.data_dir": folder, "cluster.brokers": 1, "cluster.replicas": 1, "cluster.one_process": True,
        "cluster.standbys": 0, "broker.port": 0, "metrics.enabled": False,
    })  # fmt: skip
    os.environ[_FILE] = str(folder.parent / "crossed.json")
    process, _ = start(UpOptions(config=config, stop_with_stdin=True, node_module="embarcadero_proof.crossing"))
    try:
        found = ClusterFolder(folder)
        yield report(found).addresses, lambda: found.require_running().pid_of("sequencer")
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(STOP_S_MAX)


def _crossed(watch: Watch, pid: int, act: Callable[[], object]) -> set[str]:
    """Run `act`; the files that it crossed, in this process and in the cluster's."""
    path = Path(os.environ[_FILE])
    on = path.with_suffix(".on")
    for old in (path, on):
        old.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    _wait_for(on)
    watch.files.clear()
    watch.on = True
    act()
    watch.on = False
    os.kill(pid, signal.SIGUSR2)
    _wait_for(path)
    return watch.files | set(json.loads(path.read_text()))


def _wait_for(path: Path) -> None:
    give_up = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the watched node does not answer: {path}")
        time.sleep(0.005)


class Crossed(NamedTuple):
    """Files of the product, relative to its package."""

    ordered: set[str]  # from `send` to an ack of what is ordered
    durable: set[str]  # further ones to an ack of what is durable
    read: set[str]  # further ones when the record is read from disk


def crossings() -> Crossed:
    """Send a record to a topic in memory and one to a topic on disk, and read that one after a restart."""
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="embarcadero-crossing-") as name:
        folder = Path(name) / "cluster"
        with _cluster(folder) as (addresses, pid_of), emb.connect(addresses) as log:
            log.create_topic("memory", order=5, replicas=0)
            log.create_topic("disk", order=5, replicas=1)
            ordered = _sent(watch, pid_of(), log, "memory", ack=1)
            durable = _sent(watch, pid_of(), log, "disk", ack=2)
        with (
            _cluster(folder) as (addresses, pid_of),
            emb.connect(addresses) as log,
            log.subscribe("disk", start="earliest") as reader,
        ):
            read = _crossed(watch, pid_of(), lambda: reader.poll(timeout=_WAIT_S))
    watch.close()
    return Crossed(ordered, durable - ordered, read - durable - ordered)


def _sent(watch: Watch, pid: int, log: emb.Log, topic: str, ack: Literal[1, 2]) -> set[str]:
    """Send a record, after another one: what is made once is made before."""
    with log.publisher(topic, ack=ack) as publisher:
        publisher.send(b"first").result(timeout=_WAIT_S)
        time.sleep(_REST_S)
        return _crossed(watch, pid, lambda: publisher.send(b"watched").result(timeout=_WAIT_S))
