"""Explore every state that actors, memory and crashes can reach, breadth first, so that counterexamples are short.

A 64-bit hash identifies a visited state. A step that touches only lines which no other actor will change (or, for a
write, read) runs immediately, before all others: no other actor can observe when. The lines that an actor may still
read are learned, first by random walks. When exploration finds more of them, it starts again with this knowledge.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from embarcadero.errors import TooMany
from embarcadero_proof.sim.exhaustive.actor import Leak, Lines, Node, Play, Seen, Tree
from embarcadero_proof.sim.exhaustive.memory import Coherent, Incoherent, Memory

Facts = frozenset[Any]
_GONE = -1
"""Replaces the node of an actor that has ended or crashed."""
_WALKS = 12


class State(NamedTuple):
    """One state of the whole system."""

    nodes: tuple[int, ...]  # of each actor's tree
    memory: Memory
    made: frozenset[str]
    world: Any  # the model that calls change: the store, disks
    facts: Facts


class Label(NamedTuple):
    """One step."""

    what: str
    who: int
    line: int = -1
    words: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """A small system: actors, their initial state, and the conditions that must hold."""

    name: str
    plays: dict[str, Play]
    begin: Callable[[Lines], Any]  # makes regions, and returns the model that calls change
    call: Callable[[Any, str, tuple[Any, ...]], tuple[Any, Any]]  # model, actor, call -> model, answer
    check: Callable[[Any, Facts], str]  # model, facts -> the violation, or ""
    final: Callable[[Any, Facts], str]
    mortal: tuple[str, ...] = ()  # actors that may crash at any time
    ready: Callable[[str, frozenset[str]], bool] = lambda _name, _ended: False  # `wait_for`, given the ended actors
    secret: Callable[[str, Any], bool] = lambda _region, _world: False  # regions that only their maker knows yet


class Placement(NamedTuple):
    """The host of each actor, and how bad memory is. One host: coherent."""

    hosts: tuple[int, ...]
    tear: bool = False
    fetch: bool = False

    @property
    def words(self) -> str:
        """The placement in words."""
        hosts = len(set(self.hosts))
        bad = [word for word, is_so in (("torn", self.tear), ("fetches", self.fetch)) if is_so]
        where = "one host" if hosts == 1 else "hosts " + "".join("ABCDEF"[host] for host in self.hosts)
        return ", ".join([where, *bad])


@dataclass(slots=True)
class Found:
    """The result of an exploration."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    ends: int = 0
    wrong: str = ""
    story: tuple[str, ...] = ()


class _AgainWithMore(Exception):
    """Some lines, or some of their readers, were not known."""


class Explorer:
    """One scope in one placement."""

    def __init__(
        self, scope: Scope, placement: Placement, leaks: Sequence[Leak] = (), left_out: frozenset[str] = frozenset(),
        crashes: bool = True,
    ) -> None:  # fmt: skip
        self.scope, self.placement = scope, placement
        self.lines = Lines()
        self._world = scope.begin(self.lines)
        self.names = list(scope.plays)
        self._trees = [Tree(name, play, self.lines, leaks, left_out) for name, play in scope.plays.items()]
        single = len(set(placement.hosts)) == 1
        self._model: Coherent | Incoherent = (
            Coherent(len(self.names), placement.tear)
            if single
            else Incoherent(placement.hosts, placement.tear, placement.fetch)
        )
        self._mortal = [number for number, name in enumerate(self.names) if crashes and name in scope.mortal]
        self._ends: dict[tuple[int, ...], frozenset[str]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}

    # --- beginning ----------------------------------------------------------------------------------------------------
    def first(self, story: list[str] | None = None) -> State:
        """Return the initial state."""
        memory = self._model.first(self.lines.first)
        state = State(tuple(tree.root for tree in self._trees), memory, frozenset(), self._world, frozenset())
        for actor, tree in enumerate(self._trees):
            state = self._after(state, actor, tree.nodes[tree.root])
        return self._forward(state, story)

    def _walk(self) -> None:
        """Learn by random walks which actors read which lines, approximately."""
        rng = random.Random(0)
        done = 0
        while done < _WALKS:
            try:
                state = self.first()
                while ways := [state for label, state in self.successors(state) if label.what != "crash"]:
                    state = rng.choice(ways)
                done += 1
            except _AgainWithMore:
                continue

    # --- steps --------------------------------------------------------------------------------------------------------
    def _node(self, state: State, actor: int) -> Node | None:
        number = state.nodes[actor]
        return None if number == _GONE else self._trees[actor].nodes[number]

    def _after(self, state: State, actor: int, node: Node) -> State:
        """Apply the effects of an actor's code before its next step."""
        if len(self.lines.names) != len(state.memory.shared):
            raise _AgainWithMore
        if not (node.facts or node.made or node.stores):
            return state
        memory = state.memory
        for number, line in node.stores:
            memory = self._model.store(memory, actor, number, line, self._model.load(memory, actor, number))
        return State(state.nodes, memory, state.made | node.made, state.world, state.facts.union(node.facts))

    def _enabled(self, state: State, node: Node, ended: frozenset[str]) -> bool:
        op = node.op
        if op.kind == "end":
            return False
        if op.kind != "wait":
            return True
        if op.call:
            return self.scope.ready(op.call[0], ended)
        if not state.made.isdisjoint(node.missing):
            return True
        shared = state.memory.shared
        return any(shared[number] != node.view[number] for number in node.asked)

    def _step(self, state: State, actor: int, node: Node) -> State:
        op, memory, world, answer = node.op, state.memory, state.world, None
        if op.call[:1] == ("exists",):
            answer = op.call[1] in state.made
        elif op.kind == "call":
            world, answer = self.scope.call(world, self.names[actor], op.call)
        else:
            memory = self._model.primitive(memory, actor, op.kind, op.lines)
        load, view = self._model.load, node.view
        near = view if self.placement.fetch else op.lines  # without fetches it sees only the lines of this step
        news = tuple((number, line) for number in near if (line := load(memory, actor, number)) != view[number])
        tree = self._trees[actor]
        child = tree.child(state.nodes[actor], Seen(news, answer))
        node = tree.nodes[child]
        node_number = _GONE if node.op.kind == "end" and not node.error else child
        nodes = (*state.nodes[:actor], node_number, *state.nodes[actor + 1 :])
        return self._after(State(nodes, memory, state.made, world, state.facts), actor, node)

    def _is_local(self, state: State, actor: int, node: Node) -> bool:
        """Whether no other actor can observe when this step runs: none reads or changes its lines."""
        kind, lines = node.op.kind, node.op.lines
        if self.placement.fetch or kind not in ("flush", "invalidate", "fence"):
            return False
        writes = self._model.written_by(state.memory, actor, kind, lines)
        if kind == "invalidate" and self._model.stored_by_others(state.memory, actor, lines):
            return False
        for other, number in enumerate(state.nodes):
            if other == actor or number == _GONE:
                continue
            theirs = self._trees[other].nodes[number]
            if kind == "invalidate" and any(self._open(line, state) and line in theirs.writes for line in lines):
                return False
            if any(self._open(line, state) and (line in theirs.reads or line in theirs.writes) for line in writes):
                return False
        return True

    def _open(self, line: int, state: State) -> bool:
        """Whether actors other than its maker may know a line."""
        return not self.scope.secret(self.lines.names[line][0], state.world)

    def _looked_at(self, state: State, line: int) -> bool:
        nodes = (tree.nodes[n] for tree, n in zip(self._trees, state.nodes, strict=True) if n != _GONE)
        return any(line in node.reads for node in nodes) and self._open(line, state)

    def _ended(self, state: State) -> frozenset[str]:
        found = self._ends.get(state.nodes)
        if found is None:
            nodes = [self._node(state, actor) for actor in range(len(self.names))]
            pairs = zip(self.names, nodes, strict=True)
            found = frozenset(name for name, node in pairs if node is None or node.op.kind == "end")
            self._ends[state.nodes] = found = self._sets.setdefault(found, found)
        return found

    def _forward(self, state: State, story: list[str] | None = None) -> State:
        """Run all steps whose time no other actor can observe."""
        moved = True
        while moved:
            moved = False
            for actor in range(len(self.names)):
                node = self._node(state, actor)
                while node is not None and self._is_local(state, actor, node):
                    if story is not None:
                        story.append(self._sentence(state, Label("step", actor)))
                    state, moved = self._step(state, actor, node), True
                    node = self._node(state, actor)
        return state

    def successors(self, state: State, story: list[str] | None = None) -> Iterator[tuple[Label, State]]:
        """Yield all next steps; steps that actors can't distinguish run immediately."""
        ended = self._ended(state)
        for actor in range(len(self.names)):
            node = self._node(state, actor)
            if node is not None and self._enabled(state, node, ended):
                yield Label("step", actor), self._forward(self._step(state, actor, node), story)
        for what, who, line, words, memory in self._model.by_itself(state.memory, partial(self._looked_at, state)):
            yield Label(what, who, line, words), self._forward(state._replace(memory=memory), story)
        for actor in self._mortal:
            if self.names[actor] not in ended:
                nodes = (*state.nodes[:actor], _GONE, *state.nodes[actor + 1 :])
                memory = self._model.crash(state.memory, actor)
                yield Label("crash", actor), self._forward(state._replace(nodes=nodes, memory=memory), story)

    # --- judging ------------------------------------------------------------------------------------------------------
    def _wrong(self, state: State) -> str:
        for actor in range(len(self.names)):
            node = self._node(state, actor)
            if node is not None and node.error:
                return f"{self.names[actor]} fails: {node.error}"
        return self.scope.check(state.world, state.facts)

    def _wrong_at_end(self, state: State, labels: list[Label]) -> str:
        """Check a state in which no step is certain to happen any more: every actor has ended, and all holds."""
        if not self._model.settled(state.memory) or any(label.what in ("step", "drain") for label in labels):
            return ""
        ended = self._ended(state)
        stuck = [name for name in self.names if name not in ended]
        return f"stuck: {', '.join(stuck)}" if stuck else self.scope.final(state.world, state.facts)

    def explore(self, states_max: int = 2_000_000) -> Found:
        """Explore everything, or up to the first violation. Raises TooMany beyond a bound."""
        self._walk()
        while True:
            for tree in self._trees:
                tree.grown = False
            try:
                found = self._explore(states_max)
            except _AgainWithMore:
                continue
            if found.wrong or not any(tree.grown for tree in self._trees):
                return found

    def _explore(self, states_max: int) -> Found:
        first = self.first()
        found, came_from = Found(states=1), dict[int, tuple[int, Label] | None]({hash(first): None})
        level, checked = [first], set[Any]()
        if wrong := self._wrong(first):
            return self._end(found, wrong, first, came_from)
        while level:
            found.depth += 1
            following = []
            for state in level:
                here, labels = hash(state), []
                for label, after in self.successors(state):
                    labels.append(label)
                    found.steps += 1
                    there = hash(after)
                    if there in came_from:
                        continue
                    came_from[there] = here, label
                    found.states += 1
                    following.append(after)
                    if wrong := self._judge(after, checked):
                        return self._end(found, wrong, after, came_from)
                wrong = self._wrong_at_end(state, labels)
                found.ends += not labels
                if wrong:
                    return self._end(found, wrong, state, came_from)
            if found.states > states_max:
                raise TooMany(f"{self.scope.name} has more than {states_max} states", "explore a smaller size")
            level = following
        return found

    def _judge(self, state: State, checked: set[Any]) -> str:
        """Check a state unless an equal one was checked before."""
        key = (state.world, state.facts, state.nodes)
        if key in checked:
            return ""
        checked.add(key)
        return self._wrong(state)

    # --- stories ------------------------------------------------------------------------------------------------------
    def _end(
        self, found: Found, wrong: str, state: State, came_from: dict[int, tuple[int, Label] | None]
    ) -> Found:  # fmt: skip
        labels: list[Label] = []
        at = came_from[hash(state)]
        while at is not None:
            labels.append(at[1])
            at = came_from[at[0]]
        found.wrong, found.story = wrong, tuple(self._story(labels[::-1]))
        return found

    def _story(self, labels: list[Label]) -> Iterator[str]:
        story: list[str] = []
        state = self.first(story)
        yield from story
        for label in labels:
            yield self._sentence(state, label)
            story, following = [], state
            for other, after in self.successors(state, story):
                if other == label:
                    following = after
                    break
                story.clear()
            yield from story
            yield from ("    so: " + " ".join(map(str, fact)) for fact in following.facts - state.facts)
            state = following

    def _sentence(self, state: State, label: Label) -> str:
        where = self.lines.describe(label.line) if label.line >= 0 else ""
        if label.what == "step":
            node = self._trees[label.who].nodes[state.nodes[label.who]]
            lines = ", ".join(map(self.lines.describe, node.op.lines[:3])) + (", ..." if len(node.op.lines) > 3 else "")
            return f"{self.names[label.who]} {node.op.kind} {' '.join(map(str, node.op.call))}{lines}".rstrip()
        if label.what == "crash":
            return f"{self.names[label.who]} crashes"
        if label.what == "drain":
            return f"a store of {self.names[label.who]} to {where} reaches memory"
        host = "+".join(name for name, at in zip(self.names, self.placement.hosts, strict=True) if at == label.who)
        sentences = {
            "write back": f"the cache of {host} writes back {where} by itself",
            "tear": f"the cache of {host} writes back word {label.words} of {where} by itself",
            "fetch": f"the cache of {host} fetches {where} again by itself",
        }
        return sentences[label.what]
