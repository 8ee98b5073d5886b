"""Actors: role code that is stopped before each memory primitive, without threads.

Role code is a function of its inputs: the lines and answers that it sees. For each step an actor runs from its
beginning with all its earlier inputs, until it reaches the next primitive; there an exception stops it. That primitive,
and the stores before it, are a node of the actor's tree; the next input leads to a child. Nodes are kept, so the code
runs once for each distinct sequence of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from embarcadero.errors import BadRegion, EmbarcaderoError, InvariantBroken, invariant
from embarcadero.fabric.layout import SUPERBLOCK
from embarcadero.fabric.region import Bytes, Shape, write_superblock
from embarcadero.limits import LINE_BYTES

GENERATION = 1
_SMALL_BYTES = 4_096
"""Regions up to this size are compared as a whole to find stores; in larger ones only lines that a primitive named."""

_POOLED_BYTES_MIN = 65_536

_STEPS_MAX = 400
"""An actor with more steps will not end."""


_pool: dict[int, list[Bytes]] = {}
"""Zeroed memory for large regions, by size: new memory costs far more than zeroing the few used lines."""


def _blank(size: int) -> Bytes:
    free = _pool.get(size)
    return free.pop() if free else np.zeros(size, dtype=np.uint8)


class Op(NamedTuple):
    """The next step of an actor."""

    kind: str  # flush, invalidate, fence, wait, call, end
    lines: tuple[int, ...] = ()
    call: tuple[Any, ...] = ()


class Seen(NamedTuple):
    """The input of an actor's step: lines that changed for it, and the answer to a call."""

    lines: tuple[tuple[int, bytes], ...]
    answer: Any = None


class Leak(NamedTuple):
    """A primitive that an actor leaves out, in regions whose name contains `region`, from byte `first` to `last`."""

    actor: str
    primitive: str
    region: str = ""
    first: int = 0
    last: int = 1 << 62

    def leaves_out(self, actor: str, primitive: str, region: str, offset: int) -> bool:
        """Whether this primitive is left out."""
        named = self.region in region and self.first <= offset < self.last
        return actor == self.actor and primitive == self.primitive and (primitive == "fence" or named)


@dataclass(slots=True)
class Node:
    """An actor before its next step."""

    op: Op
    stores: tuple[tuple[int, bytes], ...]  # since the step before, whole lines
    facts: tuple[Any, ...]  # reported since then
    made: frozenset[str]  # regions made since then
    view: dict[int, bytes]  # lines that it has named, as it sees them
    asked: tuple[int, ...]  # lines that it has read since its last wait
    error: str = ""
    above: tuple[int, Seen] | None = None
    missing: frozenset[str] = frozenset()  # regions that it did not find since its last wait
    key: Any = None  # all its state, if it called `remembers` since the step before
    reads: set[int] = field(default_factory=set)  # lines that it may read from here on, as far as known
    writes: set[int] = field(default_factory=set)
    parents: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.op.kind in ("invalidate", "wait"):
            self.reads.update(self.op.lines, self.asked)
        elif self.op.kind == "flush":
            self.writes.update(self.op.lines)


class Lines:
    """Numbers of all lines that an actor named, and their initial contents."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        self.names: list[tuple[str, int]] = []
        self.first: list[bytes] = []
        self.regions: dict[str, tuple[Shape, bytes]] = {}  # made before the beginning: shape, and the bytes up to zeros

    def number(self, region: str, line: int) -> int:
        """Return the number of a line of a region."""
        key = (region, line)
        if key not in self.numbers:
            self.numbers[key] = len(self.names)
            self.names.append(key)
            start = line * LINE_BYTES
            data = self.regions[region][1][start : start + LINE_BYTES] if region in self.regions else b""
            self.first.append(data.ljust(LINE_BYTES, b"\0"))
        return self.numbers[key]

    def describe(self, number: int) -> str:
        """Describe a line in words."""
        region, line = self.names[number]
        return f"{region}[{line * LINE_BYTES}]"


class Suspended(BaseException):
    """The actor has reached its next primitive. Not an Exception: role code must not catch it."""


class StepRegion:
    """A region as an actor sees it during one execution."""

    def __init__(self, stage: Stage, name: str, shape: Shape, data: Bytes, writable: bool) -> None:
        self._stage, self.name, self.shape, self.data, self.writable = stage, name, shape, data, writable

    def flush(self, offset: int, length: int) -> None:
        self._stage.primitive("flush", self, offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        self._stage.primitive("invalidate", self, offset, length)

    def reserve(self, offset: int, length: int) -> None:
        """Memory always has space."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(slots=True)
class Stage:
    """One execution of an actor: its fabric, and the model that it calls."""

    actor: str
    lines: Lines
    history: Sequence[Seen]
    leaks: Sequence[Leak] = ()
    left_out: frozenset[str] = frozenset()  # steps that the actor's own code must leave out
    generation: int = GENERATION
    coherent_only: bool = False
    _at: int = 0
    _regions: dict[str, StepRegion] = field(default_factory=dict)
    _named: dict[int, StepRegion] = field(default_factory=dict)
    _asked: dict[int, None] = field(default_factory=dict)
    _before: dict[str, bytes] = field(default_factory=dict)  # small regions as they were after the last step
    _before_lines: dict[int, bytes] = field(default_factory=dict)
    _made: set[str] = field(default_factory=set)
    _there: set[str] = field(default_factory=set)  # regions that it knows to exist
    _missing: set[str] = field(default_factory=set)
    _facts: list[Any] = field(default_factory=list)
    _key: Any = None

    # --- what actors use ----------------------------------------------------------------------------------------------
    def report(self, *fact: Any) -> None:
        """Report a fact that the checks need."""
        self._facts.append(fact)

    def call(self, name: str, *arguments: Any) -> Any:
        """Do an action outside memory in one step: a transaction of the store, a write to a disk."""
        return self._pause(Op("call", (), (name, *arguments)))

    def wait(self) -> None:
        """Wait until a line or region changes that was read since the last wait."""
        self._pause(Op("wait", tuple(self._asked)))
        self._asked.clear()
        self._missing.clear()

    def wait_for(self, name: str) -> None:
        """Wait until a condition holds."""
        self._pause(Op("wait", (), (name,)))

    def remembers(self, *key: Any) -> None:
        """State that all later steps depend only on this key and on the visible lines: earlier steps are forgotten."""
        self._key = key

    def without(self, step: str) -> bool:
        """Whether this step is left out on purpose."""
        return step in self.left_out

    # --- the fabric ---------------------------------------------------------------------------------------------------
    def create(self, name: str, shape: Shape) -> StepRegion:
        data = _blank(shape.size)
        write_superblock(data, shape, self.generation)
        if name in self._there or name in self.lines.regions:
            raise BadRegion(f"region {name} exists already", "")
        self._made.add(name)
        self._there.add(name)
        self.lines.regions.setdefault(f"~{name}", (shape, bytes(data[: SUPERBLOCK.itemsize])))
        region = self._regions[name] = StepRegion(self, name, shape, data, True)
        self._before[name] = bytes(data[: SUPERBLOCK.itemsize]).ljust(min(shape.size, _SMALL_BYTES), b"\0")
        return region

    def attach(self, name: str, writable: bool = False) -> StepRegion:
        found = self._regions.get(name)
        if found is not None:
            found.writable |= writable
            return found
        if not self.exists(name):
            raise BadRegion(f"region {name} does not exist", "")
        shape, head = self.lines.regions.get(name) or self.lines.regions[f"~{name}"]
        data = _blank(shape.size)
        data[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        region = self._regions[name] = StepRegion(self, name, shape, data, writable)
        self._before[name] = bytes(data[:_SMALL_BYTES])
        return region

    def exists(self, name: str) -> bool:
        if name in self.lines.regions or name in self._there:
            return True
        found = bool(self._pause(Op("call", (), ("exists", name))))
        (self._there if found else self._missing).add(name)
        return found

    def names(self) -> list[str]:
        return sorted({name for name in self.lines.regions if name[0] != "~"} | self._there)

    def remove(self, name: str) -> None:
        """Do nothing: regions stay until all actors have ended."""

    def fence(self) -> None:
        if not any(leak.leaves_out(self.actor, "fence", "", 0) for leak in self.leaks):
            self._pause(Op("fence"))

    def primitive(self, kind: str, region: StepRegion, offset: int, length: int) -> None:
        """Flush or invalidate."""
        invariant(offset >= 0 and offset + length <= region.shape.size, "a primitive stays inside its region")
        first, last = offset // LINE_BYTES, (offset + max(1, length) - 1) // LINE_BYTES
        numbers = tuple(self.lines.number(region.name, line) for line in range(first, last + 1))
        for number in numbers:
            self._named.setdefault(number, region)
        if any(leak.leaves_out(self.actor, kind, region.name, offset) for leak in self.leaks):
            return
        if kind == "invalidate":
            self._asked.update(dict.fromkeys(numbers))
        self._pause(Op(kind, numbers))

    # --- stopping and continuing --------------------------------------------------------------------------------------
    def _pause(self, op: Op) -> Any:
        if self._at == len(self.history):
            raise Suspended(op)
        seen = self.history[self._at]
        self._at += 1
        for number, data in seen.lines:
            self._line(number)[:] = np.frombuffer(data, dtype=np.uint8)
        if self._at == len(self.history):
            self._facts.clear()
            self._made.clear()
            self._key = None
            self._before = {name: bytes(region.data[:_SMALL_BYTES]) for name, region in self._regions.items()}
            self._before_lines = {number: self._line(number).tobytes() for number in self._named}
        return seen.answer

    def _line(self, number: int) -> Bytes:
        name, line = self.lines.names[number]
        region = self._named.get(number) or self._regions[name]
        return region.data[line * LINE_BYTES : (line + 1) * LINE_BYTES]

    def _stores(self) -> dict[int, bytes]:
        """Return the lines with stores since the last step."""
        found: dict[int, bytes] = {}
        for name, region in self._regions.items():
            if not region.writable:
                continue
            now, before = bytes(region.data[:_SMALL_BYTES]), self._before[name]
            if now != before:
                for start in range(0, len(now), LINE_BYTES):
                    line = now[start : start + LINE_BYTES].ljust(LINE_BYTES, b"\0")
                    if line != before[start : start + LINE_BYTES].ljust(LINE_BYTES, b"\0"):
                        number = self.lines.number(name, start // LINE_BYTES)
                        self._named.setdefault(number, region)
                        found[number] = line
        for number, region in self._named.items():
            if region.writable and self.lines.names[number][1] * LINE_BYTES >= _SMALL_BYTES:
                now = self._line(number).tobytes()
                if now != self._before_lines.get(number, self.lines.first[number]):
                    found[number] = now
        return found

    def _release(self) -> None:
        for number in self._named:
            self._line(number)[:] = 0
        for region in self._regions.values():
            if region.shape.size > _POOLED_BYTES_MIN:
                region.data[:_SMALL_BYTES] = 0
                _pool.setdefault(region.shape.size, []).append(region.data)

    def run(self, play: Callable[[Stage], None]) -> Node:
        """Run the actor to its next step."""
        error = ""
        try:
            play(self)
            op = Op("end")
        except Suspended as suspended:
            op = suspended.args[0]
        except (EmbarcaderoError, InvariantBroken) as failure:
            op, error = Op("end"), f"{type(failure).__name__}: {failure}"
        if len(self.history) > _STEPS_MAX:
            op, error = Op("end"), "it does not end"
        stores = self._stores()
        view = {number: self._line(number).tobytes() for number in self._named}
        self._release()
        return Node(
            op, tuple(sorted(stores.items())), tuple(self._facts), frozenset(self._made), view, tuple(self._asked),
            error, None, frozenset(self._missing), self._key,
        )  # fmt: skip


Play = Callable[[Stage], None]


class Tree:
    """All explored steps of one actor."""

    def __init__(
        self, name: str, play: Play, lines: Lines, leaks: Sequence[Leak] = (), left_out: frozenset[str] = frozenset()
    ) -> None:
        self.name, self._play, self._lines, self._leaks, self._left_out = name, play, lines, leaks, left_out
        self.nodes: list[Node] = []
        self._below: dict[tuple[int, Seen], int] = {}
        self._same: dict[Any, int] = {}
        self._is_poller = False
        self.grown = False  # more lines became known that it may read or write
        self.root = self._run(None)

    def _run(self, above: tuple[int, Seen] | None) -> int:
        history: list[Seen] = []
        at = above
        while at is not None:
            history.append(at[1])
            at = self.nodes[at[0]].above
        node = Stage(self.name, self._lines, history[::-1], self._leaks, self._left_out).run(self._play)
        node.above = above
        number = len(self.nodes)
        if node.key is not None:
            view = tuple(sorted(node.view.items()))
            same = (node.key, node.op, node.stores, node.facts, node.made, node.missing, node.asked, view, node.error)
            number = self._same.setdefault(same, number)
        if number == len(self.nodes):
            if self.nodes and self._polls(node):
                node.reads, node.writes = self.nodes[0].reads, self.nodes[0].writes
            self.nodes.append(node)
        if above is not None:
            self.nodes[number].parents.append(above[0])
            self._spread(number)
        return number

    def _polls(self, node: Node) -> bool:
        """Whether the actor loops: then it may repeat all its steps."""
        self._is_poller |= node.op.kind == "wait" and not node.op.call
        return self._is_poller

    def _spread(self, number: int) -> None:
        """Report the lines of this node to all nodes before it."""
        waiting = [number]
        while waiting:
            node = self.nodes[waiting.pop()]
            own = node.op.lines
            if node.reads is self.nodes[0].reads and number and not (node.reads.issuperset(own)):
                node.reads.update(own)
                node.writes.update(own)
                self.grown = True
            writes = node.writes.union(line for line, _ in node.stores)
            for above in node.parents:
                parent = self.nodes[above]
                if not (node.reads <= parent.reads and writes <= parent.writes):
                    parent.reads |= node.reads
                    parent.writes |= writes
                    waiting.append(above)
                    self.grown = True

    def child(self, node: int, seen: Seen) -> int:
        """Return the node that an input leads to."""
        key = (node, seen)
        found = self._below.get(key)
        if found is None:
            found = self._below[key] = self._run(key)
        return found
