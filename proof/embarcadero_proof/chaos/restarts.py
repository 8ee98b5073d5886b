"""Rounds of load with ack 2, kill -9 of every process at a random moment, removal of the fabric, restart, check.

The publishers stay connected the whole time. A round with too few acks counts as failed: its check proves nothing.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import embarcadero as emb
from embarcadero.node.local import RestartableCluster
from embarcadero.types import Order, Position
from embarcadero_proof.chaos.streams import Stream
from embarcadero_proof.chaos.truth import Truth, seen
from embarcadero_proof.machine import commit, machine_facts

TOPICS: Final = {"strong": Order.STRONG, "total": Order.TOTAL, "pinned": Order.BROKER}
STREAMS_PER_TOPIC: Final = 2
ACKS_LEAST: Final = 50
"""A round with fewer new acks than this, over all streams, counts as failed."""

_ACKS_WAIT_S: Final = 60.0
_READ_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run."""

    rounds: int = 100
    seed: int = 0
    brokers: int = 2
    replicas: int = 3
    durable_on: int = 2
    load_s: float = 1.5  # at most, from the first ack of a round to the kill
    record_bytes: int = 256
    wipe: bool = False  # remove one replica's disk, another one in each round
    clean: bool = False  # stop cleanly instead of killing, every other round


@dataclass(slots=True)
class Round:
    """The result of one round."""

    number: int
    ended: str = ""
    killed: int = 0
    wiped: int | None = None
    acks: int = 0
    start_s: float = 0.0
    first_ack_s: float = 0.0  # from the restart's beginning to the first ack of a record sent after the kill
    came_back: bool = False  # whether there was such an ack


@dataclass(slots=True)
class Report:
    """The findings of a run."""

    settings: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    acked: int = 0
    checked: int = 0
    killed: int = 0
    seconds: float = 0.0


class Restarts:
    """One run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.rng = random.Random(f"restarts:{settings.seed}")
        self.cluster = RestartableCluster(folder, settings.brokers, settings.replicas)
        self.truths = {name: Truth(name, int(order)) for name, order in TOPICS.items()}
        self.streams: list[Stream] = []
        self.report = Report(asdict(settings))

    def run(self, progress: Progress) -> Report:
        """Run all rounds, and a last check after every stream has all its answers."""
        began = time.monotonic()
        task = progress.add_task("starting", total=self.settings.rounds)
        try:
            self.cluster.start()
            self._begin_load()
            for number in range(self.settings.rounds):
                progress.update(task, description=f"round {number + 1}")
                self.report.rounds.append(self._round(number))
                progress.advance(task)
                if self.problems():
                    break
            progress.update(task, description="last check")
            self._end_load()
            self._check()
        finally:
            for stream in self.streams:
                stream.finish()
            self.cluster.stop()
        self.report.problems = self.problems()
        self.report.acked = sum(len(stream.acked) for stream in self.streams)
        self.report.checked = sum(truth.checked for truth in self.truths.values())
        self.report.killed = sum(round_.killed for round_ in self.report.rounds)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def problems(self) -> list[str]:
        """Return all problems so far."""
        found = [problem for truth in self.truths.values() for problem in truth.problems]
        found += [problem for stream in self.streams for problem in stream.problems]
        few = [r for r in self.report.rounds if r.acks < ACKS_LEAST]
        found += [f"round {r.number + 1}: only {r.acks} acks, so the round proves nothing" for r in few]
        lost = [r for r in self.report.rounds if not r.came_back]
        return found + [f"round {r.number + 1}: no ack within {_ACKS_WAIT_S:.0f} s of the restart" for r in lost]

    def _begin_load(self) -> None:
        settings = self.settings
        with emb.connect(self.cluster.addresses) as log:
            for name, order in TOPICS.items():
                log.create_topic(name, order=order, replicas=settings.replicas, durable_on=settings.durable_on)
        names = [name for name in TOPICS for _ in range(STREAMS_PER_TOPIC)]
        self.streams = [
            Stream(number, self.cluster.addresses, name, settings.record_bytes) for number, name in enumerate(names)
        ]
        for stream in self.streams:
            stream.start()

    def _end_load(self) -> None:
        for stream in self.streams:
            stream.finish()
        for stream in self.streams:
            stream.join(_READ_S)

    def _round(self, number: int) -> Round:
        round_, before = Round(number), self._acks()
        self._wait_until(lambda: self._acks() >= before + ACKS_LEAST)
        time.sleep(self.rng.uniform(0, self.settings.load_s))
        if self.settings.clean and number % 2:
            round_.ended = "stopped"
            self.cluster.stop()
        else:
            round_.ended = "killed"
            round_.killed = self.cluster.kill_all()
        round_.acks = self._acks() - before
        if self.settings.wipe:
            round_.wiped = number % self.settings.replicas
            self.cluster.wipe(round_.wiped)
        began, awaited = time.monotonic(), [stream.next_ack() for stream in self.streams]
        round_.start_s = round(self.cluster.start(), 3)
        round_.came_back = self._wait_until(lambda: any(ack.at_s is not None for ack in awaited))
        round_.first_ack_s = round(min((ack.at_s for ack in awaited if ack.at_s), default=began) - began, 3)
        self._check()
        return round_

    def _acks(self) -> int:
        return sum(len(stream.acked) for stream in self.streams)

    def _wait_until(self, holds: Callable[[], bool]) -> bool:
        give_up = time.monotonic() + _ACKS_WAIT_S
        pause = threading.Event()
        while not (held := holds()) and time.monotonic() < give_up:
            pause.wait(0.01)
        return held

    def _check(self) -> None:
        """Read every topic from its beginning, and check it against the earlier acks."""
        acked: dict[str, dict[int, dict[int, Position | None]]] = {name: {} for name in TOPICS}
        for stream in self.streams:
            acked[stream.topic][stream.number] = dict(stream.acked.copy())
        with emb.connect(self.cluster.addresses) as log:
            for name, truth in self.truths.items():
                table = log.read(name, timeout=_READ_S)
                truth.check(acked[name], seen(table, log.describe(name).lane))


def run_cli(settings: Settings, report: Path | None, json_out: bool) -> int:
    """Run, print and save a report; return 0 when no record was lost and no ack was false."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="embarcadero-chaos-") as folder, Progress(*columns, console=console) as bar:
        found = Restarts(settings, Path(folder)).run(bar)
    result = {"case": "restarts", "commit": commit(), "machine": machine_facts(), **asdict(found)}
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(result, indent=1) + "\n")
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        _print(Console(), found)
    return 1 if found.problems else 0


def _print(console: Console, found: Report) -> None:
    starts, acks = (sorted(getattr(r, name) for r in found.rounds) or [0.0] for name in ("start_s", "first_ack_s"))
    console.print(
        f"{len(found.rounds)} rounds, {found.killed:,} processes killed, {found.acked:,} records acked durable, "
        f"{found.checked:,} checks of acked records, {found.seconds:,.0f} s; "
        f"restart to ready {starts[len(starts) // 2]:.2f} s, to the first new ack {acks[len(acks) // 2]:.2f} s"
    )
    if not found.problems:
        console.print("[bold green]Every acked record is there, once, at its position, in order.[/]")
    for problem in found.problems[:20]:
        console.print(f"[red]{problem}[/]", highlight=False)
