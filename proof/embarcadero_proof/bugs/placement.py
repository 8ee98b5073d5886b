"""Bugs injected into `embarcadero/placement/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import Bug
from embarcadero_proof.bugs.patch import Edit

BUGS: Final = (
    Bug("topic-id-unchecked", "a request for a deleted topic changes the next topic of its name", "P5",
        witnesses=(150_000,),
        edits=(Edit("embarcadero.placement.records:check_id", "if topic_id in (0, topic.id):", "if True:"),)),
    Bug("late-alter-done", "a late request for a deleted topic alters the next topic of its name", "P5",
        witnesses=(160_000,),
        edits=(Edit("embarcadero.placement.topics:Topics.alter",
                    "check_id(topic, ask.topic_id)", "check_id(topic, 0)"),)),
    Bug("late-trim-done", "a late request for a deleted topic trims the next topic of its name", "P5",
        witnesses=(160_000,),
        edits=(Edit("embarcadero.placement.topics:Topics.trim",
                    "check_id(topic, topic_id)", "check_id(topic, 0)"),)),
    Bug("start-unconditional", "a deposed sequencer starts its epoch",
        test="tests/placement/test_directory.py",
        edits=(Edit("embarcadero.placement.directory:Elections.start_epoch",
                    "if not plan.leads(epoch) or epoch <= epochs.started:", "if False:"),)),
    Bug("trim-above-tier", "brokers drop records that are not in the topic's table yet",
        test="tests/placement/test_tier.py",
        edits=(Edit("embarcadero.placement.tiers:trim_table",
                    "min(index, tier.frontier(lane).index)", "index"),)),
)  # fmt: skip
