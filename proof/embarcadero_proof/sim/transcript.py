"""A run in plain words: the actions of processes in order, the faults, and the broken promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from embarcadero_proof.sim import history as h
from embarcadero_proof.sim.checkers.ledger import Violation

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

LINES_MAX: Final = 150
"""Number of lines before a violation. Earlier faults are always shown."""

_AFTER_US: Final = 1_000
_RUN_US: Final = 50_000
_DULL: Final = (" bytes ", "connects ", "gives up wire")


@dataclass(slots=True)
class Line:
    """An action of a process. Several numbered actions of the same kind become one line."""

    at: int
    who: str
    what: str  # with {} for the numbers, if there are any
    first: int | None = None
    last: int | None = None
    index: int | None = None  # index of the first number's batch, and below of the last
    last_index: int | None = None
    fault: bool = False
    until: int = 0

    def continues_with(self, next_line: Line) -> bool:
        """Whether the next line is the same action with the next number, soon after."""
        return (
            self.last is not None
            and next_line.at - max(self.at, self.until) <= _RUN_US
            and (self.who, self.what) == (next_line.who, next_line.what)
            and next_line.first == self.last + 1
        )

    def __str__(self) -> str:
        numbers = "" if self.first is None else _span(self.first, self.last)
        indices = "" if self.index is None else f" at {_span(self.index, self.last_index)}"
        return f"  {self.at / 1e6:11.6f}  {self.who:<16} {self.what.replace('{}', numbers)}{indices}"


def _span(first: int, last: int | None) -> str:
    return str(first) if last is None or last == first else f"{first}..{last}"


def _sent(e: h.Sent) -> Line:
    return Line(e.at, e.process, "sends batch {}", e.number, e.number)


def _settled(e: h.Settled) -> Line:
    what = f"learns: batch {{}} {e.verdict.value}" + (f" ({e.error})" if e.error else "")
    return Line(e.at, e.process, what, e.number, e.number, e.index, e.index)


def _delivered(e: h.Delivered) -> Line:
    what = f"reads lane {e.lane}, index {{}}" + (" (durable)" if e.durable else "")
    return Line(e.at, e.reader, what, e.index, e.index)


def _fault(e: h.Fault) -> Line:
    lasts = f" for {(e.until - e.at) / 1e6:.3f} s" if e.until > e.at else ""
    return Line(e.at, "FAULT", f"{e.kind}: {e.target}{lasts}", fault=True)


def _copies(e: h.Copies) -> Line | None:
    if e.copies >= e.needed:
        return None
    what = f"takes index {e.index} of lane {e.lane} as durable; {e.copies} of {e.needed} replicas have it"
    return Line(e.at, e.who, what)


def _topic(e: h.TopicMade) -> Line:
    return Line(e.at, "topic", f"{e.name}: order {e.order}, lane {e.lane}, R={e.replicas} A={e.durable_on}")


def _moved(e: h.Moved) -> Line:
    where = "its start or end" if e.index is None else str(e.index)
    return Line(e.at, e.reader, f"reads lane {e.lane} from {where}")


def _tail(e: h.TailRead) -> Line:
    return Line(e.at, e.process, f"learns: lane {e.lane} ends at {e.index}, durable through {e.durable_index}")


_DESCRIBE: Final[dict[type[h.Event], Callable[[Any], Line | None]]] = {
    h.Sent: _sent,
    h.Settled: _settled,
    h.ByReference: lambda e: Line(
        e.at, e.process, f"batch {e.number} is {'' if e.right else 'NOT '}the one at index {e.index} of lane {e.lane}"
    ),
    h.Delivered: _delivered,
    h.Fault: _fault,
    h.Copies: _copies,
    h.TopicMade: _topic,
    h.LaneMade: lambda e: Line(e.at, "topic", f"lane {e.lane} of topic {e.topic} is made"),
    h.SessionOpened: lambda e: Line(e.at, e.process, f"has session {e.session}, next is batch {e.expected}"),
    h.Moved: _moved,
    h.GapSeen: lambda e: Line(e.at, e.reader, f"sees a gap in lane {e.lane}: {e.kind} [{e.start}, {e.stop})"),
    h.TailRead: _tail,
    h.StartRead: lambda e: Line(e.at, e.process, f"learns: lane {e.lane} starts at {e.index}, hot {e.hot_index}"),
    h.LostSpan: lambda e: Line(e.at, "store", f"[{e.start}, {e.stop}) of lane {e.lane} is lost"),
    h.LossTold: lambda e: Line(e.at, e.process, f"learns: index {e.index} of lane {e.lane} was lost"),
    h.PublisherEnded: lambda e: Line(e.at, e.process, "has ended"),
    h.TrimmedTo: lambda e: Line(e.at, "store", f"lane {e.lane} is trimmed below {e.index}"),
    h.TieredTo: lambda e: Line(e.at, "tiering", f"lane {e.lane} is in its table below {e.index}"),
    h.FabricLost: lambda e: Line(e.at, "FAULT", "all processes end, and the memory is lost", fault=True),
    h.RoleFailed: lambda e: Line(e.at, e.process, f"FAILS: {e.error}"),
    h.DamageLeft: lambda e: Line(e.at, f"replica-{e.replica}", f"still has a wrong copy of {e.path}"),
    h.StillThere: lambda e: Line(e.at, e.reader, f"learned that {e.index} of lane {e.lane} is trimmed; it is there"),
    h.Healed: lambda e: Line(e.at, "world", "nothing is broken from here on"),
    h.Ended: lambda e: Line(e.at, "world", "ends"),
}  # fmt: skip


def lines(world: World) -> Iterator[Line]:
    """Yield all lines worth showing, in order. The run must have kept its trace."""
    events = iter(world.history)
    for step in world.trace.steps:
        if step.who == "history":
            event = next(events)
            describe = _DESCRIBE.get(type(event))
            line = describe(event) if describe is not None else None
            if line is not None:
                yield line
        elif not any(dull in step.what for dull in _DULL) and not step.what.startswith("FAULT"):
            yield Line(step.at, step.who, step.what.removeprefix("JOURNAL ")[:200])


def merged(separate: Iterator[Line]) -> list[Line]:
    """Merge runs of consecutive numbers into one line, at the moment of the first."""
    out: list[Line] = []
    open_runs: dict[str, Line] = {}
    for line in separate:
        run = open_runs.get(line.who)
        if run is not None and run.continues_with(line):
            run.last, run.last_index, run.until = line.last, line.index, line.at
            continue
        out.append(line)
        open_runs[line.who] = line
    return out


def transcript(world: World, violations: Sequence[Violation], title: str) -> str:
    """Return the story of a run up to its first violation."""
    first = min(violations, key=lambda violation: violation.at) if violations else None
    until_us = world.queue.now_us if first is None else first.at + _AFTER_US
    shown = merged(line for line in lines(world) if line.at <= until_us)
    recent = shown[-LINES_MAX:]
    earlier = [line for line in shown[:-LINES_MAX] if line.fault]
    plan = world.plan
    cast = (
        f"{plan.brokers} brokers on {plan.hosts} hosts, {plan.durable.replicas} replicas, "
        f"{len(plan.streams)} streams, {len(plan.readers)} readers, "
        f"{sum(world.faults.counts.values())} faults in {plan.fault_phase_us / 1e6:.0f} s"
    )
    out = [title, f"the run: {cast}"]
    if earlier:
        out += ["earlier faults:", *map(str, earlier), "and then:"]
    out += map(str, recent)
    out += [f"  {v.at / 1e6:11.6f}  BROKEN {v.promise}: {v.sentence}" for v in violations[:5]]
    return "\n".join([*out, *world.failures[:2]])
