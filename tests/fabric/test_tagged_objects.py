"""Tables of tagged lines keep no objects of deleted lanes."""

from __future__ import annotations

import random

from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.lines import TaggedReader, create_tagged
from embarcadero_proof.sim.incoherent import IncoherentMemory


def test_objects_of_deleted_lanes_are_dropped() -> None:
    """The lines stay where they are; the others are read and written as before."""
    host = IncoherentMemory(random.Random(1), 7).host("h")
    writer = create_tagged(host, "r/durable", RegionKind.DURABLE, 64)
    reader = TaggedReader(host.attach("r/durable"))
    for lane in range(10):
        writer.add((lane, 1), lane)
    assert len(reader.keys()) == 10
    writer.keep({3, 4})
    reader.keep({3, 4})
    assert reader.keys() == [(3, 1), (4, 1)]
    assert (0, 1) not in writer
    assert reader.load((0, 1)) is None
    writer.set((4, 1), 99)
    writer.add((11, 2), 7)
    assert (reader.load((4, 1)), reader.load((11, 2))) == (99, 7)
