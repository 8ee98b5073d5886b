"""Scope "ring": one writer, one reader, reused slots. All code comes from fabric/lines.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from embarcadero.fabric.layout import ORDER, RegionKind, frontier_offset
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, RingReader, RingWriter, ring_shape
from embarcadero.fabric.region import Shape
from embarcadero_proof.sim.exhaustive.actor import Lines, Stage
from embarcadero_proof.sim.exhaustive.explore import Facts, Scope
from embarcadero_proof.sim.exhaustive.regions import make_region

RING, READ = "ring", "read"
_MARK = 1_000


def ring_scope(entries: int, slots: int, at_once: int = 1) -> Scope:
    """Send `entries` entries through a ring of `slots`, `at_once` in a slice."""

    def begin(lines: Lines) -> Any:
        make_region(lines, RING, ring_shape(RegionKind.ORDER, ORDER, slots))
        make_region(lines, READ, Shape(RegionKind.BROKER_FRONTIERS, frontier_offset(1)))
        return ()

    def writer(stage: Stage) -> None:
        ring = RingWriter(stage.attach(RING, writable=True), ORDER)
        read = FrontierReader(stage.attach(READ), frontier_offset(0))
        free = 0
        while ring.next < entries:
            stage.remembers(ring.next, free)
            count = min(at_once, entries - ring.next)
            while ring.next + count - free > slots:
                if stage.without("waiting for space"):
                    free = ring.next
                    break
                stage.remembers(ring.next)
                free = read.load()
                if ring.next + count - free > slots:
                    stage.wait()
            made = np.zeros(count, dtype=ORDER)
            made["seq"] = _MARK + ring.next + np.arange(count)
            if stage.without("entries before the frontier"):
                ring.frontier.advance(ring.next + count)
            ring.write(made, free)
            ring.publish()

    def reader(stage: Stage) -> None:
        ring = RingReader(stage.attach(RING), ORDER)
        read = FrontierWriter(stage.attach(READ, writable=True), frontier_offset(0))
        at = 0
        while at < entries:
            stage.remembers(at)
            published = ring.frontier.load()
            if published <= at:
                stage.wait()
                continue
            if stage.without("reading before freeing"):
                read.advance(published)
            if stage.without("checking entries"):
                found = ring.load(at, min(published, at + slots))
            else:
                found = ring.read(at, min(published, at + slots))
            stage.report("read", at, published - at, tuple(found["seq"].tolist()))
            at = published
            read.advance(at)

    def check(_world: Any, facts: Facts) -> str:
        for _, at, count, seqs in facts:
            if seqs != tuple(range(_MARK + at, _MARK + at + count)):
                return f"entries {at} to {at + count} were published, and read as {seqs}"
        return ""

    return Scope(f"ring, {entries} entries in {slots} slots, {at_once} at once", {"writer": writer, "reader": reader},
                 begin, lambda world, _actor, _call: (world, None), check, check)  # fmt: skip
