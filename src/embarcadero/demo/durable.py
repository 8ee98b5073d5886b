"""The first act of the demo: durable publishers over all brokers, two subscribers, one order, and many kills.

The act kills a broker, then the sequencer, then every process together, and removes shared memory. Every record
contains the number of its publisher and its own number. So each subscriber can check that no record is missing,
duplicated or out of order. Both keep a running hash over records and positions.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import embarcadero as emb
from embarcadero.errors import ClusterError, EmbarcaderoError
from embarcadero.node.local import RestartableCluster
from embarcadero.node.process import candidate_role
from embarcadero.types import GapKind

PUBLISHERS = 4
REPLICAS = 3
_RECORD = struct.Struct("<IQ")
_PADDING = b"." * 88  # records of 100 bytes
_BURST = 500


@dataclass(slots=True)
class Sender:
    """One publisher thread's progress."""

    number: int
    sent: int = 0
    acked: int = 0
    first_wrong: str = ""
    acked_at: list[float] = field(default_factory=list)  # moments of acks


@dataclass(slots=True)
class Watcher:
    """The verdict of one subscriber."""

    number: int
    records: int = 0
    latest: int = -1
    gaps: int = 0
    next_of: dict[int, int] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)
    complaint: str = ""


class Demo:
    """State shared by the threads; each field has one writer."""

    def __init__(self, cluster: RestartableCluster, brokers: int, seconds: float) -> None:
        self.cluster, self.brokers, self.seconds = cluster, brokers, seconds
        self.senders = [Sender(number) for number in range(PUBLISHERS)]
        self.watchers = [Watcher(number) for number in range(2)]
        self.stop_sending = threading.Event()
        self.all_sent = threading.Event()
        self.story: list[str] = []
        self.takeover: ObservedTakeover | None = None
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def tell(self, line: str) -> None:
        """Add a line to the story on the screen."""
        self.story.append(f"{self.elapsed:5.1f} s  {line}")

    def acks(self) -> list[float]:
        """Moments of all acks."""
        return [moment for sender in self.senders for moment in sender.acked_at]

    @property
    def total_sent(self) -> int:
        """Records sent by all publishers."""
        return sum(sender.sent for sender in self.senders)


def _send(demo: Demo, sender: Sender) -> None:
    with emb.connect(demo.cluster.addresses) as log, log.publisher("demo", ack=2, batch_bytes=32 * 1024) as publisher:
        while not demo.stop_sending.is_set():
            numbers = range(sender.sent, sender.sent + _BURST)
            futures = [publisher.send(_RECORD.pack(sender.number, number) + _PADDING) for number in numbers]
            sender.sent += _BURST
            last = futures[-1].result(timeout=60)
            sender.acked += _BURST
            sender.acked_at.append(time.monotonic())
            if last is None:
                sender.first_wrong = "an ack without a position"
            time.sleep(0.01)


def _watch(demo: Demo, watcher: Watcher) -> None:
    with emb.connect(demo.cluster.addresses) as log, log.subscribe("demo", start="earliest") as subscriber:
        while not (demo.all_sent.is_set() and watcher.records >= demo.total_sent) and not watcher.complaint:
            batch = subscriber.poll(timeout=0.5)
            if batch is None:
                if demo.all_sent.is_set() and demo.elapsed > demo.seconds + 30:
                    watcher.complaint = f"only {watcher.records} of {demo.total_sent} records arrived"
                continue
            if batch.gap is not None:
                _pass(watcher, batch.gap)
                continue
            for seq, value in enumerate(batch.to_arrow().column("value").to_pylist(), batch.seq):
                _check(watcher, seq, value)


def _pass(watcher: Watcher, gap: emb.Gap) -> None:
    """Accept the gap after the kill of all processes: reserved positions that were never acked as durable."""
    if gap.kind == GapKind.NEVER_DURABLE:
        watcher.gaps += 1
        watcher.latest = -1
    else:
        watcher.complaint = f"a gap: {gap}"


def _check(watcher: Watcher, seq: int, value: bytes) -> None:
    sender, number = _RECORD.unpack_from(value)
    expected = watcher.next_of.get(sender, 0)
    if number != expected:
        watcher.complaint = f"publisher {sender}: record {number} arrived instead of {expected}"
    if watcher.latest >= 0 and seq != watcher.latest + 1:
        watcher.complaint = f"position {seq} follows {watcher.latest}"
    watcher.next_of[sender], watcher.latest = number + 1, seq
    watcher.records += 1
    watcher.digest.update(struct.pack("<Q", seq) + value[: _RECORD.size])


def _screen(demo: Demo) -> Panel:
    bar = ProgressBar(total=demo.seconds, completed=min(demo.elapsed, demo.seconds), width=60)
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    for column in ("client", "records", "state"):
        table.add_column(column)
    for sender in demo.senders:
        table.add_row(
            f"publisher {sender.number}", f"{sender.sent:,}", f"{sender.acked:,} acked: on 2 of {REPLICAS} disks"
        )
    for watcher in demo.watchers:
        verdict = watcher.complaint or f"position {watcher.latest:,}, all in order   order hash {_hash(watcher)}"
        style = "red" if watcher.complaint else "green"
        table.add_row(f"subscriber {watcher.number}", f"{watcher.records:,}", Text(verdict, style=style))
    return Panel(Group(bar, Text(), table, Text(), *map(Text, demo.story[-6:])), title="Embarcadero: one order for all")


def _hash(watcher: Watcher) -> str:
    return str(watcher.digest.copy().hexdigest()[:12])


def _direct(demo: Demo) -> None:
    """Direct the act: kill a broker, wait for its restart, kill the sequencer, kill all, start again, stop sending."""
    demo.tell(f"{PUBLISHERS} publishers stripe their batches over {demo.brokers} brokers; ack=2, on 2 of 3 disks")
    _sleep_until(demo, demo.seconds * 0.2)
    victim = 1 % demo.brokers
    pid = demo.cluster.kill_broker(victim)
    demo.tell(f"broker {victim} is killed (kill -9 of process {pid}); publishers switch to the other brokers")
    while (incarnation := _incarnation(demo, victim)) == 1 and demo.elapsed < demo.seconds:
        time.sleep(0.1)
    demo.tell(f"broker {victim} is back: the supervisor started incarnation {incarnation}")
    _sleep_until(demo, demo.seconds * 0.4)
    pid, epoch = kill_sequencer(demo.cluster)
    since = time.monotonic()
    demo.tell(f"the sequencer is killed (kill -9 of process {pid}): ordering pauses")
    demo.takeover = watch_takeover(demo.cluster, pid, epoch, since, demo.acks)
    demo.tell(f"{demo.takeover}; no record is lost, duplicated or reordered")
    _sleep_until(demo, demo.seconds * 0.6)
    acked = sum(sender.acked for sender in demo.senders)
    killed = demo.cluster.kill_all()
    demo.tell(
        f"all {killed} processes are killed (kill -9), and shared memory is removed; {acked:,} records were acked"
    )
    took = demo.cluster.start()
    demo.tell(f"the cluster recovered from its disks in {took:.1f} s; publishers and subscribers continue")
    _sleep_until(demo, demo.seconds)
    demo.stop_sending.set()
    demo.tell("publishers stop; subscribers read to the end")


def _incarnation(demo: Demo, number: int) -> int:
    return next(broker.incarnation for broker in demo.cluster.report().brokers if broker.id == number)


def _sleep_until(demo: Demo, moment: float) -> None:
    time.sleep(max(0.0, moment - demo.elapsed))


def _run(demo: Demo, live: Live | None) -> None:
    senders = [threading.Thread(target=_send, args=(demo, s), daemon=True) for s in demo.senders]
    watchers = [threading.Thread(target=_watch, args=(demo, w), daemon=True) for w in demo.watchers]
    director = threading.Thread(target=_direct, args=(demo,), daemon=True)
    for thread in [*senders, *watchers, director]:
        thread.start()
    while any(thread.is_alive() for thread in [*senders, *watchers, director]):
        time.sleep(0.1)
        if live is not None:
            live.update(_screen(demo))
        if not director.is_alive() and not any(thread.is_alive() for thread in senders):
            demo.all_sent.set()


def _verdict(demo: Demo) -> dict[str, Any]:
    first, second = demo.watchers
    complaints = [w.complaint for w in demo.watchers if w.complaint]
    complaints += [s.first_wrong for s in demo.senders if s.first_wrong]
    complaints += [f"publisher {s.number}: {s.sent - s.acked} without ack" for s in demo.senders if s.sent != s.acked]
    if demo.takeover is None:
        complaints.append("no standby took over")
    if first.digest.digest() != second.digest.digest():
        complaints.append("the two subscribers saw different orders")
    return {
        "records": demo.total_sent,
        "seconds": round(demo.elapsed, 1),
        "brokers": demo.brokers,
        "publishers": PUBLISHERS,
        "seen": [w.records for w in demo.watchers],
        "restarts": 1,
        "takeover_ms": round(demo.takeover.pause_s * 1_000, 1) if demo.takeover else None,
        "order_hash": [_hash(w) for w in demo.watchers],
        "problems": complaints,
        "ok": not complaints and demo.total_sent > 0,
    }


def run_cli(brokers: int, seconds: float, json_out: bool) -> int:
    """Run the demo; return 0 if every promise held."""
    console = Console(stderr=json_out)
    console.print(f"Starting a cluster of {brokers} brokers and {REPLICAS} replicas ...")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="embarcadero-demo-"))
        cluster = RestartableCluster(Path(folder), brokers, REPLICAS)
        stack.callback(cluster.stop)
        cluster.start()
        with emb.connect(cluster.addresses) as log:
            log.create_topic("demo", order=5, replicas=REPLICAS, durable_on=2)
        demo = Demo(cluster, brokers, seconds)
        if console.is_terminal:
            with Live(_screen(demo), console=console, refresh_per_second=8) as live:
                _run(demo, live)
                live.update(_screen(demo))
        else:
            _run(demo, None)
            for line in demo.story:
                console.print(line, markup=False, soft_wrap=True)
        verdict = _verdict(demo)
    if json_out:
        print(json.dumps(verdict))  # noqa: T201 - asked for
    else:
        _summary(console, verdict)
    return 0 if verdict["ok"] else 1


def _summary(console: Console, verdict: dict[str, Any]) -> None:
    if verdict["ok"]:
        console.print(
            f"\n[bold green]All promises held.[/] {verdict['records']:,} records from {verdict['publishers']}"
            f" publishers went through {verdict['brokers']} brokers in {verdict['seconds']} s.\nMeanwhile, a broker was"
            f" killed, then the sequencer (acks paused for {verdict['takeover_ms']:,.0f} ms), then every process"
            f" together, and shared memory was removed.\nBoth subscribers saw each record once, at the same position,"
            f" and in each publisher's order (hash {verdict['order_hash'][0]})."
        )
    else:
        console.print("\n[bold red]A promise did not hold:[/]")
        for problem in verdict["problems"]:
            console.print(f"  - {problem}", markup=False)


# --- takeover ---------------------------------------------------------------------------------------------------------
# Kill the leader and observe the takeover: the new leader, and the length of the pause of acks.
_PATIENCE_S: Final = 20.0
_LOOK_S: Final = 0.01
_ACKS_AFTER: Final = 8
"""The pause is over after this number of acks in the new epoch."""

Moments = Callable[[], Sequence[float]]


class ObservedTakeover(NamedTuple):
    """A takeover after a kill: the killed process, the new leader and its epoch, the longest time without an ack."""

    killed: int
    role: str
    epoch: int
    pause_s: float

    def __str__(self) -> str:
        ms = self.pause_s * 1_000
        return f"{self.role} took over in epoch {self.epoch}; acks paused for {ms:,.0f} ms"


def kill_sequencer(cluster: RestartableCluster) -> tuple[int, int]:
    """SIGKILL the process of the leader; return its process id and its epoch."""
    leader = cluster.report().sequencer
    if not leader.pid:
        raise ClusterError("no sequencer leads at the moment", "see the logs of sequencers")
    os.kill(leader.pid, signal.SIGKILL)
    return leader.pid, leader.epoch


def watch_takeover(
    cluster: RestartableCluster, killed: int, ended: int, since: float, acks: Moments
) -> ObservedTakeover:
    """Wait until a standby leads and acks flow. `acks` returns the times of all acks so far, on the same clock."""
    role, epoch, seen = "", ended, since
    while time.monotonic() < since + _PATIENCE_S:
        time.sleep(_LOOK_S)
        if epoch == ended:
            try:
                now = cluster.report().sequencer
            except EmbarcaderoError:
                continue  # the files it reads are being written
            if now.epoch > ended:
                role, epoch, seen = candidate_role(now.candidate), now.epoch, time.monotonic()
        elif sum(moment > seen for moment in acks()) >= _ACKS_AFTER:
            return ObservedTakeover(killed, role, epoch, longest_pause(since, acks()))
    raise ClusterError(f"no standby took over within {_PATIENCE_S:.0f} s of the kill", "see the logs of sequencers")


def longest_pause(since: float, moments: Sequence[float]) -> float:
    """The longest time without an ack that ends after `since`, including a pause that began before it."""
    ordered = sorted(moments)
    before = [moment for moment in ordered if moment <= since][-1:]
    after = [moment for moment in ordered if moment > since]
    return max((second - first for first, second in pairwise([*(before or [since]), *after])), default=0.0)
