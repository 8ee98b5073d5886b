"""The code that one record crosses: functions and files that run from `send` to its ack, and on a read from disk.

A cluster runs in one process. This module traces its Python code while one record is sent and acked, and again, after a
restart without memory, while it is read. The client is traced in this process. Code that also runs on an idle cluster
with the same client does not belong to the record. So each leg begins with a trace of the idle cluster of `IDLE_S`.
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
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal, NamedTuple

import embarcadero as emb
from embarcadero.cli import processes
from embarcadero.config import load
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.report import report
from embarcadero.node.supervisor import STOP_S_MAX, UpOptions

PACKAGE: Final = str(Path(emb.__file__).parent)
IDLE_S: Final = 1.5
_REST_S: Final = 0.5  # the idle cluster is traced in parts of this length
_FILE: Final = "EMBARCADERO_CROSSED"
_NO_FUNCTIONS: Final = {"<module>", "<listcomp>", "<genexpr>"}
_WAIT_S: Final = 10.0


class Function(NamedTuple):
    """A function of the product: its file, relative to the package, and its qualified name in it."""

    file: str
    name: str


class Watch:
    """Collects the functions of the product that run while it is on, with the time of their first call."""

    def __init__(self) -> None:
        self._first_s: dict[CodeType, float] = {}
        self._on = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def start(self) -> None:
        """Drop earlier calls, and start to trace."""
        self._first_s.clear()
        self._on = True

    def stop(self) -> dict[Function, float]:
        """Stop until the next start. Return the functions that ran, with the (monotonic) time of their first call."""
        self._on = False
        found: dict[Function, float] = {}
        for code, at_s in self._first_s.items():
            if code.co_filename.startswith(PACKAGE) and code.co_name not in _NO_FUNCTIONS:
                function = Function(code.co_filename[len(PACKAGE) + 1 :], code.co_qualname)
                found[function] = min(at_s, found.get(function, at_s))
        return found

    def close(self) -> None:
        """Stop permanently."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call" and frame.f_code not in self._first_s and frame.f_code.co_flags & CO_OPTIMIZED:
            self._first_s[frame.f_code] = time.monotonic()  # bodies of classes and modules are not optimized


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a traced node: SIGUSR1 turns the trace on, SIGUSR2 turns it off and writes the result."""
    watch = Watch()

    def off(*_: object) -> None:
        found = watch.stop()
        path = Path(os.environ[_FILE])
        part = path.with_suffix(".part")
        part.write_text(json.dumps([[*function, at_s] for function, at_s in found.items()]))
        part.replace(path)

    def turn_on(*_: object) -> None:
        watch.start()
        Path(os.environ[_FILE]).with_suffix(".on").touch()

    signal.signal(signal.SIGUSR1, turn_on)
    signal.signal(signal.SIGUSR2, off)
    return processes.main(arguments)


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """Run a cluster in one process; yield its addresses, and a function that returns the process id."""
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


def _seen(watch: Watch, pid: int, act: Callable[[], object]) -> dict[Function, float]:
    """Run `act`; return the functions that ran meanwhile, in this process and in the cluster's."""
    path = Path(os.environ[_FILE])
    on = path.with_suffix(".on")
    for old in (path, on):
        old.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    _wait_for(on)
    watch.start()
    act()
    found = watch.stop()
    os.kill(pid, signal.SIGUSR2)
    _wait_for(path)
    for file, name, at_s in json.loads(path.read_text()):
        function = Function(file, name)
        found[function] = min(at_s, found.get(function, at_s))
    return found


def _wait_for(path: Path) -> None:
    give_up = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the traced node did not write {path} within {_WAIT_S:.0f} s")
        time.sleep(0.005)


class Leg(NamedTuple):
    """A part of a record's path: functions that ran, with the time of their first call, and those that run idly."""

    ran: dict[Function, float]
    idle: set[Function]

    @property
    def functions(self) -> dict[Function, float]:
        """Functions that ran for the record only: they do not run on an idle cluster."""
        return {function: at_s for function, at_s in self.ran.items() if function not in self.idle}

    @property
    def all_files(self) -> set[str]:
        """Files of all functions that ran."""
        return {function.file for function in self.ran}

    @property
    def files(self) -> set[str]:
        """Files of functions that ran for the record only."""
        return {function.file for function in self.functions}


class Crossed(NamedTuple):
    """The legs of a record's path."""

    ordered: Leg  # from `send` to an ordered ack
    durable: Leg  # from `send` to a durable ack
    memory: Leg  # from `subscribe` to a record in memory
    disk: Leg  # from `subscribe` to a record on disk only

    def table(self) -> list[tuple[str, str]]:
        """A row for each leg: the number of files with functions for the record only; in brackets, with any code."""
        titles = (
            "files from send to ack", "files from send to a durable ack", "files from subscribe to a record in memory",
            "files from subscribe to a record on disk",
        )  # fmt: skip
        rows = []
        for title, leg in zip(titles, self, strict=True):
            rows.append((title, f"{len(leg.files)} ({len(leg.all_files)}) {', '.join(sorted(leg.files))}"))
        return rows


def crossings() -> Crossed:
    """Send a record to a topic in memory and one to a topic on disk; read both, the second one after a restart."""
    watch = Watch()
    try:
        with tempfile.TemporaryDirectory(prefix="embarcadero-crossing-") as name:
            folder = Path(name) / "cluster"
            with _cluster(folder) as (addresses, pid_of), emb.connect(addresses) as log:
                log.create_topic("memory", order=5, replicas=0)
                log.create_topic("disk", order=5, replicas=1)
                ordered = _sent(watch, pid_of(), log, "memory", ack=1)
                durable = _sent(watch, pid_of(), log, "disk", ack=2)
                memory = _leg(watch, pid_of(), lambda: _read(log, "memory"))
            with _cluster(folder) as (addresses, pid_of), emb.connect(addresses) as log:
                disk = _leg(watch, pid_of(), lambda: _read(log, "disk"))
    finally:
        watch.close()
    return Crossed(ordered, durable, memory, disk)


def _leg(watch: Watch, pid: int, act: Callable[[], object]) -> Leg:
    """Trace the idle cluster, then run `act`."""
    idle = set[Function]()
    for _ in range(round(IDLE_S / _REST_S)):
        idle |= _seen(watch, pid, lambda: time.sleep(_REST_S)).keys()
    return Leg(_seen(watch, pid, act), idle)


def _sent(watch: Watch, pid: int, log: emb.Log, topic: str, ack: Literal[1, 2]) -> Leg:
    """Send a record, after another record that causes all one-time set-up."""
    with log.publisher(topic, ack=ack) as publisher:
        publisher.send(b"first").result(timeout=_WAIT_S)
        time.sleep(_REST_S)
        return _leg(watch, pid, lambda: publisher.send(b"watched").result(timeout=_WAIT_S))


def _read(log: emb.Log, topic: str) -> None:
    """Read the first record of a topic."""
    with log.subscribe(topic, start="earliest") as reader:
        if not reader.poll(timeout=_WAIT_S):
            raise TimeoutError(f"no record of topic {topic!r} arrived within {_WAIT_S:.0f} s")
