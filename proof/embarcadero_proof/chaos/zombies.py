"""Real zombies: at each step of the protocol a process stops itself (SIGSTOP), is replaced, and continues (SIGCONT).

Each step has its own small cluster, under load with ack 1 and 2, with readers that never stop. The role stops at the
step that its environment names (faults/steps.py). The test causes the step: for example by a kill -9 of the sequencer,
of a broker, of a replica, of everything. The stopped process is replaced: by its supervisor, or, where that is an
operator's task, by a process of this test. After all leases it continues in the middle of its work. Then every record
that was acked, or read at any time, must still be there, unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import embarcadero as emb
from embarcadero.config import load
from embarcadero.errors import BadValue, ClusterError, EmbarcaderoError
from embarcadero.limits import KIB, MIB, REPLICA_SILENT_S, RESEND_AFTER_S
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import halt, runs, state_of
from embarcadero.node.process import candidate_role
from embarcadero.node.report import report as cluster_report
from embarcadero.node.supervisor import UpOptions
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero.steps import BROKER, BY_NAME, SEQUENCER, Step
from embarcadero.types import Order, Position, Range
from embarcadero_proof.chaos.streams import RECORD, Stream
from embarcadero_proof.chaos.truth import Truth, seen
from embarcadero_proof.faults.node import NODE_MODULE
from embarcadero_proof.faults.steps import STEP_VARIABLE, arm, fired
from embarcadero_proof.machine import commit, machine_facts

TOPICS: Final = {"strong": Order.STRONG, "total": Order.TOTAL, "pinned": Order.BROKER}
NOT_HERE: Final = {Step.CEILING_WANTED, Step.CEILING_RAISED}
"""Steps that a lane reaches after two million batches: the simulator covers them."""

ACKS_LEAST: Final = 8
"""Every stream gets this many more acks before the stop, during it, and after it; fewer acks prove nothing."""

_ASLEEP_S: Final = max(REPLICA_SILENT_S, RESEND_AFTER_S) + 1.0
"""Longer than processes wait for a sequencer or a replica. For a broker that is 10 s, so the test replaces it."""

_REACH_S: Final = 45.0
_WAIT_S: Final = 60.0
_READ_S: Final = 120.0
_NOTICED_S: Final = 3.0
_AWAKE_S: Final = 1.0
_SOME_RECORDS: Final = 64
_HELD_UP_S: Final = 0.3
_POLL_S: Final = 0.02

@dataclass(slots=True)
class Case:
    """The result of one step."""

    step: str
    role: str
    truth: str
    stopped: int = 0  # process id; 0: no process reached the step
    asleep_s: float = 0.0
    replaced_by: str = ""
    ended: bool = False  # it noticed that it was replaced, and ended
    acks: int = 0
    acks_asleep: int = 0
    acks_after: int = 0
    read: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Watcher(threading.Thread):
    """A reader that never stops, and keeps the records that it got, with their positions."""

    def __init__(self, addresses: list[str], topic: str, read: str) -> None:
        super().__init__(name=f"watcher-{topic}-{read}", daemon=True)
        self.topic, self.seen, self.problems = topic, dict[tuple[int, int], bytes](), list[str]()
        self._addresses, self._read, self._over = addresses, read, threading.Event()

    def finish(self) -> None:
        """Stop reading."""
        self._over.set()

    def run(self) -> None:
        """Read until asked to finish."""
        try:
            with emb.connect(self._addresses) as log, log.subscribe(self.topic, read=self._read) as reader:
                while not self._over.is_set():
                    batch = reader.poll(timeout=0.2)
                    if batch is not None and batch.gap is None:
                        values = batch.to_arrow().column("value").to_pylist()
                        for number, value in enumerate(values):
                            self.seen[batch.lane, batch.seq + number] = value[: RECORD.size]
        except EmbarcaderoError as error:
            self.problems.append(f"{self.name} ended: {type(error).__name__}: {error}")


class Stage:
    """A cluster with a requested step, and all its load."""

    def __init__(self, folder: Path, step: Step) -> None:
        self.step, self.folder = step, ClusterFolder(folder)
        self.streams: list[Stream] = []
        self.watchers: list[Watcher] = []
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stand_ins: list[subprocess.Popen[bytes]] = []
        self._config = load(None, {
            "cluster.data_dir": folder, "cluster.brokers": 2, "cluster.replicas": 4, "broker.port": 0,
            "metrics.enabled": False, "fabric.log_bytes": 2 * MIB, "fabric.chunk_bytes": 128 * KIB,
            "fabric.order_slots": 256, "fabric.round_entries": 64, "fabric.dead_log_bytes": 0,
        })  # fmt: skip

    # --- processes ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the cluster, with the requested step in the environment of all its processes."""
        before = os.environ.get(STEP_VARIABLE)
        os.environ[STEP_VARIABLE] = f"{self.step.role}@{self.step.value}:stop"
        try:
            self._supervisor, _ = start(
                UpOptions(config=self._config, stop_with_stdin=True, node_module=NODE_MODULE)
            )
        finally:
            os.environ.pop(STEP_VARIABLE)
            if before is not None:
                os.environ[STEP_VARIABLE] = before

    def kill(self, role: str) -> None:
        """SIGKILL the process of a role."""
        if not (pid := self.folder.require_running().pid_of(role)):
            raise ClusterError(f"{role} does not run", "see the logs")
        os.kill(pid, signal.SIGKILL)

    def role_of(self, pid: int) -> str:
        """Return the role of a process; empty if it does not belong to this cluster."""
        nodes = self.folder.require_running().nodes
        return next((node.roles for node in nodes if node.pid == pid), "")

    @property
    def addresses(self) -> list[str]:
        """Addresses of the brokers now."""
        return [broker.address for broker in cluster_report(self.folder).brokers]

    def stand_in(self, role: str) -> None:
        """Start another process for a role, as an operator may."""
        path = self.folder.log_of(f"stand-in-{role}")
        with path.open("ab") as log:
            self._stand_ins.append(subprocess.Popen(
                [sys.executable, "-m", "embarcadero.cli.processes", "--data-dir", str(self.folder.path), "--roles",
                 role, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            ))  # fmt: skip

    @property
    def newest(self) -> int:
        """The process id of the newest replacement."""
        return self._stand_ins[-1].pid

    def end(self) -> None:
        """Kill everything, and remove the fabric."""
        for stream in self.streams:
            stream.finish()
        for watcher in self.watchers:
            watcher.finish()
        if self._supervisor is None:
            return
        info = self.folder.require_running()
        own = [self._supervisor.pid, *(node.pid for node in info.nodes if node.pid)]
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self._supervisor, *self._stand_ins):
            process.kill()
            process.wait()
        if self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
        self._supervisor = None
        shutil.rmtree(info.fabric, ignore_errors=True)

    @contextmanager
    def directory(self) -> Iterator[Directory]:
        """Open the store's directory."""
        with closing(SqliteStore(self.folder.store_path)) as store:
            yield Directory(store)

    # --- load ---------------------------------------------------------------------------------------------------------
    def begin_load(self) -> None:
        """Start publishers with ack 1 and ack 2 on each topic, and readers of ordered and of durable records."""
        addresses = self.addresses
        with emb.connect(addresses) as log:
            for name, order in TOPICS.items():
                log.create_topic(name, order=order, replicas=3, durable_on=2)
        lost = self.step.value.startswith("recovery")  # memory is lost, with all records that are not durable
        plans = [(name, 2 if lost else ack) for name in TOPICS for ack in (1, 2)]
        self.streams = [Stream(number, addresses, name, 2 * KIB, ack) for number, (name, ack) in enumerate(plans)]
        self.watchers = [Watcher(addresses, name, read) for name in TOPICS for read in ("ordered", "durable")[lost:]]
        for thread in (*self.streams, *self.watchers):
            thread.start()

    def await_acks(self, before: list[int] | None = None) -> int:
        """Wait until every stream got more acks, since `before` or now; return the count of the slowest stream."""
        since = self.acked() if before is None else before
        until(lambda: self._slowest(since) >= ACKS_LEAST, _WAIT_S)
        return self._slowest(since)

    def acked(self) -> list[int]:
        """Return the number of acks of each stream."""
        return [len(stream.acked) for stream in self.streams]

    def _slowest(self, since: list[int]) -> int:
        return min(now - then for now, then in zip(self.acked(), since, strict=True))

    def stop_load(self) -> None:
        """Stop all streams, and wait for their last answers."""
        for stream in self.streams:
            stream.finish()
        for stream in self.streams:
            stream.join(_READ_S)
            if stream.is_alive():
                stream.problems.append(f"stream {stream.number} does not end")


def until(holds: Callable[[], bool], most_s: float) -> bool:
    """Wait until a condition holds; return False if it did not in time."""
    give_up, pause = time.monotonic() + most_s, threading.Event()
    while not holds():
        if time.monotonic() > give_up:
            return False
        pause.wait(_POLL_S)
    return True


# --- one step ---------------------------------------------------------------------------------------------------------
def run_case(step: Step, folder: Path) -> Case:
    """Run a cluster with load and a zombie at one step, then check the truth."""
    case, began = Case(step.value, step.role, step.truth), time.monotonic()
    stage = Stage(folder, step)
    try:
        stage.start()
        stage.begin_load()
        case.acks = stage.await_acks()
        _reach(stage, case)
        if case.stopped:
            _sleep_and_wake(stage, case)
        stage.stop_load()
        _check(stage, case)
    except (EmbarcaderoError, OSError) as error:
        case.problems.append(f"{type(error).__name__}: {error}")
    finally:
        stage.end()
    few = [when for when, acks in (("before the stop", case.acks), ("during it", case.acks_asleep),
           ("after it", case.acks_after)) if acks < ACKS_LEAST]  # fmt: skip
    case.problems += [f"too few acks {when}: that proves nothing" for when in few]
    case.seconds = round(time.monotonic() - began, 1)
    return case


def _reach(stage: Stage, case: Case) -> None:
    """Arm the step, cause it, and wait until a process has stopped."""
    step, path = stage.step, stage.folder.path
    fitting = [start for start in WAYS if step.value.startswith(start)]
    arm(path)
    if fitting:
        WAYS[max(fitting, key=len)](stage)
    if not until(lambda: fired(path) is not None and _stopped(fired(path) or 0), _REACH_S):
        case.problems.append("no process reached this step")
        return
    case.stopped = fired(path) or 0


# --- ways to get to a step --------------------------------------------------------------------------------------------
def _kill_sequencer(stage: Stage) -> None:
    """Kill the leader."""
    pid = cluster_report(stage.folder).sequencer.pid
    stage.kill(stage.role_of(pid) or SEQUENCER)


def _kill_broker(stage: Stage) -> None:
    """Kill a broker with lanes of its own."""
    with stage.directory() as directory:
        broker = next(lane.broker for lane in directory.lanes.all() if lane.open)
    stage.kill(f"{BROKER}:{broker}")


def _kill_replica(stage: Stage) -> None:
    """Kill a replica of an open range."""
    with stage.directory() as directory:
        used = next(range_ for range_ in directory.ranges.all() if range_.open).replicas[0].replica
    stage.kill(f"replica:{used}")


def _restart(stage: Stage) -> None:
    """Kill everything, and start it again: the log is on disk only."""
    streams, watchers = stage.streams, stage.watchers
    stage.streams, stage.watchers = [], []
    stage.end()
    stage.start()
    stage.streams, stage.watchers = streams, watchers


def _again_and_again(stage: Stage) -> Iterator[emb.Log]:
    """Yield a new client each time, until a process has reached the step; its calls may fail meanwhile."""
    give_up = time.monotonic() + _REACH_S
    while fired(stage.folder.path) is None and time.monotonic() < give_up:
        with contextlib.suppress(EmbarcaderoError), emb.connect(stage.addresses) as log:
            yield log


def _read_all(stage: Stage) -> None:
    """Read from the beginning: after a while these records are on disk only."""
    for log in _again_and_again(stage):
        with contextlib.suppress(EmbarcaderoError):
            log.read("total", end=_SOME_RECORDS, timeout=_NOTICED_S)


def _ask_ends(stage: Stage) -> None:
    """Ask for the end of a topic."""
    for log in _again_and_again(stage):
        with contextlib.suppress(EmbarcaderoError):
            log.tail("total", timeout=_NOTICED_S)


def _make_lanes(stage: Stage) -> None:
    """Publish to new topics: brokers have to make lanes for them."""
    for number, log in enumerate(_again_and_again(stage)):
        with contextlib.suppress(EmbarcaderoError):
            log.create_topic(f"new-{number}", order=Order.BROKER, replicas=3, durable_on=2)
            publisher = log.publisher(f"new-{number}", linger_ms=0)
            publisher.send(b"the first")
            publisher.close(timeout=_NOTICED_S)


def _hold_up_a_broker(stage: Stage) -> None:
    """Pause a broker for a moment: batches of a session at the other broker wait for those at this one."""
    pid = stage.folder.require_running().pid_of(f"{BROKER}:1")
    for _ in _again_and_again(stage):
        halt(pid)
        time.sleep(_HELD_UP_S)
        os.kill(pid, signal.SIGCONT)


WAYS: Final[dict[str, Callable[[Stage], None]]] = {
    "takeover": _kill_sequencer, "round.held": _hold_up_a_broker, "seal": _kill_replica, "seal.last": _kill_broker,
    "recovery": _restart, "closing": _kill_broker, "burial": _kill_broker, "lane.made": _make_lanes,
    "read.disk": _read_all, "read.ends": _ask_ends, "replica.seal": _kill_replica, "replica.counting": _kill_replica,
}  # fmt: skip
"""The cause of steps whose names begin like this; the longest prefix counts. Load causes all other steps."""


# --- the stop ---------------------------------------------------------------------------------------------------------

def _stopped(pid: int) -> bool:
    return state_of(pid) == "T"


def _sleep_and_wake(stage: Stage, case: Case) -> None:
    """Have the stopped process replaced, wait for longer than any lease, and continue it."""
    began = time.monotonic()
    until(lambda: bool(stage.role_of(case.stopped)), _NOTICED_S)
    role = stage.role_of(case.stopped)
    case.replaced_by = _replace(stage, role)
    if not case.replaced_by:
        case.problems.append(f"no process replaced {role}")
    before = stage.acked()
    threading.Event().wait(max(0.0, began + _ASLEEP_S - time.monotonic()))
    case.acks_asleep, case.asleep_s = stage.await_acks(before), round(time.monotonic() - began, 2)
    if not _stopped(case.stopped):
        case.problems.append(f"process {case.stopped} ({role}) was not stopped all the time")
    with contextlib.suppress(ProcessLookupError):
        os.kill(case.stopped, signal.SIGCONT)
    case.ended = until(lambda: not runs(case.stopped), _AWAKE_S)
    case.acks_after = stage.await_acks()


def _replace(stage: Stage, role: str) -> str:
    """Wait until another process replaces a stopped role; return its description, empty if none did in time."""
    with stage.directory() as directory:
        if role.startswith(BROKER):
            stage.stand_in(role)
            there = until(lambda: any(member.pid == stage.newest for member in directory.members.all()), _WAIT_S)
            return "a new incarnation" if there else ""
        if not role.startswith(SEQUENCER):
            number = int(role.partition(":")[2])
            moved = until(lambda: not any(_follows(range_, number) for range_ in directory.ranges.all()), _WAIT_S)
            return "other replicas" if moved else ""
        led = until(lambda: _another_leads(directory, role), _WAIT_S)
        return "a standby sequencer" if led else ""


def _another_leads(directory: Directory, role: str) -> bool:
    """Whether a sequencer with another role leads."""
    leadership = directory.elections.leadership()
    return (
        leadership is not None
        and candidate_role(leadership.candidate) != role
        and leadership.epoch == directory.elections.started_epoch()
    )


def _follows(range_: Range, replica: int) -> bool:
    return range_.open and any(ref.replica == replica for ref in range_.replicas)


def _check(stage: Stage, case: Case) -> None:
    """Check the records that are there now against the acks, and against those that readers got on the way."""
    acked: dict[str, dict[int, dict[int, Position | None]]] = {name: {} for name in TOPICS}
    for stream in stage.streams:
        acked[stream.topic][stream.number] = dict(stream.acked)
        case.problems += stream.problems
    with emb.connect(stage.addresses) as log:
        for name, order in TOPICS.items():
            truth = Truth(name, int(order))
            now = seen(log.read(name, timeout=_READ_S), log.describe(name).lane)
            truth.check(acked[name], now)
            case.problems += truth.problems
            columns = zip(now.lane.tolist(), now.seq.tolist(), now.stream.tolist(), now.number.tolist(), strict=True)
            there = {(lane, seq): RECORD.pack(stream, number) for lane, seq, stream, number in columns}
            for watcher in [watcher for watcher in stage.watchers if watcher.topic == name]:
                case.problems += _compare(watcher, there)
                case.read += len(watcher.seen)


def _compare(watcher: Watcher, there: dict[tuple[int, int], bytes]) -> list[str]:
    """Check that each record that a reader got is the final one at its position."""
    watcher.finish()
    watcher.join(_WAIT_S)
    wrong = [position for position, value in watcher.seen.items() if there.get(position) != value]
    problems = [f"{watcher.name}: the record read at {position} is not there now" for position in wrong[:3]]
    missing = len(there) - len(watcher.seen)
    return problems + watcher.problems + ([f"{watcher.name} saw nothing"] if not watcher.seen and missing else [])


# --- all of them ------------------------------------------------------------------------------------------------------
def chosen(names: Sequence[str]) -> list[Step]:
    """Return steps by name, or by the beginning of names; all without names."""
    steps = [step for step in Step if step not in NOT_HERE]
    if not names:
        return steps
    found = [step for step in steps if any(step.value == name or step.value.startswith(f"{name}.") for name in names)]
    unknown = [name for name in names if not any(step.value.startswith(name) for step in found)]
    if unknown:
        raise BadValue(f"there is no step {', '.join(unknown)}", f"use one of {', '.join(sorted(BY_NAME))}")
    return found


def run_zombies(steps: Sequence[Step], progress: Progress | None = None) -> list[Case]:
    """Run the cases one after the other."""
    cases, task = [], progress.add_task("starting", total=len(steps)) if progress is not None else None
    for step in steps:
        if progress is not None and task is not None:
            progress.update(task, description=step.value)
        with tempfile.TemporaryDirectory(prefix="embarcadero-zombies-") as folder:
            cases.append(run_case(step, Path(folder)))
        if progress is not None and task is not None:
            progress.advance(task)
    return cases


def run_cli(names: Sequence[str], report: Path | None, json_out: bool) -> int:
    """Run, print and save a report; return 0 when every zombie was harmless."""
    console, began, steps = Console(stderr=True), time.monotonic(), chosen(names)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        cases = run_zombies(steps, progress)
    result: dict[str, Any] = {
        "case": "zombies", "commit": commit(), "machine": machine_facts(),
        "command": " ".join(["embarcadero-proof chaos zombies", *(f"--step {name}" for name in names)]),
        "steps": len(cases), "stopped": sum(bool(case.stopped) for case in cases),
        "failed": [case.step for case in cases if case.problems], "seconds": round(time.monotonic() - began, 1),
        "cases": [asdict(case) for case in cases],
    }  # fmt: skip
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(result, indent=1) + "\n")
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        Console().print(_table(cases))
    return 1 if result["failed"] else 0


def _table(cases: list[Case]) -> Table:
    table = Table("step", "role", "asleep", "replaced by", "acks", "asleep", "after", "verdict", title="zombies")
    for case in cases:
        verdict = f"[red]{case.problems[0]}" if case.problems else "[green]changed nothing"
        acks = map(str, (case.acks, case.acks_asleep, case.acks_after))
        table.add_row(case.step, case.role, f"{case.asleep_s} s", case.replaced_by, *acks, verdict)
    return table
