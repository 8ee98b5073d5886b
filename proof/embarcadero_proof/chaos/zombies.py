"""Real zombies: at each step of the protocol a process stops itself (SIGSTOP), is replaced, goes on (SIGCONT).

For each step a small cluster of its own, under load with ack 1 and 2, with readers that never stop reading. The role in
question stops at the step, as its environment says (faults/steps.py). Whatever has to happen so that a process gets
there is done: a kill -9 of the sequencer, of a broker, of a replica, of everything. The stopped one is replaced: by
its supervisor, or, where that is an operator's business, by a process that we start. After all leases it goes on in
the middle of what it did. Then everything that was acked, or read at any time, has to be there, as it was.
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
"""Steps that a lane gets to after two million batches: the simulator goes there."""

ACKS_LEAST: Final = 8
"""Every stream gets so many more acks before the stop, during it, and after it; with fewer, nothing was shown."""

_ASLEEP_S: Final = max(REPLICA_SILENT_S, RESEND_AFTER_S) + 1.0
"""Longer than processes wait for a sequencer or a replica. For a broker that is 10 s: here it is replaced by hand."""

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
    """What came of one step."""

    step: str
    role: str
    truth: str
    stopped: int = 0  # process id; 0: no process got there
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
    """A reader that goes on all the time, and remembers what it was shown, and where."""

    def __init__(self, addresses: list[str], topic: str, read: str) -> None:
        super().__init__(name=f"watcher-{topic}-{read}", daemon=True)
        self.topic, self.seen, self.problems = topic, dict[tuple[int, int], bytes](), list[str]()
        self._addresses, self._read, self._over = addresses, read, threading.Event()

    def finish(self) -> None:
        """Read no more."""
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
    """A cluster with a wish, and all that runs on it."""

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
        """Start it, with the wish in the environment of all its processes."""
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
        """Which role a process has; empty if it is none of ours."""
        nodes = self.folder.require_running().nodes
        return next((node.roles for node in nodes if node.pid == pid), "")

    @property
    def addresses(self) -> list[str]:
        """Where brokers listen now."""
        return [broker.address for broker in cluster_report(self.folder).brokers]

    def stand_in(self, role: str) -> None:
        """Start another process with a role, as an operator may."""
        path = self.folder.log_of(f"stand-in-{role}")
        with path.open("ab") as log:
            self._stand_ins.append(subprocess.Popen(
                [sys.executable, "-m", "embarcadero.cli.processes", "--data-dir", str(self.folder.path), "--roles",
                 role, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            ))  # fmt: skip

    @property
    def newest(self) -> int:
        """The process that was started last in place of another."""
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
        """What the store says."""
        with closing(SqliteStore(self.folder.store_path)) as store:
            yield Directory(store)

    # --- load ---------------------------------------------------------------------------------------------------------
    def begin_load(self) -> None:
        """Publishers with ack 1 and with ack 2 on each topic, and readers of what is ordered and what is durable."""
        addresses = self.addresses
        with emb.connect(addresses) as log:
            for name, order in TOPICS.items():
                log.create_topic(name, order=order, replicas=3, durable_on=2)
        lost = self.step.value.startswith("recovery")  # with the memory, and all that is not durable
        plans = [(name, 2 if lost else ack) for name in TOPICS for ack in (1, 2)]
        self.streams = [Stream(number, addresses, name, 2 * KIB, ack) for number, (name, ack) in enumerate(plans)]
        self.watchers = [Watcher(addresses, name, read) for name in TOPICS for read in ("ordered", "durable")[lost:]]
        for thread in (*self.streams, *self.watchers):
            thread.start()

    def await_acks(self, before: list[int] | None = None) -> int:
        """Wait until every stream got some more acks, since `before` or since now; returns how many the slowest got."""
        since = self.acked() if before is None else before
        until(lambda: self._slowest(since) >= ACKS_LEAST, _WAIT_S)
        return self._slowest(since)

    def acked(self) -> list[int]:
        """How many acks each stream has."""
        return [len(stream.acked) for stream in self.streams]

    def _slowest(self, since: list[int]) -> int:
        return min(now - then for now, then in zip(self.acked(), since, strict=True))

    def stop_load(self) -> None:
        """Have all streams get their last answers."""
        for stream in self.streams:
            stream.finish()
        for stream in self.streams:
            stream.join(_READ_S)
            if stream.is_alive():
                stream.problems.append(f"stream {stream.number} does not end")


def until(holds: Callable[[], bool], most_s: float) -> bool:
    """Wait until something holds; False if it did not in time."""
    give_up, pause = time.monotonic() + most_s, threading.Event()
    while not holds():
        if time.monotonic() > give_up:
            return False
        pause.wait(_POLL_S)
    return True


# --- one step ---------------------------------------------------------------------------------------------------------
def run_case(step: Step, folder: Path) -> Case:
    """A cluster, load, a zombie at one step, and the truth."""
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
    case.problems += [f"too few acks {when}: that shows nothing" for when in few]
    case.seconds = round(time.monotonic() - began, 1)
    return case


def _reach(stage: Stage, case: Case) -> None:
    """Arm the step, do what leads there, and wait until a process has stopped."""
    step, path = stage.step, stage.folder.path
    fitting = [start for start in WAYS if step.value.startswith(start)]
    arm(path)
    if fitting:
        WAYS[max(fitting, key=len)](stage)
    if not until(lambda: fired(path) is not None and _stopped(fired(path) or 0), _REACH_S):
        case.problems.append("no process got to this step")
        return
    case.stopped = fired(path) or 0


# --- ways to get to a step --------------------------------------------------------------------------------------------
def _kill_sequencer(stage: Stage) -> None:
    """The leader, of the sequencers that may lead."""
    pid = cluster_report(stage.folder).sequencer.pid
    stage.kill(stage.role_of(pid) or SEQUENCER)


def _kill_broker(stage: Stage) -> None:
    """One that has lanes of its own."""
    with stage.directory() as directory:
        broker = next(lane.broker for lane in directory.lanes.all() if lane.open)
    stage.kill(f"{BROKER}:{broker}")


def _kill_replica(stage: Stage) -> None:
    """One that is in use."""
    with stage.directory() as directory:
        used = next(range_ for range_ in directory.ranges.all() if range_.open).replicas[0].replica
    stage.kill(f"replica:{used}")


def _restart(stage: Stage) -> None:
    """Kill everything, and start it again: the past is on disk only."""
    streams, watchers = stage.streams, stage.watchers
    stage.streams, stage.watchers = [], []
    stage.end()
    stage.start()
    stage.streams, stage.watchers = streams, watchers


def _again_and_again(stage: Stage) -> Iterator[emb.Log]:
    """A new client each time, until a process has got to the step; what it did may fail on the way."""
    give_up = time.monotonic() + _REACH_S
    while fired(stage.folder.path) is None and time.monotonic() < give_up:
        with contextlib.suppress(EmbarcaderoError), emb.connect(stage.addresses) as log:
            yield log


def _read_all(stage: Stage) -> None:
    """Read from the beginning: some day that has left memory."""
    for log in _again_and_again(stage):
        with contextlib.suppress(EmbarcaderoError):
            log.read("total", end=_SOME_RECORDS, timeout=_NOTICED_S)


def _ask_ends(stage: Stage) -> None:
    """Ask where a topic ends."""
    for log in _again_and_again(stage):
        with contextlib.suppress(EmbarcaderoError):
            log.tail("total", timeout=_NOTICED_S)


def _make_lanes(stage: Stage) -> None:
    """Publish to topics that are new: brokers have to make lanes for them."""
    for number, log in enumerate(_again_and_again(stage)):
        with contextlib.suppress(EmbarcaderoError):
            log.create_topic(f"new-{number}", order=Order.BROKER, replicas=3, durable_on=2)
            publisher = log.publisher(f"new-{number}", linger_ms=0)
            publisher.send(b"the first")
            publisher.close(timeout=_NOTICED_S)


def _hold_up_a_broker(stage: Stage) -> None:
    """A broker stands still for a moment: batches of a session that came by the other one wait for its own."""
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
"""What leads to steps whose names begin like this; the longest beginning counts. To others, load does."""


# --- the stop ---------------------------------------------------------------------------------------------------------

def _stopped(pid: int) -> bool:
    return state_of(pid) == "T"


def _sleep_and_wake(stage: Stage, case: Case) -> None:
    """The process is stopped: have it replaced, wait for longer than any lease, and let it go on."""
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
    """Another process replaces a role that is stopped; return which one in words, empty if none did in time."""
    with stage.directory() as directory:
        if role.startswith(BROKER):
            stage.stand_in(role)
            there = until(lambda: any(member.pid == stage.newest for member in directory.members.all()), _WAIT_S)
            return "a new incarnation" if there else ""
        if not role.startswith(SEQUENCER):
            number = int(role.partition(":")[2])
            left = until(lambda: not any(_follows(range_, number) for range_ in directory.ranges.all()), _WAIT_S)
            return "other replicas" if left else ""
        reigns = until(lambda: _another_reigns(directory, role), _WAIT_S)
        return "a sequencer that stood by" if reigns else ""


def _another_reigns(directory: Directory, role: str) -> bool:
    """Whether a sequencer leads that does not have this role."""
    reign = directory.elections.leadership()
    return (
        reign is not None
        and candidate_role(reign.candidate) != role
        and reign.epoch == directory.elections.started_epoch()
    )


def _follows(range_: Range, replica: int) -> bool:
    return range_.open and any(ref.replica == replica for ref in range_.replicas)


def _check(stage: Stage, case: Case) -> None:
    """Hold what is there now against what was acked, and what was shown to readers on the way."""
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
            places = zip(now.lane.tolist(), now.seq.tolist(), now.stream.tolist(), now.number.tolist(), strict=True)
            there = {(lane, seq): RECORD.pack(stream, number) for lane, seq, stream, number in places}
            for watcher in [watcher for watcher in stage.watchers if watcher.topic == name]:
                case.problems += _compare(watcher, there)
                case.read += len(watcher.seen)


def _compare(watcher: Watcher, there: dict[tuple[int, int], bytes]) -> list[str]:
    """What a reader was shown must be what everybody is shown in the end."""
    watcher.finish()
    watcher.join(_WAIT_S)
    wrong = [place for place, value in watcher.seen.items() if there.get(place) != value]
    told = [f"{watcher.name}: what was read at {place} is not there now" for place in wrong[:3]]
    missing = len(there) - len(watcher.seen)
    return told + watcher.problems + ([f"{watcher.name} saw nothing"] if not watcher.seen and missing else [])


# --- all of them ------------------------------------------------------------------------------------------------------
def chosen(names: Sequence[str]) -> list[Step]:
    """Steps by name, or by the beginning of names; all, if none is named."""
    steps = [step for step in Step if step not in NOT_HERE]
    if not names:
        return steps
    found = [step for step in steps if any(step.value == name or step.value.startswith(f"{name}.") for name in names)]
    unknown = [name for name in names if not any(step.value.startswith(name) for step in found)]
    if unknown:
        raise BadValue(f"no step {', '.join(unknown)}", f"one of {', '.join(sorted(BY_NAME))}")
    return found


def run_zombies(steps: Sequence[Step], progress: Progress | None = None) -> list[Case]:
    """One after the other."""
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
    """Run, print and save a report; 0 when every zombie was harmless."""
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
        print(json.dumps(result))  # noqa: T201 - asked for
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
