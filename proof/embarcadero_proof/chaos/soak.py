"""`chaos soak`: topics, sessions, connections, subscribers and leaders come and go; resources must not accumulate.

Samples of every role: open descriptors, memory mappings, mapped shared memory, mappings of removed files, anonymous
memory; and the disks, the fabric and the store of the whole cluster. A series is flat if its growth in the second half
of the run is within the allowance of its kind. The growth is the slope times the length of that half; the slope is the
median of the slopes between all pairs of samples (Theil and Sen). The first half is for caches to fill.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import embarcadero as emb
from embarcadero.config import load
from embarcadero.errors import NotAvailable, Retriable, TimedOut
from embarcadero.limits import LANES_MAX, MIB
from embarcadero.node.local import LocalCluster, ended_by_signals
from embarcadero.node.standby import hand_over
from embarcadero.placement.store import SqliteStore
from embarcadero_proof.chaos.plots import draw_series
from embarcadero_proof.machine import commit, machine_facts

CLUSTER: Final = "cluster"
CLIENT: Final = "client"


class Allowance(NamedTuple):
    """The allowed growth of a series in the second half: an amount, or a share of its median if that is more."""

    amount: float
    share: float
    unit: str = ""


ALLOWANCES: Final = {
    "descriptors": Allowance(4, 0.0),
    "mappings": Allowance(12, 0.02),
    "mapped shared memory": Allowance(4 * MIB, 0.02, "bytes"),
    "mappings of removed files": Allowance(4, 0.0),
    "anonymous memory": Allowance(4 * MIB, 0.05, "bytes"),
    "disk": Allowance(4 * MIB, 0.05, "bytes"),
    "fabric": Allowance(4 * MIB, 0.02, "bytes"),
    "store": Allowance(256 * 1024, 0.05, "bytes"),
    "store rows": Allowance(8, 0.02),
}
"""By kind of series. Counts have little slack: a leak grows with every topic, and there are hundreds."""

RULE: Final = (
    "A series is flat if the median slope between all pairs of samples of the second half, times the length of that "
    "half, is at most: "
    + "; ".join(
        f"{kind} {_one.amount / MIB:g} MiB" if _one.unit else f"{kind} {_one.amount:g}"
        for kind, _one in ALLOWANCES.items()
    )
    + "; or 2 to 5 % of the median where that is more."
)  # fmt: skip

_LANES_SHARE: Final = 0.8
"""The share of a generation's lanes that a run may use: deleted topics keep theirs until the next restart."""
_TOPICS_PER_ROUND: Final = 4
_RECORDS: Final = 20
_MOVES: Final = 20  # of a session, over a connection that stays open
_SESSIONS: Final = 1_024  # rows of a table: the moves of about 50 rounds
_SAMPLES_MIN: Final = 8
_PAIRS_MAX: Final = 400
_KINDS_OF_TOPICS: Final = (
    {"order": 5, "replicas": 2}, {"order": 2, "replicas": 1}, {"order": 0, "replicas": 1}, {"order": 1, "replicas": 0},
    {"order": 2, "replicas": 0}, {"order": 5, "replicas": 1, "on_gap": "skip"}, {"order": 0, "replicas": 0},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run."""

    seconds: float = 900.0
    seed: int = 0
    brokers: int = 2
    replicas: int = 2
    samples: int = 60
    report: Path = Path("build/chaos/soak.json")


@dataclass(slots=True)
class Series:
    """One resource of one role over time."""

    role: str
    kind: str
    at_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def half(self) -> tuple[list[float], list[float]]:
        """The samples of the second half of the run."""
        first = bisect_time(self.at_s, self.at_s[-1] / 2) if self.at_s else 0
        return self.at_s[first:], self.values[first:]

    def growth(self) -> float:
        """Return the growth in the second half, by the median slope."""
        at_s, values = self.half()
        return slope(at_s, values) * (at_s[-1] - at_s[0]) if len(at_s) > 1 else 0.0

    def allowed(self) -> float:
        """Return the allowed growth."""
        allowance, values = ALLOWANCES[self.kind], self.half()[1]
        return max(allowance.amount, allowance.share * median(values)) if values else allowance.amount

    @property
    def flat(self) -> bool:
        """Whether the growth is within the allowance."""
        return self.growth() <= self.allowed()


def bisect_time(at_s: Sequence[float], from_s: float) -> int:
    """Return the number of the first sample at or after a time."""
    return next((number for number, each in enumerate(at_s) if each >= from_s), len(at_s))


def slope(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of samples: a few outliers do not change it."""
    step = max(1, len(at_s) * len(at_s) // (2 * _PAIRS_MAX * 50))
    pairs = list(combinations(zip(at_s, values, strict=True), 2))[::step]
    slopes = [(late[1] - early[1]) / (late[0] - early[0]) for early, late in pairs if late[0] > early[0]]
    return median(slopes) if slopes else 0.0


# --- looking at processes ---------------------------------------------------------------------------------------------
def process_facts(pid: int, fabric: str) -> dict[str, float]:
    """Return the resources of one process. Raises OSError when it is gone."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line for line in maps if fabric in line]
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "mappings": len(maps),
        "mapped shared memory": sum(_mapped(line) for line in shared),
        "mappings of removed files": sum(line.endswith("(deleted)") for line in shared),
        "anonymous memory": int(status["RssAnon"].split()[0]) * 1024,
    }


def _mapped(line: str) -> int:
    start, _, end = line.split(maxsplit=1)[0].partition("-")
    return int(end, 16) - int(start, 16)


def folder_bytes(folder: Path) -> int:
    """Return the size of the files below a folder; files that disappear meanwhile count as empty."""
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk continues when a folder is removed meanwhile
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_blocks * 512
    return total


def cluster_facts(cluster: LocalCluster, fabric: str) -> dict[str, float]:
    """Return the resources of the cluster as a whole."""
    store = SqliteStore(cluster.folder.store_path)
    try:
        rows = len(store.list(""))
    finally:
        store.close()
    return {
        "disk": sum(folder_bytes(folder) for folder in cluster.data_dir.glob("replica-*")),
        "fabric": folder_bytes(Path(fabric)),
        "store": sum(path.stat().st_size for path in cluster.folder.store_path.parent.glob("store*") if path.is_file()),
        "store rows": rows,
    }


class Watch:
    """Samples of all series of one run."""

    def __init__(self, cluster: LocalCluster, client_pid: int) -> None:
        self._cluster, self._client = cluster, client_pid
        self._began_s = time.monotonic()
        self._pids: dict[str, int] = {}
        self.fabric = cluster.folder.require_running().fabric
        self.series: dict[tuple[str, str], Series] = {}
        self.restarts: list[str] = []

    def look(self) -> None:
        """Take a sample of all series."""
        at_s = time.monotonic() - self._began_s
        pids = self._cluster.pids() | {CLIENT: self._client}
        for role, pid in pids.items():
            if self._pids.get(role, pid) != pid:
                self.restarts.append(f"{role} after {at_s:.0f} s")
            with suppress(OSError):
                if pid:
                    self._note(role, process_facts(pid, self.fabric), at_s)
        self._pids = pids
        self._note(CLUSTER, cluster_facts(self._cluster, self.fabric), at_s)

    def _note(self, role: str, facts: Mapping[str, float], at_s: float) -> None:
        for kind, value in facts.items():
            series = self.series.setdefault((role, kind), Series(role, kind))
            series.at_s.append(at_s)
            series.values.append(value)

    def now(self, kinds: Sequence[str]) -> dict[tuple[str, str], float]:
        """Return the last samples of some kinds."""
        return {key: series.values[-1] for key, series in self.series.items() if key[1] in kinds}


# --- load ----------------------------------------------------------------------------------------------------------
class Churn:
    """Creates topics, sessions, connections, subscribers and leaders, and removes all of them again."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster, self._rng = cluster, random.Random(f"soak:{seed}")
        self._log = emb.connect(cluster.addresses)
        self._log.create_topic("standing", order=5, replicas=1, retention_bytes=4 * MIB)
        self._standing = self._log.publisher("standing", ack=1)
        self.done = dict.fromkeys(("rounds", "topics", "records", "sessions", "moves", "connections", "takeovers"), 0)

    def round(self, topics: int = _TOPICS_PER_ROUND, take_over: bool = False) -> None:
        """Run one round: everything that it creates is gone at its end."""
        self.done["rounds"] += 1
        for _ in range(_RECORDS):
            self._standing.send(self._rng.randbytes(8 * 1024))
        self._standing.flush()
        for _ in range(_MOVES):
            self._log.open_session("standing", "moves", self.done["moves"])
            self.done["moves"] += 1
        with emb.connect(self._cluster.addresses) as log:
            self.done["connections"] += 1
            for turn in range(topics):
                number = self.done["topics"]
                kind = _KINDS_OF_TOPICS[number % len(_KINDS_OF_TOPICS)]
                self._topic(log if turn else self._log, f"soak-{number}", kind)
        if take_over:
            hand_over(self._cluster.folder)
            self.done["takeovers"] += 1

    def _topic(self, log: emb.Log, name: str, kind: Mapping[str, Any]) -> None:
        """Run the life of one topic: sessions, a table, readers, a trim, progress, another version, its end."""
        made = log.create_topic(name, **kind)
        self.done["topics"] += 1
        ack = 2 if made.replicas else 1
        for session in (None, "named") if made.order >= 2 else (None,):
            with log.publisher(name, ack=ack, session=session) as publisher:
                self.done["sessions"] += 1
                values = [self._rng.randbytes(512) for _ in range(_RECORDS)]
                if session is None:
                    for value in values:
                        publisher.send(value, key=b"k")
                else:  # named sessions take whole batches
                    publisher.publish(pa.record_batch({"value": pa.array(values, pa.binary())}), partition=None)
                self.done["records"] += _RECORDS
        found = log.read(name)
        if made.order >= 2:
            with log.subscribe(name, start="earliest", read="ordered") as reader:
                reader.poll(timeout=5.0)
            log.trim(name, before_seq=len(found) // 2)
        log.note_progress(name, "soak", {made.lane: (1, 1)}, topic_id=made.id)
        log.alter_topic(name, partitions=2)
        log.delete_topic(name)

    def close(self) -> None:
        """End the standing publisher and its connection."""
        self._standing.close()
        self._log.close()


def settled(
    watch: Watch, base: Mapping[tuple[str, str], float], slack: Mapping[str, float], within_s: float = 60.0
) -> dict[str, tuple[float, float]]:
    """Wait until no role holds more than at the base, plus the slack of its kind for things opened once for all topics.

    Returns the roles that still hold more when the time is over.
    """
    give_up = time.monotonic() + within_s
    while True:
        watch.look()
        now = watch.now([*slack])
        more = {f"{role}: {kind}": (base[role, kind], value)
                for (role, kind), value in now.items() if value > base[role, kind] + slack[kind]}  # fmt: skip
        if not more or time.monotonic() > give_up:
            return more
        time.sleep(0.25)


def small_cluster(brokers: int, replicas: int) -> LocalCluster:
    """Start a cluster that reaches limits soon: small segments, so that retention bounds the disk of the standing
    topic; small tables of sessions, because a session takes a row that was never used while there is one."""
    config = load(None, {"replica.segment_bytes": MIB, "fabric.sessions": _SESSIONS})
    return LocalCluster(brokers, replicas=replicas, log_bytes=32 * MIB, config=config)


# --- a run ------------------------------------------------------------------------------------------------------------
def run(settings: Settings, report: Callable[[float], None] = lambda _share: None) -> tuple[Watch, Churn]:
    """Run the load for `settings.seconds`, with `settings.samples` samples."""
    with ExitStack() as stack:
        cluster = stack.enter_context(small_cluster(settings.brokers, settings.replicas))
        churn = Churn(cluster, settings.seed)
        stack.callback(churn.close)
        watch = Watch(cluster, os.getpid())
        began, looked = time.monotonic(), 0
        pace_s = settings.seconds * _TOPICS_PER_ROUND / (LANES_MAX * _LANES_SHARE)
        while (past_s := time.monotonic() - began) < settings.seconds:
            report(past_s / settings.seconds)
            round_s = time.monotonic()
            with suppress(Retriable, TimedOut):
                churn.round(take_over=churn.done["rounds"] % 10 == 9)
            if past_s * settings.samples >= looked * settings.seconds:
                looked += 1
                watch.look()
            time.sleep(max(0.0, pace_s - (time.monotonic() - round_s)))
        watch.look()
        return watch, churn


def result_of(settings: Settings, watch: Watch, churn: Churn) -> dict[str, Any]:
    """Return the report."""
    series = list(watch.series.values())
    enough = all(len(each.half()[1]) >= _SAMPLES_MIN for each in series)
    return {
        "command": f"embarcadero-proof chaos soak --seconds {settings.seconds:g} --seed {settings.seed} "
        f"--brokers {settings.brokers} --replicas {settings.replicas}",
        "commit": commit(),
        "machine": machine_facts(),
        "rule": RULE,
        "seconds": settings.seconds,
        "done": churn.done,
        "restarts": watch.restarts,
        "series": [
            asdict(each) | {"growth": each.growth(), "allowed": each.allowed(), "flat": each.flat} for each in series
        ],
        "good": enough and all(each.flat for each in series) and not watch.restarts,
        "enough": enough,
    }


def run_cli(settings: Settings, json_out: bool) -> int:
    """Run, print the table, save the report and a plot; return 0 when everything is flat."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        ended_by_signals(),
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("soak", total=1.0)
        watch, churn = run(settings, lambda share: bar.update(task, completed=share))
    result = result_of(settings, watch, churn)
    settings.report.parent.mkdir(parents=True, exist_ok=True)
    settings.report.write_text(json.dumps(result, indent=1) + "\n")
    with suppress(NotAvailable):
        draw_series(_pictures(watch), f"soak of {settings.seconds:g} s", settings.report.with_suffix(".png"))
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        _print(Console(), result, settings.report)
    return 0 if result["good"] else 1


def _pictures(watch: Watch) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return series to draw, by kind and role."""
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for (role, kind), series in watch.series.items():
        unit = MIB if ALLOWANCES[kind].unit else 1
        title = f"{kind}, MiB" if ALLOWANCES[kind].unit else kind
        found.setdefault(title, {})[role] = series.at_s, [value / unit for value in series.values]
    return found


def _rows(series: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for each in series:
        unit = MIB if ALLOWANCES[each["kind"]].unit else 1
        suffix = " MiB" if unit == MIB else ""
        numbers = (each["values"][0], median(each["values"]), each["values"][-1], each["growth"], each["allowed"])
        cells = (f"{number / unit:,.1f}{suffix}" for number in numbers)
        yield each["role"], each["kind"], *cells, "flat" if each["flat"] else "[red]grows[/]"


def _print(console: Console, result: dict[str, Any], path: Path) -> None:
    heads = ("role", "what", "first", "median", "last", "growth", "allowed", "")
    table = Table(*heads, box=None, pad_edge=False)
    for row in _rows(result["series"]):
        table.add_row(*row)
    console.print(table)
    done = ", ".join(f"{count:,} {name}" for name, count in result["done"].items())
    console.print(f"{done} in {result['seconds']:,.0f} s; see {path.with_suffix('.png')}")
    for restart in result["restarts"]:
        console.print(f"[red]a process ended and was started again: {restart}[/]")
    if not result["enough"]:
        console.print(f"[red]too few samples: at least {_SAMPLES_MIN} in the second half; use more seconds[/]")
    if result["good"]:
        console.print("[bold green]Everything is flat.[/]")
