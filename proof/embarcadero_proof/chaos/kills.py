"""`embarcadero-proof chaos kills`: kill one role again and again under load, and measure the pause each time.

pauses.py defines the measured pauses. At the end every ack is checked, as in the matrix.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import embarcadero as emb
from embarcadero.errors import BadValue, NotAvailable
from embarcadero.limits import MIB
from embarcadero.node.local import ended_by_signals
from embarcadero.types import Ack, Order
from embarcadero_proof.chaos.case import BROKERS, REPLICAS, Outcome, Performance
from embarcadero_proof.chaos.cases import Case
from embarcadero_proof.chaos.load import StreamPlan, Writer
from embarcadero_proof.chaos.operator import Operator
from embarcadero_proof.chaos.pauses import (
    BOUNDS_MS,
    PAUSE_WORDS,
    ROLES,
    WAIT_WORDS,
    Cost,
    calm_costs,
    costs,
    counts,
)
from embarcadero_proof.chaos.plots import draw_histogram, draw_timeline
from embarcadero_proof.chaos.timeline import percentiles, timeline
from embarcadero_proof.chaos.verdict import Judgement
from embarcadero_proof.machine import commit, machine_facts
from embarcadero_proof.sim.history import History, RoleFailed

_BACK_S: Final = 60.0
_PACE_S: Final = {"hand-over": 0.005, "sequencer": 0.01}
_PACE_S_USUAL: Final = 0.02
"""A stream can't show pauses that are shorter than the time between two of its batches."""

_PACE_S_BESIDE: Final = 0.05
"""Streams whose acks do not count are load beside those that do. At 20 ms this process and the cluster took 1.9 of two
cores together, and acks queued even without kills."""

_AT_REST_S: Final = 0.1
"""Acks still count this long after a hand-over: the old leader cleans up, all processes read the store."""

_LOOK_S: Final = 0.1
"""The interval of status checks: each takes 20 ms of a processor."""

_TURN_S: Final = 0.000_5
_AFTER_S: Final = (0.3, 0.8)  # of load once the role is back, before the next kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run."""

    role: str = "sequencer"
    times: int = 100
    log_mib: int = 0
    seed: int = 0
    brokers: int = BROKERS
    replicas: int = REPLICAS
    apart_s: float = 2.0  # the least time between two kills
    report: Path = Path("build/chaos/kills.json")


class Kills(Performance):
    """One cluster, one role, many kills."""

    def __init__(self, settings: Settings, folder: Path, progress: Progress) -> None:
        if settings.role not in ROLES:
            raise BadValue(f"there is no role {settings.role!r} to kill", f"use one of {', '.join(ROLES)}")
        if settings.role == "replica" and settings.replicas < REPLICAS:
            raise BadValue("acks can't continue without the killed replica", f"use at least {REPLICAS} replicas")
        case = Case(f"kills-{settings.role}", f"{settings.role}, {settings.times} times")
        super().__init__(case, folder, 0.0, brokers=settings.brokers, replicas=settings.replicas)
        self.rng = random.Random(f"kills:{settings.role}:{settings.seed}")
        self.settings, self.progress = settings, progress
        self.operator = Operator(self.cluster.folder)

    def _begin(self) -> None:
        super()._begin()
        self._until(self.operator.is_whole, _LOOK_S)

    def _clean_up(self) -> None:
        self.operator.close()
        super()._clean_up()

    def _publish(self, topics: list[Any], prefix: str, most: int | None = None) -> None:
        """Fill the log to the requested size, then start the measured load."""
        if not prefix and self.settings.log_mib:
            self._fill()
            topics = self.topics
        for topic in topics:
            for ack in (Ack.ORDERED, Ack.DURABLE):
                pace_s = self._pace_s(topic.order, ack) if not prefix else _PACE_S_USUAL
                plan = StreamPlan(f"{prefix}{topic.name}-ack{ack:d}", topic, int(ack), pace_s=pace_s, records=1)
                writer = Writer(plan, self.observer, self.cluster.addresses, most=most)
                writer.start()
                self.writers.append(writer)

    def _pace_s(self, order: int, ack: Ack) -> float:
        role = self.settings.role
        return _PACE_S.get(role, _PACE_S_USUAL) if counts(role, order, ack) else _PACE_S_BESIDE

    def _fill(self) -> None:
        """Make the topics' logs long; these records are not in the history, and readers begin after them."""
        task = self.progress.add_task("filling", total=self.settings.log_mib)
        share, value = self.settings.log_mib // 2, os.urandom(16 * 1024)
        with emb.connect(self.cluster.addresses) as log:
            for number, topic in enumerate(self.topics):
                if topic.order <= Order.BROKER:
                    continue
                with log.publisher(topic.name, ack=2) as publisher:
                    for _ in range(share):
                        for _ in range(MIB // len(value)):
                            publisher.send(value)
                        self.progress.advance(task)
                    publisher.flush()
                self.topics[number] = replace(topic, start=log.tail(topic.name).index)
        self.readers = [self._reader(topic, "durable") for topic in self.topics]
        self.progress.remove_task(task)

    def _get_into_trouble(self) -> None:
        task = self.progress.add_task(self.settings.role, total=self.settings.times)
        strike = self._hand_over if self.settings.role == "hand-over" else self._kill
        for _ in range(self.settings.times):
            began = time.monotonic()
            strike()
            wait_s = max(self.settings.apart_s - (time.monotonic() - began), self.rng.uniform(*_AFTER_S))
            time.sleep(wait_s)
            self.progress.advance(task)

    def _kill(self) -> None:
        ((role, pid),) = self.stage.roles(self.settings.role).items()
        time.sleep(_AT_REST_S)  # the question has kept this process busy
        with self.stage.noting("kill", role):
            os.kill(pid, signal.SIGKILL)
            self.stage.kills += 1
            flowing = self._acks_flow()
            self._until(flowing)
            self._until(lambda: self.cluster.pids().get(role, pid) != pid and self.operator.is_whole(), _LOOK_S)

    def _hand_over(self) -> None:
        leader = self.cluster.leader()
        time.sleep(_AT_REST_S)  # the question has kept this process busy
        with self.stage.noting("hand-over", leader):
            self.operator.hand_over()
            flowing = self._acks_flow()
            self._until(flowing)
            time.sleep(_AT_REST_S)
        time.sleep(2 * _AT_REST_S)  # a quiet time, for comparison
        self._until(self.operator.is_whole, _LOOK_S)

    def _acks_flow(self) -> Callable[[], bool]:
        """Return a check that each publisher has answers to all batches sent before this call, and one more."""
        before = [(writer, writer.sent) for writer in self.writers]
        return lambda: all(writer.settled > sent for writer, sent in before)

    def _until(self, done: Callable[[], bool], look_s: float = 0.02) -> None:
        give_up = time.monotonic() + _BACK_S
        while not done():
            if time.monotonic() > give_up:
                error = f"{self.settings.role} was not back within {_BACK_S:.0f} s"
                self.observer.saw(RoleFailed, process="cluster", error=error)
                return
            time.sleep(look_s)


@contextmanager
def no_pauses_of_our_own() -> Iterator[None]:
    """Avoid pauses in this process: publishers and readers are its threads, so they would count as pauses of acks.

    The garbage collector visits all recorded events, which takes longer and longer. A thread that holds the interpreter
    keeps it for 5 ms while others wait.
    """
    turn_s, collects = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(turn_s)
        if collects:
            gc.enable()


def run_cli(settings: Settings, json_out: bool) -> int:
    """Run, print the figures, save them with plots; return 0 when no record was lost and no ack was false."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="embarcadero-chaos-") as folder,
        Progress(*columns, console=Console(stderr=True)) as bar,
        no_pauses_of_our_own(),
    ):
        outcome = Kills(settings, Path(folder), bar).run()
    measured = costs(outcome.history, settings.role)
    found = outcome.judgement
    if missing := measured.count(None):
        found.problems.append(f"after {missing} of {len(measured)} kills a publisher had no ack")
    result = _report(settings, outcome, [cost for cost in measured if cost is not None])
    settings.report.parent.mkdir(parents=True, exist_ok=True)
    settings.report.write_text(json.dumps(result, indent=1) + "\n")
    _draw(settings, result, outcome.history, found)
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        _print(Console(), result, settings.report)
    return 0 if found.good else 1


def _report(settings: Settings, outcome: Outcome, measured: list[Cost]) -> dict[str, Any]:
    calm = calm_costs(outcome.history, settings.role)
    return {
        "command": f"embarcadero-proof chaos kills --role {settings.role} --times {settings.times} --log-mib "
        f"{settings.log_mib} --seed {settings.seed} --brokers {settings.brokers} "
        f"--replicas {settings.replicas}",
        "commit": commit(),
        "machine": machine_facts(),
        "role": settings.role,
        "log_mib": settings.log_mib,
        "brokers": settings.brokers,
        "replicas": settings.replicas,
        "pause": PAUSE_WORDS[settings.role],
        "figures_ms": _figures([cost.pause_ms for cost in measured]),
        "bounds_ms": BOUNDS_MS[settings.role],
        "calm_ms": _figures([cost.pause_ms for cost in calm]),
        "wait": WAIT_WORDS,
        "wait_figures_ms": _figures([cost.wait_ms for cost in measured]),
        "wait_calm_ms": _figures([cost.wait_ms for cost in calm]),
        "pauses_ms": [round(cost.pause_ms, 1) for cost in measured],
        "waits_ms": [round(cost.wait_ms, 1) for cost in measured],
        "kills": outcome.kills,
        "good": outcome.judgement.good,
        "seconds": outcome.seconds,
        **asdict(outcome.judgement),
    }


def _figures(values: list[float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in percentiles(values).items()}


def _draw(settings: Settings, result: dict[str, Any], history: History, found: Judgement) -> None:
    machine, path = result["machine"], settings.report
    footer = f"Embarcadero {result['commit']}, {machine['cores']} cores, {machine['cpu']}, {machine['when']}"
    log = f", log of {settings.log_mib} MiB" if settings.log_mib else ""
    if (settings.brokers, settings.replicas) != (BROKERS, REPLICAS):
        log += f"; brokers: {settings.brokers}, replicas: {settings.replicas}"
    what = "Planned hand-over" if settings.role == "hand-over" else f"{settings.role.capitalize()} killed"
    series = {result["pause"]: result["pauses_ms"], result["wait"]: result["waits_ms"]}
    try:
        draw_histogram(series, what + log, BOUNDS_MS[settings.role], footer, path.with_suffix(".png"))
        draw_timeline(
            timeline(history), f"{settings.role}, {settings.times} times",
            "all promises kept" if found.good else f"{len(found.problems)} problems", found.good,
            path.with_name(f"{path.stem}-timeline.png"),
        )  # fmt: skip
    except NotAvailable:
        pass


def _print(console: Console, result: dict[str, Any], path: Path) -> None:
    bounds = ", ".join(f"{name} {value:g} ms" for name, value in result["bounds_ms"].items())
    title = f"{result['role']}, {len(result['pauses_ms'])} times"
    table = Table(Column(title, no_wrap=True), "p50", "p99", "max", box=None, pad_edge=False)
    table.add_row(result["pause"], *_cells(result["figures_ms"]))
    table.add_row("[dim]... without a kill", *_cells(result["calm_ms"]))
    table.add_row(result["wait"], *_cells(result["wait_figures_ms"]))
    table.add_row("[dim]... without a kill", *_cells(result["wait_calm_ms"]))
    console.print(table)
    console.print(f"[dim]{result['pause']}: {bounds}[/]")
    console.print(
        f"{result['kills']:,} processes killed, {result['acked']:,} batches acked, {result['unknown']:,} with an "
        f"unknown outcome, {result['delivered']:,} read, {result['seconds']:,.0f} s; see {path.with_suffix('.png')}"
    )
    if result["good"]:
        console.print("[bold green]Every acked batch is there, once, at its position, in order.[/]")
    for problem in result["problems"][:20]:
        console.print(f"[red]{problem}[/]", highlight=False)


def _cells(figures: dict[str, float]) -> list[str]:
    return [f"{figures[name]:,.1f} ms" if name in figures else "" for name in ("p50", "p99", "max")]
